"""Keras callbacks on several ranks: all ranks stop together, and only rank 0 writes files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras

from hvkit.communication import collectives
from hvkit.communication.group import Group
from hvkit.errors import RanksDisagreeError
from hvkit.metrics import any_rank_of
from hvkit.strategies import ParameterServer
from hvkit.strategies.strategy import Rounds, Strategy
from hvkit.sync.local_weights import LocalWeightsKeeper
from hvkit.watch.rank_errors import mark_as_shown_by

if TYPE_CHECKING:
    from hvkit.frameworks.keras.gradients.averager import GradientAverager

# These only write files and messages.
_WRITERS = ("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint", "ProgbarLogger")
# These never end training in the middle of an epoch.
_STEADY = ("ModelCheckpoint", "ProgbarLogger", "CSVLogger", "TensorBoard", "History")


@dataclass(eq=False)
class Epoch:
    """How ``fit`` of a model runs; all ranks have to end an epoch after the same step.

    ``compare`` ends an epoch and raises on every rank if the ranks differ. ``watching`` returns
    callbacks that are called after all others. ``begin`` is called before each epoch. ``adapt``
    changes a callback that saves the model, or keeps its weights, where each rank holds a part.
    """

    group: Group
    compare: Callable[[], None]
    strategy: Strategy | None = None
    averagers: Sequence[GradientAverager] = ()
    watching: Callable[[], list[Any]] = list
    begin: Callable[[], None] = lambda: None
    adapt: Callable[[Any], None] | None = None
    # Of local weights; None before the model has weights.
    keeper: LocalWeightsKeeper | None = None
    # Facts that decide how many rows each batch of this rank has; None if unknown.
    rows: tuple[Any, ...] | None = None
    # Whether the batches of all ranks have the same number of rows.
    even: bool = False
    begun: bool = False

    @property
    def local(self) -> bool:
        return isinstance(self.strategy, Rounds | ParameterServer)

    @property
    def equal_steps(self) -> bool:
        return not isinstance(self.strategy, ParameterServer)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Wrap a pass over other data, in the middle of the epoch or after it."""
        begun, self.begun = self.begun, False
        try:
            yield
        finally:
            self.begun = begun

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """A context with the weights that the ranks would agree on now; a collective if local."""
        if self.keeper is None:
            yield
            return
        with self.keeper.settled():
            yield

    def end(self) -> None:
        """End the pass; a collective. Does nothing after a pass over the validation data."""
        if self.begun:
            self.begun = False
            for each in self.averagers:
                each.end_of_epoch()


def with_callbacks(
    given: keras.callbacks.CallbackList, callbacks: list[Any], model: keras.Model
) -> keras.callbacks.CallbackList:
    params = getattr(given, "params", None) or {}  # Keras 3.5 sets none before ``fit``
    return keras.callbacks.CallbackList(callbacks, model=model, **params)


def for_this_rank(callbacks: Any, group: Group, epoch: Epoch | None, model: keras.Model) -> Any:
    """The callbacks that this rank runs, in their order; ``epoch`` is None outside of ``fit``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if epoch is None:  # perhaps that of a fit which evaluates
            return callbacks
        if type(callbacks) is not keras.callbacks.CallbackList:
            raise ValueError(
                f"callbacks is a {type(callbacks).__name__}, to which hvkit cannot add callbacks "
                "of its own: pass a list, or a keras.callbacks.CallbackList"
            )
        return with_callbacks(
            callbacks, for_this_rank(callbacks.callbacks, group, epoch, model), model
        )
    given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    given = [each for each in given if each is not None]
    if any(_is_one_of(each, ("BackupAndRestore",)) for each in given):
        raise ValueError(
            "keras.callbacks.BackupAndRestore does not work on several ranks: all would write the "
            "same files, and each would restore by itself: use hvkit.Checkpoint(directory, "
            "model=model, optimizer=optimizer), its restore() and its callback()"
        )
    if group.rank != 0:
        given = [_without_output(each) for each in given if not _is_one_of(each, _WRITERS)]
    if epoch is None:
        return given
    if epoch.adapt:
        for each in given:
            epoch.adapt(each)
    first = [ShowAgreedWeights(epoch)] if epoch.local else []
    return [*first, *given, InStep(given, epoch), *epoch.watching()]


def _is_one_of(callback: Any, names: tuple[str, ...]) -> bool:
    classes = (getattr(keras.callbacks, name, None) for name in names)
    return any(isinstance(callback, each) for each in classes if isinstance(each, type))


def _without_output(callback: Any) -> Any:
    """The same callback, without messages and without saving the model; its decisions stay."""
    if hasattr(callback, "verbose"):
        callback.verbose = 0
    if _is_one_of(callback, ("ModelCheckpoint",)):
        set_model = type(callback).set_model
        callback.set_model = lambda model: set_model(callback, _Unsaved(model))
    return callback


class _Unsaved:
    """A model that cannot be saved; everything else goes to the model itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: rank 0 does."""

    save_weights = save


def _acts(callback: Any, *hooks: str) -> bool:
    """Whether the callback has code at one of these points, which may stop training."""
    if _is_one_of(callback, _STEADY) or getattr(callback, "never_stops", False):
        return False
    base = keras.callbacks.Callback
    return any(
        hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(base, hook)
        for hook in hooks
    )


class ShowAgreedWeights(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets callbacks see the weights that the ranks agree on; Keras calls this one before them.

    At the end of an epoch a callback may evaluate or save the model, remember its weights, or set
    others. At the end of training the rounds end, and all ranks leave ``fit`` with one model.
    """

    never_stops = True

    def __init__(self, epoch: Epoch) -> None:
        super().__init__()
        self._epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._epoch.keeper:
            self._epoch.keeper.show_callbacks()

    def on_train_end(self, logs: Any = None) -> None:
        if self._epoch.keeper:
            self._epoch.keeper.end_rounds()


class InStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes all ranks take equally many steps, and stop when any does; called after ``others``."""

    def __init__(self, others: list[Any], epoch: Epoch) -> None:
        super().__init__()
        self._epoch = epoch
        # Only a callback that could stop training inside an epoch is worth a collective per step.
        self._every_step = any(_acts(each, "on_batch_end", "on_train_batch_end") for each in others)
        # A callback may set weights there.
        self._at_the_end = any(_acts(each, "on_train_end") for each in others)

    def on_train_begin(self, logs: Any = None) -> None:
        """Make sure that all ranks that know their number of steps have the same number."""
        steps_here = (self.params or {}).get("steps")
        facts = steps_here, self._every_step, self._at_the_end, self._epoch.rows
        group = self._epoch.group
        steps, every_step, at_the_end, rows = zip(
            *collectives.gather("fit", facts, group), strict=True
        )
        self._epoch.even = rows[0] is not None and len(set(rows)) == 1
        self._every_step, self._at_the_end = any(every_step), any(at_the_end)
        may_differ = not (self._epoch.equal_steps or self._every_step)
        if not may_differ and len({count for count in steps if count is not None}) > 1:
            error = RanksDisagreeError(
                f"fit has data of different length on each rank, {list(steps)} steps per epoch in "
                "rank order: every rank must take the same number of steps; use hvkit.shard(data)"
            )
            raise mark_as_shown_by(error, group.first)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch.begin()
        self._epoch.begun = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._every_step:
            self.model.stop_training = any_rank_of(self._epoch.group, self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._epoch.compare()
        self.model.stop_training = any_rank_of(self._epoch.group, self.model.stop_training)
        if keeper := self._epoch.keeper:
            keeper.keep_what_callbacks_set()
            keeper.put_back()

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights that callbacks may have set: ``EarlyStopping`` those of an epoch."""
        if self._at_the_end:
            self._epoch.compare()
