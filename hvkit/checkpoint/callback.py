"""Saving from inside Keras's ``fit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from hvkit.checkpoint.keras_optimizer import OptimizerPart

if TYPE_CHECKING:
    from hvkit.checkpoint.checkpoint import Checkpoint


def callback(checkpoint: Checkpoint, every: str | int) -> keras.callbacks.Callback:
    """See :meth:`hvkit.Checkpoint.callback`."""
    if every == "epoch":
        return _SaveCallback(checkpoint, None)
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f'every must be "epoch" or a number of steps, got {every!r}')
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    return _SaveCallback(checkpoint, every)


class _SaveCallback(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, checkpoint: Checkpoint, every: int | None) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._every = every
        self._epoch = 0
        self._saved = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._saved = self._step()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._every is None:
            return
        step = self._step()
        # Not step % every: one call may stand for several steps (steps_per_execution).
        if step // self._every > self._saved // self._every:
            self._save(self._epoch, step)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._save(epoch + 1, self._step())

    def _save(self, epoch: int, step: int) -> None:
        self._checkpoint.save(epoch=epoch, step=step)
        self._saved = step

    def _step(self) -> int:
        # A model with a train_step of its own may leave compile's optimizer unused.
        saved = [p.optimizer for p in self._checkpoint.parts if isinstance(p, OptimizerPart)]
        return int((saved or [self.model.optimizer])[0].iterations)
