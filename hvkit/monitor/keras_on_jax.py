"""Keras on JAX: steps of ``fit``, whose work is inside a function that XLA has compiled."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import keras

from hvkit.monitor.keras import FitRecorder
from hvkit.monitor.step_times import Step

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor


class JitStepRecorder(FitRecorder):
    """Records each step of ``fit``, around the function that ``fit`` makes of the model's step.

    A step may return before its work is done. A step that ends with a record waits for all of it,
    so that the mean over the steps of a record is right.
    """

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__(monitor, model)
        self._ended = time.monotonic()
        # Whether XLA has compiled the function, which takes longer than a step.
        self._compiled = False
        make = model.make_train_function

        @functools.wraps(make)
        def make_counted(force: bool = False) -> None:
            made = model.train_function
            make(force=force)
            run = model.train_function
            if run is made:
                return
            self._compiled = False

            @functools.wraps(run)
            def counted(state: Any, iterator: Iterator[Any]) -> Any:
                if monitor.closed:
                    return run(state, iterator)
                batches = _CountedBatches(iterator, monitor)
                logs, state = run(state, batches)
                self._step(model, batches, logs, state)
                return logs, state

            model.train_function = counted

        model.make_train_function = make_counted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a pass over the training data."""
        super().on_epoch_begin(epoch)
        self._ended = time.monotonic()

    def _step(self, model: keras.Model, batches: _CountedBatches, logs: Any, state: Any) -> None:
        """Count the steps of a call; a collective at a record."""
        self._monitor.stride = steps = batches.number
        if self._monitor.record_pending:
            jax.block_until_ready(state[-1])
            # The variables themselves have these values only at the end of the epoch.
            pairs = zip(model.metrics_variables, state[-1], strict=True)
            self._means.values = {id(variable): value for variable, value in pairs}
        now = time.monotonic()
        step = Step(
            duration=(now - self._ended) / steps,
            data=batches.seconds / steps,
            blocked=0.0,
            samples=batches.samples / steps,
        )
        self.add_steps(steps, step if self._compiled else None, logs)
        self._means.values = {}
        self._compiled, self._ended = True, time.monotonic()


class _CountedBatches:
    """Counts the batches that a call takes, and this rank's samples in them."""

    def __init__(self, batches: Iterator[Any], monitor: Monitor) -> None:
        self._batches, self._monitor = batches, monitor
        self.number = 0
        self.samples = self.seconds = 0.0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        began = time.monotonic()
        batch = next(self._batches)
        self.seconds += time.monotonic() - began
        self.number += 1
        self.samples += self._monitor.samples_in(batch)
        return batch
