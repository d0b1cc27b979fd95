"""Keras callbacks on several ranks: decisions in common, files from rank 0 alone."""

from __future__ import annotations

from typing import Any

import keras

from hvkit import runtime
from hvkit.errors import RanksDisagreeError
from hvkit.metrics import any_rank

# Nothing but files and messages comes of these.
_WRITERS = ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint", "ProgbarLogger")
# These never end training in the middle of an epoch.
_STEADY = ("ModelCheckpoint", "ProgbarLogger", "CSVLogger", "TensorBoard", "History")


def for_this_rank(callbacks: Any, watched: bool) -> Any:
    """The callbacks that this rank should have, in their order.

    Args:
        callbacks: what the user passed: None, a callback, a list of them or a ``CallbackList``.
        watched: whether this is for ``fit``, where ranks have to end together.

    Raises:
        ValueError: ``BackupAndRestore`` is among them.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if watched:
            _refuse_restoring(callbacks.callbacks)
            callbacks.append(InStep(callbacks.callbacks))
        return callbacks
    given = _as_list(callbacks)
    _refuse_restoring(given)
    if runtime.rank() != 0:
        given = [_without_output(each) for each in given if not _is_one_of(each, _WRITERS)]
    return [*given, InStep(given)] if watched else given


def _as_list(callbacks: Any) -> list[Any]:
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def _is_one_of(callback: Any, names: tuple[str, ...]) -> bool:
    kinds = tuple(getattr(keras.callbacks, name, ()) or () for name in names)
    return any(isinstance(callback, kind) for kind in kinds if isinstance(kind, type))


def _refuse_restoring(callbacks: list[Any]) -> None:
    for each in callbacks:
        if _is_one_of(each, ("BackupAndRestore",)):
            raise ValueError(
                "keras.callbacks.BackupAndRestore restores each rank by itself, from files that "
                "all of them would write: use hvkit.Checkpoint(directory, model=model, "
                "optimizer=optimizer), its restore() and its callback()"
            )


def _without_output(callback: Any) -> Any:
    """The callback, deciding as ever, but without messages and without saving the model."""
    if hasattr(callback, "verbose"):
        callback.verbose = 0
    if _is_one_of(callback, ("ModelCheckpoint",)):
        set_model = type(callback).set_model
        callback.set_model = lambda model: set_model(callback, _Unsaved(model))
    return callback


class _Unsaved:
    """A model that is not saved: everything else goes to the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Leave it to rank 0."""

    save_weights = save


class InStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Ranks take the same number of steps, and stop when any of them stops.

    Args:
        others: the user's callbacks, after which this one is called.
    """

    def __init__(self, others: list[Any]) -> None:
        super().__init__()
        base = keras.callbacks.Callback
        hooks = ("on_batch_end", "on_train_batch_end")
        # A collective a step only where a callback could end training inside an epoch.
        self._every_step = any(
            not _is_one_of(each, _STEADY)
            and any(getattr(type(each), hook, None) is not getattr(base, hook) for hook in hooks)
            for each in others
        )

    def on_train_begin(self, logs: Any = None) -> None:
        """Make sure that the ranks agree about the number of steps, as far as it is known."""
        steps = runtime.gather("fit", (self.params or {}).get("steps"))
        differing = {count for count in steps if count is not None}
        if len(differing) > 1:
            raise RanksDisagreeError(
                f"fit was given data of different length on each rank: {steps} steps an epoch, by "
                "rank; every rank must take the same number of steps: use hvkit.shard(data)"
            )

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Stop with the others."""
        if self._every_step:
            self.model.stop_training = any_rank(self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stop with the others."""
        self.model.stop_training = any_rank(self.model.stop_training)
