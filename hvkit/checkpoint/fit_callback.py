"""Saving from inside Keras's ``fit``, and going on in the middle of an epoch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from hvkit.checkpoint.keras import OptimizerPart

if TYPE_CHECKING:
    from hvkit.checkpoint.checkpoint import Checkpoint


def callback(checkpoint: Checkpoint, every: str | int) -> keras.callbacks.Callback:
    """See :meth:`hvkit.Checkpoint.callback`."""
    if every == "epoch":
        return SaveCallback(checkpoint, None)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f'every must be "epoch" or a number of steps, got {every!r}')
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    return SaveCallback(checkpoint, every)


class SaveCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves, and has ``fit`` leave out what was trained on before.

    Args:
        checkpoint: to save.
        every: steps from one save to the next; None for ends of epochs only.
    """

    never_stops = True
    """That it does not end training, so that ranks need not ask each other after every step."""

    def __init__(self, checkpoint: Checkpoint, every: int | None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._every = every
        self._epoch = 0
        self._batches = 0
        self._saved = 0
        self._train: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        self._saved = self._step()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._batches = 0
        if left_out := self._checkpoint.take_batches(epoch):
            self._train = self.model.train_function
            self.model.train_function = self._after(left_out)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Not the argument: Keras counts differently where it does not know the data's length.
        self._batches += self.model.steps_per_execution
        if self._every is None:
            return
        step = self._step()
        # Not step % every: one call may stand for several steps (steps_per_execution).
        if step // self._every > self._saved // self._every:
            self._save(self._epoch, step, self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._train_again()
        self._save(epoch + 1, self._step(), 0)

    def _after(self, left_out: int) -> Any:
        """A ``train_function`` that only reads so many batches first.

        They count as steps of ``fit``, so that it ends the epoch where it would have ended.
        """
        at_once = self.model.steps_per_execution
        calls = left_out // at_once

        def train_after(iterator: Any) -> Any:
            nonlocal calls
            if calls == 0:
                self._train_again()
                return self.model.train_function(iterator)
            calls -= 1
            for _ in range(at_once):
                batch = next(iterator)
            return _metrics_before_training(self.model, batch)

        return train_after

    def _train_again(self) -> None:
        if self._train is not None:
            self.model.train_function, self._train = self._train, None

    def _save(self, epoch: int, step: int, batches: int) -> None:
        self._checkpoint.save(epoch=epoch, step=step, batches=batches)
        self._saved = step

    def _step(self) -> int:
        # A model with a train_step of its own may leave compile's optimizer unused, and phases of
        # training may have an optimizer each.
        saved = [p.optimizer for p in self._checkpoint.parts if isinstance(p, OptimizerPart)]
        return sum(int(each.iterations) for each in saved or [self.model.optimizer])


def _metrics_before_training(model: Any, batch: Any) -> Any:
    """What the model's metrics report when they have seen nothing.

    Compiled metrics report nothing before they have seen a first batch.
    """
    try:
        return model.get_metrics_result()
    except ValueError:
        x, y, weights = keras.utils.unpack_x_y_sample_weight(batch)
        model.test_on_batch(x, y, weights)
        model.reset_metrics()
        return model.get_metrics_result()
