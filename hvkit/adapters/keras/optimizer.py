"""Averaging and learning rate, attached to one Keras optimizer instance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvkit.adapters.keras.averager import GradientAverager
from hvkit.adapters.keras.loss_scale import mark_averaged


class AveragedOptimizer:
    """What is added to an optimizer that updates variables (not one that scales the loss)."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._factor = 1.0
        self._warmup_steps = 0
        self._schedule: Any = None
        self._updating = False

    def scale_learning_rate(self, factor: float) -> tuple[float, float]:
        """Multiply the learning rate; returns it before and after.

        A rate that is computed (a ``LearningRateSchedule`` or a function) is left as it is, and
        so is saved as it is; what the optimizer reads from it is multiplied.
        """
        self._factor = factor
        before = float(self._optimizer.learning_rate)
        rate = self._optimizer._learning_rate
        if isinstance(rate, keras.Variable):
            rate.assign(before * factor)
        else:
            self._schedule = rate
        return before, before * factor

    def attach(self, name: str, warmup_steps: int, before_update: Callable[[Sequence[Any]], None]) -> None:
        """Average gradients in ``apply`` from now on."""
        optimizer, average = self._optimizer, GradientAverager(name)
        apply, read_rate = optimizer.apply, optimizer._get_current_learning_rate
        self._warmup_steps = warmup_steps

        def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            known = trainable_variables is None and optimizer.built
            variables = optimizer._trainable_variables if known else trainable_variables
            if grads and variables is not None:
                variables = list(variables)
                before_update(variables)
                grads = self._averaged(average, grads, variables)
            with self._update():
                apply(grads, None if known else variables)

        optimizer.apply = averaged_apply
        if self._schedule is not None or warmup_steps:
            optimizer._get_current_learning_rate = lambda: self._rate(read_rate())
        mark_averaged(optimizer)

    def _averaged(
        self, average: GradientAverager, grads: list[Any], variables: list[Any]
    ) -> list[Any]:
        steps = self._optimizer.gradient_accumulation_steps
        if not steps:
            return average(grads, variables)
        return self._averaged_when_due(average, grads, variables, steps)

    def _averaged_when_due(
        self, average: GradientAverager, grads: list[Any], variables: list[Any], steps: int
    ) -> list[Any]:
        """Reduce once in ``gradient_accumulation_steps``, with all that was accumulated.

        Keras adds the accumulator to the last gradient by itself. In the step that updates, the
        accumulators are therefore emptied into the gradients that are averaged.
        """
        optimizer = self._optimizer
        if not optimizer.built:
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        present = [i for i, g in enumerate(grads) if g is not None]
        accumulators = [
            optimizer._accumulated_gradients[optimizer._get_variable_index(variables[i])]
            for i in present
        ]
        local = [tf.convert_to_tensor(grads[i]) for i in present]

        def reduce() -> list[tf.Tensor]:
            sums = [g + acc.value for g, acc in zip(local, accumulators, strict=True)]
            with tf.control_dependencies(sums):
                for acc in accumulators:
                    acc.assign(tf.zeros_like(acc.value))
            return average(sums, [variables[i] for i in present])

        due = tf.equal((optimizer._iterations.value + 1) % steps, 0)
        means = tf.cond(due, reduce, lambda: local)
        result: list[Any] = [None] * len(grads)
        for i, mean in zip(present, means, strict=True):
            result[i] = mean
        return result

    @contextmanager
    def _update(self) -> Iterator[None]:
        self._updating = True
        try:
            yield
        finally:
            self._updating = False

    def _rate(self, rate: Any) -> Any:
        """The learning rate as read: multiplied if it is computed, lowered in a warm-up step.

        Only the update itself sees the warm-up. Callbacks that read the rate and write a changed
        one back must not see it.
        """
        if self._schedule is not None and self._optimizer._learning_rate is self._schedule:
            rate = rate * self._factor
        if self._updating and self._warmup_steps:
            rate = rate * self._warmup()
        return rate

    def _warmup(self) -> tf.Tensor:
        """:func:`hvkit.learning_rate.warmup_multiplier` as a tensor."""
        step = tf.cast(tf.convert_to_tensor(self._optimizer.iterations), tf.float32)
        done = tf.minimum(step / self._warmup_steps, 1.0)
        return (1.0 + (self._factor - 1.0) * done) / self._factor
