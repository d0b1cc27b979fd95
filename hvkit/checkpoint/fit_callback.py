"""The callback that saves from inside Keras's ``fit``, and resumes in the middle of an epoch."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from hvkit.checkpoint.keras import OptimizerPart
from hvkit.communication import collectives
from hvkit.frameworks.keras.backends import ON_TENSORFLOW
from hvkit.frameworks.keras.optimizers import inner_optimizer, leaves_out_updates, parts_of
from hvkit.sync.port import skipped_steps, syncs_of
from hvkit.watch.preemption import PREEMPTION

if TYPE_CHECKING:
    from hvkit.checkpoint.checkpoint import Checkpoint

# On PyTorch, dropout uses the same generators as ``fit`` when it shuffles an epoch. On TensorFlow
# a shuffle has a state that cannot be read.
_DRAWS_FROM_GLOBAL_GENERATOR = keras.backend.backend() == "torch"


class SaveCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves, and makes ``fit`` skip the batches that the saved run trained on.

    Wherever it stands in ``callbacks``, Keras calls it after all others: these may still change
    what the next epoch begins with, such as the learning rate. It saves when an epoch ends, and
    every so many steps.
    """

    never_stops = True
    """It never ends training, so the ranks need not agree after every step whether to stop."""

    def __init__(self, checkpoint: Checkpoint, every: int | None) -> None:
        super().__init__()
        _call_last()
        self.swaps: list[EmaSwap] = []
        self._checkpoint, self._state, self._every = checkpoint, checkpoint._fit_progress, every
        self._optimizers = [
            part.optimizer for part in checkpoint.parts if isinstance(part, OptimizerPart)
        ]
        self._epoch = 0
        self._batches = 0
        self._skipped = 0
        self._together = True
        self._saved = 0
        # Steps before this ``fit``, and batches in it, if the optimizer's iterations are no count.
        self._first: int | None = None
        self._trained = 0
        # Steps that were skipped before the restored checkpoint, to be added to this process's.
        # None if the optimizers skip none.
        self._carried: int | None = None
        self._train: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        scaler = keras.optimizers.LossScaleOptimizer
        if any(isinstance(each, scaler) for each in [*self._optimizers, self.model.optimizer]):
            # It skips updates, different ones on each rank, and iterations do not count them.
            known = max(self._iterations(), self._saved, self._state.start.step)
            self._first = max(collectives.gather("Model.fit", known))
        elif any(map(leaves_out_updates, self._used())):
            if restored := self._state.start.step:
                self._carried = restored - self._iterations() - skipped_steps.number
            elif self._carried is None:
                self._carried = 0
        self._trained = 0
        self._saved = self._step()
        self._together = all(sync.equal_steps for sync in syncs_of(self.model))
        if self._together:
            PREEMPTION.handle_sigterm()

    def on_train_end(self, logs: Any = None) -> None:
        for swap in self.swaps:
            swap.forget()
        PREEMPTION.stop_handling()
        self._checkpoint.wait()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._batches = 0
        steps = (self.params or {}).get("steps") or 0
        self._skipped = batches = self._state.take_batches(epoch, steps)
        if batches:
            self._train = self.model.train_function
            self.model.train_function = self._skipping(batches)
        if _DRAWS_FROM_GLOBAL_GENERATOR:
            if not batches:
                self._state.set_random()
            self._state.begin_epoch()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not the argument: Keras counts differently when it does not know the data's length.
        self._batches += self.model.steps_per_execution
        if _DRAWS_FROM_GLOBAL_GENERATOR and self._batches == self._skipped:
            self._state.set_random()
        if self._train is None:
            self._trained += self.model.steps_per_execution
        leaves = self._together and PREEMPTION.at_last_step()
        if self._batches >= ((self.params or {}).get("steps") or math.inf):
            # The end of the epoch saves. A run that resumed from here would have no batch in this
            # epoch, and so no metrics.
            return
        if leaves:
            # The batches that a resumed epoch skips count as trained on.
            self._save(self._epoch, self._step(), max(self._batches, self._skipped))
        elif self._every is not None:
            step = self._step()
            # Not step % every: one call may be several steps (steps_per_execution).
            if step // self._every > self._saved // self._every:
                self._save(self._epoch, step, self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._train_again()
        step = self._step()
        # Unequal, for example, with ``shard(dynamic=True)``.
        if not all(sync.equal_steps for sync in syncs_of(self.model)):
            step = max(collectives.gather("Model.fit", step))
        with contextlib.ExitStack() as stack:
            for swap in self.swaps:
                stack.enter_context(swap.undone())
            self._save(epoch + 1, step, 0)

    def _skipping(self, batches: int) -> Any:
        """A ``train_function`` that first reads this many batches without training on them.

        ``fit`` counts them as steps, so the epoch ends where it would have ended.
        """
        model = self._model  # on JAX self.model would take back the state of a step that runs
        at_once = model.steps_per_execution
        calls = batches // at_once

        # TensorFlow's data is an iterator, PyTorch's a list. On JAX the state comes before it.
        def train_after(*arguments: Any) -> Any:
            nonlocal calls
            if calls == 0:
                self._train_again()
                return model.train_function(*arguments)
            calls -= 1
            *state, data = arguments
            batches = iter(data)
            for _ in range(at_once):
                batch = next(batches)
            if state:
                return {}, *state  # the model has no metrics until the state is put back
            return _metrics_before_training(model, batch)

        return train_after

    def _train_again(self) -> None:
        if self._train is not None:
            self._model.train_function, self._train = self._train, None

    def _save(self, epoch: int, step: int, batches: int) -> None:
        self._checkpoint.save(epoch=epoch, step=step, batches=batches)
        self._saved = step

    def _step(self) -> int:
        if self._first is None:
            left_out = 0 if self._carried is None else skipped_steps.number + self._carried
            return self._iterations() + left_out
        at_once = self._used()[0].gradient_accumulation_steps or 1
        return self._first + self._trained // at_once

    def _iterations(self) -> int:
        return sum(int(each.iterations) for each in self._used())

    def _used(self) -> list[Any]:
        # The saved optimizers first: a model with its own train_step may leave compile's optimizer
        # unused, and each phase of training may have its own.
        return [inner_optimizer(each) for each in self._optimizers or [self.model.optimizer]]


class EmaSwap:
    """Undoes what a ``SwapEMAWeights`` does at the end of an epoch, while a checkpoint is saved.

    From there until the next epoch begins, the model holds the averages, and the optimizer the
    weights with which training continues. After the last epoch only the averages are left.
    """

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        self._last: list[Any] | None = None
        callback._finalize_ema_values = self._keep_and_finalize

    def _keep_and_finalize(self) -> None:
        self._last = _copies(self._averages())
        type(self._callback)._finalize_ema_values(self._callback)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Hold what a further epoch would begin with."""
        if not self._callback._ema_weights_in_model:
            yield
            return
        averages = self._averages()
        variables = [*self._weights(), *averages]
        before = _copies(variables)
        if self._last is not None:
            _assign(averages, self._last)
        self._callback._swap_variables()
        try:
            yield
        finally:
            _assign(variables, before)

    def forget(self) -> None:
        vars(self._callback).pop("_finalize_ema_values", None)

    def _optimizers(self) -> list[Any]:
        parts = parts_of(inner_optimizer(self._callback.model.optimizer))
        return [part for part in parts if part.use_ema]

    def _weights(self) -> list[Any]:
        return [v for each in self._optimizers() for v in each._trainable_variables]

    def _averages(self) -> list[Any]:
        return [v for each in self._optimizers() for v in each._model_variables_moving_average]


def _copies(variables: Sequence[Any]) -> list[Any]:
    # Arrays of JAX never change, and a rank may hold a part of one.
    values = [v.value for v in variables]
    return values if keras.backend.backend() == "jax" else list(map(keras.ops.copy, values))


def _assign(variables: Sequence[Any], values: Sequence[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


@functools.cache
def _call_last() -> None:
    """Have each list of callbacks call those that save after all others.

    This changes the class, because ``fit`` makes the list.
    """
    kind = keras.callbacks.CallbackList
    set_model = kind.set_model

    def set_model_and_order(self: Any, model: Any) -> None:
        set_model(self, model)
        saving = [each for each in self.callbacks if isinstance(each, SaveCallback)]
        if not saving:
            return
        self.callbacks.sort(key=lambda each: isinstance(each, SaveCallback))
        swapping = keras.callbacks.SwapEMAWeights
        swaps = [c for c in self.callbacks if isinstance(c, swapping) and c.swap_on_epoch]
        undoing = [EmaSwap(each) for each in swaps]
        for each in saving:
            each.swaps = undoing

    kind.set_model = set_model_and_order


def _metrics_before_training(model: Any, batch: Any) -> Any:
    """The model's metrics without any batch.

    Compiled metrics have no result before their first batch, so evaluate this one and reset them.
    """
    try:
        return model.get_metrics_result()
    except ValueError:
        if ON_TENSORFLOW:
            model.test_step(batch)  # not test_on_batch: that of Keras 3.5 may trace twice, and end
        else:
            model.test_on_batch(*keras.utils.unpack_x_y_sample_weight(batch))  # without gradients
        model.reset_metrics()
        return model.get_metrics_result()
