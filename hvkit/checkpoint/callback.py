"""Saving from inside Keras's ``fit``, and going on in the middle of an epoch."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import keras

from hvkit.checkpoint.keras_optimizer import OptimizerPart
from hvkit.checkpoint.progress import Progress

if TYPE_CHECKING:
    from hvkit.checkpoint.checkpoint import Checkpoint


def callback(
    checkpoint: Checkpoint, every: str | int, restored: Progress
) -> keras.callbacks.Callback:
    """See :meth:`hvkit.Checkpoint.callback`."""
    if every == "epoch":
        return _SaveCallback(checkpoint, None, restored)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f'every must be "epoch" or a number of steps, got {every!r}')
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    return _SaveCallback(checkpoint, every, restored)


class _SaveCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, checkpoint: Checkpoint, every: int | None, restored: Progress) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._every = every
        self._left_out = {restored.epoch: restored.batches} if restored.batches else {}
        self._epoch = 0
        self._batches = 0
        self._saved = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._saved = self._step()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch
        self._batches = self._left_out.pop(epoch, 0)
        if self._batches:
            _leave_out(self.model, self._batches, (self.params or {}).get("steps"))

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
        self._save(epoch + 1, self._step(), 0)

    def _save(self, epoch: int, step: int, batches: int) -> None:
        self._checkpoint.save(epoch=epoch, step=step, batches=batches)
        self._saved = step

    def _step(self) -> int:
        # A model with a train_step of its own may leave compile's optimizer unused.
        saved = [p.optimizer for p in self._checkpoint.parts if isinstance(p, OptimizerPart)]
        return int((saved or [self.model.optimizer])[0].iterations)


def _leave_out(model: Any, batches: int, steps: int | None) -> None:
    """Have ``fit`` read so many batches of the epoch that begins without training on them.

    Args:
        model: inside ``fit``.
        batches: to leave out.
        steps: of a whole epoch; None if ``fit`` does not know it.
    """
    train = model.train_function
    position = batches

    def train_on_the_rest(iterator: Any) -> Any:
        nonlocal position
        if position == batches:
            for _ in range(batches):
                next(iterator)
        if position == steps:
            model.train_function = train
            # Keras takes this for data that ran out, which it says.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            raise StopIteration
        logs = train(iterator)
        position += 1
        return logs

    model.train_function = train_on_the_rest
