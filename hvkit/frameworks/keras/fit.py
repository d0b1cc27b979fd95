"""``fit`` and ``evaluate`` on several ranks: every rank gets the metrics of all ranks.

So do ``train_on_batch`` and ``test_on_batch``, unless the ranks train local weights. Callbacks stop
all ranks together, and only rank 0 writes files.

Keras reads the metrics in one method, after each pass over the data and before callbacks see them;
hvkit replaces that method on the model's instance (``metric_results``).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from hvkit.communication import collectives
from hvkit.communication.metrics import any_rank_of
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.loss_means import know_rows, noted_of
from hvkit.frameworks.keras.metric_results import over_all_ranks
from hvkit.runtime import Group
from hvkit.strategies import ParameterServer
from hvkit.strategies.strategy import Rounds, Strategy
from hvkit.sync.local_weights import LocalWeightsSync
from hvkit.watch.calls import call_within, translated
from hvkit.watch.rank_errors import mark_as_shown_by

if TYPE_CHECKING:
    from hvkit.frameworks.keras.tensorflow.averager import GradientAverager


def combine_results(model: keras.Model, state: FitState, same_part: Group | None = None) -> None:
    """Make ``fit`` and ``evaluate`` of this model report the metrics of all ranks.

    Both become collectives. Only rank 0 shows progress and writes files. ``same_part`` are the
    ranks whose batches differ, if these are not all of the state's group. With local weights,
    ``evaluate`` uses those that the ranks would agree on.
    """
    group = same_part or state.group
    know_rows(model, lambda: state.even)
    read, flatten = model._get_metrics_result_or_logs, model._flatten_metrics_in_order
    names: list[str] = []  # of the last results, if this rank had no batch

    def read_from_all_ranks(logs: Mapping[str, Any]) -> Mapping[str, Any]:
        names.clear()
        state.end_pass()
        result = over_all_ranks(model, read, logs, group)
        names.extend(() if logs else result)
        return result

    def flatten_in_order(logs: Mapping[str, Any]) -> Any:
        # Without a batch, Keras does not know the metrics' order, which another rank has sent.
        return [logs[name] for name in names] if len(names) > 1 else flatten(logs)

    model._get_metrics_result_or_logs = read_from_all_ranks
    model._flatten_metrics_in_order = flatten_in_order
    model._symbolic_build = _unless_without_rows(model._symbolic_build)
    for name in ("train_on_batch", "test_on_batch"):
        found = _translating(getattr(model, name))
        if not (state.local or same_part):
            found = _of_all_ranks(model, found, read, state)
        setattr(model, name, found)
    model.evaluate = state.agreed_weights()(model.evaluate)
    model.predict = _also_without_rows(model, model.predict)
    for name in ("fit", "evaluate", "predict"):
        use_callbacks_of_this_rank(model, name, state)


def _translating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def translating(*args: Any, **kwargs: Any) -> Any:
        with translated():
            return method(*args, **kwargs)

    return translating


def _unless_without_rows(build: Callable[..., Any]) -> Callable[..., Any]:
    """Keras's method that builds metrics with the first batch, on a rank that may have none."""

    @functools.wraps(build)
    def build_with_rows(iterator: Any = None, data_batch: Any = None) -> None:
        try:
            build(iterator, data_batch)
        except Exception:  # of any type: of a model that is called without data
            if iterator is None or iterator.num_batches != 0:
                raise

    return build_with_rows


def _also_without_rows(model: keras.Model, predict: Callable[..., Any]) -> Callable[..., Any]:
    """``predict``, which returns no rows for none: Keras itself fails."""

    @functools.wraps(predict)
    def predict_rows(x: Any, *args: Any, **kwargs: Any) -> Any:
        shapes = [getattr(each, "shape", None) for each in keras.tree.flatten(x)]
        if shapes and all(shape and shape[0] == 0 for shape in shapes):
            return model.predict_on_batch(x)
        try:
            return predict(x, *args, **kwargs)
        except UnboundLocalError as error:
            raise ValueError(
                "predict got data without rows, of which Keras cannot know the shape of what the "
                "model returns: give each rank some, or call predict on those that have"
            ) from error

    return predict_rows


def _of_all_ranks(
    model: keras.Model, method: Callable[..., Any], read: Callable[[Any], Any], state: FitState
) -> Callable[..., Any]:
    """``train_on_batch`` or ``test_on_batch``, with the metrics of all ranks' batches."""

    @functools.wraps(method)
    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(method, args, kwargs)
        if args or not _takes(method, "return_dict"):  # a method of the user
            return method(*args, **kwargs)
        as_dict = kwargs.pop("return_dict", False)
        with call_within(method.__name__):
            even, state.even = state.even, False  # a callback of ``fit`` may call it
            logs = method(**kwargs, return_dict=True)
            state.even = even
            logs = over_all_ranks(model, read, logs, state.group)
        return logs if as_dict else model._flatten_metrics_in_order(logs)

    return of_all_ranks


def use_callbacks_of_this_rank(model: keras.Model, name: str, state: FitState) -> None:
    """Change ``fit``, ``evaluate`` or ``predict``: only rank 0 shows progress and writes files."""
    method, trains = getattr(model, name), name == "fit"

    @functools.wraps(method)
    def on_this_rank(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(method, args, kwargs)
        if _takes(method, "verbose") and state.group.rank != 0:
            kwargs["verbose"] = 0
        if _takes(method, "callbacks"):
            given, in_fit = kwargs.get("callbacks"), state if trains else None
            kwargs["callbacks"] = _for_this_rank(given, state.group, in_fit, model)
        if not trains:
            noted_of(model)  # drops the numbers of a pass that failed
        around = state.training(kwargs) if trains else state.set_aside()
        with call_within(name), translated(), around:
            return method(*args, **kwargs)

    setattr(model, name, on_this_rank)


def _rows_of_batches(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Facts that decide how many rows each batch of arrays has; None for other data."""
    shapes = [getattr(each, "shape", None) for each in keras.tree.flatten(given.get("x"))]
    if not shapes or not all(shapes):
        return None
    settings = (given.get(name) for name in ("batch_size", "validation_split", "steps_per_epoch"))
    return shapes[0][0], *settings  # type: ignore[index]


@contextmanager
def _data_to_their_end() -> Iterator[None]:
    """Let ``fit`` read data of unknown length to its end in every epoch.

    Keras takes no more steps than in the first epoch. Where ranks may take different numbers of
    steps, and each batch goes to the rank that has time, that would leave batches behind.
    """
    before = vars(EpochIterator).get("_num_batches")
    EpochIterator._num_batches = property(
        lambda self: self.data_adapter.num_batches, lambda self, learned: None
    )
    try:
        yield
    finally:
        if before is None:
            del EpochIterator._num_batches
        else:  # a fit inside a fit
            EpochIterator._num_batches = before


def _takes(method: Callable[..., Any], name: str) -> bool:
    """Whether the method, possibly the user's own, takes an argument of this name."""
    parameters = inspect.signature(method).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def with_names(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, passed by name if the method's signature allows it."""
    parameters = inspect.signature(method).parameters.values()
    ways = {p.kind for p in parameters}
    if inspect.Parameter.VAR_POSITIONAL in ways:
        if inspect.Parameter.VAR_KEYWORD not in ways:
            return args, kwargs
        # A user's method that passes its remaining arguments on to Keras's.
        keras_method = functools.partial(getattr(keras.Model, method.__name__), None)
        parameters = inspect.signature(keras_method).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(args)]
    if len(names) < len(args) or not kwargs.keys().isdisjoint(names):
        return args, kwargs  # one too many, or one twice: Python raises the error
    return (), dict(zip(names, args, strict=True)) | kwargs


def _classes(*names: str) -> tuple[type[Any], ...]:
    """Keras's callbacks of these names; some are not in all versions."""
    found = (getattr(keras.callbacks, name, None) for name in names)
    return tuple(each for each in found if isinstance(each, type))


# These only write files and messages.
_WRITERS = _classes(
    *("CSVLogger", "TensorBoard", "RemoteMonitor", "OrbaxCheckpoint", "ProgbarLogger")
)
# These never end training in the middle of an epoch.
_STEADY = _classes("ModelCheckpoint", "ProgbarLogger", "CSVLogger", "TensorBoard", "History")


@dataclass(eq=False)
class FitState:
    """The state of ``fit`` of one model, and how it runs on the ranks.

    Every rank must take equally many steps in an epoch, except with ``ParameterServer``. Rounds do
    not depend on epochs: ``Rounds.every`` sets their length, and ``hvkit.sync.rounds`` counts the
    optimizer's steps.

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
    # The sync of the local weights; None before the model has weights, or if there are none.
    sync: LocalWeightsSync | None = None
    # Facts that decide how many rows each batch of this rank has; None if unknown.
    rows: tuple[Any, ...] | None = None
    # Whether the batches of all ranks have the same number of rows.
    even: bool = False
    # Whether a pass over the training data is under way.
    in_epoch: bool = False

    @property
    def local(self) -> bool:
        return isinstance(self.strategy, Rounds | ParameterServer)

    @property
    def equal_steps(self) -> bool:
        return not isinstance(self.strategy, ParameterServer)

    @contextmanager
    def training(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Wrap ``fit`` with the given arguments."""
        self.rows = _rows_of_batches(given)
        with nullcontext() if self.equal_steps else _data_to_their_end():
            try:
                yield
            finally:
                self.even = False
                if self.sync:  # an error may have come while callbacks ran
                    self.sync.put_back()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Wrap a pass over other data, in the middle of the epoch or after it."""
        in_epoch, self.in_epoch = self.in_epoch, False
        try:
            yield
        finally:
            self.in_epoch = in_epoch

    @contextmanager
    def agreed_weights(self) -> Iterator[None]:
        """A context with the weights that the ranks would agree on now; a collective if local."""
        with self.sync.settled() if self.sync else nullcontext():
            yield

    def end_pass(self) -> None:
        """End the pass; a collective. Does nothing after a pass over the validation data."""
        if self.in_epoch:
            self.in_epoch = False
            for each in self.averagers:
                each.end_of_epoch()


def with_callbacks(
    given: keras.callbacks.CallbackList, callbacks: list[Any], model: keras.Model
) -> keras.callbacks.CallbackList:
    params = getattr(given, "params", None) or {}  # Keras 3.5 sets none before ``fit``
    return keras.callbacks.CallbackList(callbacks, model=model, **params)


def _for_this_rank(callbacks: Any, group: Group, state: FitState | None, model: keras.Model) -> Any:
    """The callbacks that this rank runs, in their order; ``state`` is None outside of ``fit``."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        if state is None:  # perhaps that of a fit which evaluates
            return callbacks
        if type(callbacks) is not keras.callbacks.CallbackList:
            raise ValueError(
                f"callbacks is a {type(callbacks).__name__}, to which hvkit cannot add callbacks "
                "of its own: pass a list, or a keras.callbacks.CallbackList"
            )
        found = _for_this_rank(callbacks.callbacks, group, state, model)
        return with_callbacks(callbacks, found, model)
    given = list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]
    given = [each for each in given if each is not None]
    if any(isinstance(each, keras.callbacks.BackupAndRestore) for each in given):
        raise ValueError(
            "keras.callbacks.BackupAndRestore does not work on several ranks: all would write the "
            "same files, and each would restore by itself: use hvkit.Checkpoint(directory, "
            "model=model, optimizer=optimizer), its restore() and its callback()"
        )
    if group.rank != 0:
        given = [_without_output(each) for each in given if not isinstance(each, _WRITERS)]
    if state is None:
        return given
    if state.adapt:
        for each in given:
            state.adapt(each)
    first = [_showing_agreed_weights(state)] if state.local else []
    return [*first, *given, InStep(given, state), *state.watching()]


def _without_output(callback: Any) -> Any:
    """The same callback, without messages and without saving the model; its decisions stay."""
    if hasattr(callback, "verbose"):
        callback.verbose = 0
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
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
    if isinstance(callback, _STEADY) or getattr(callback, "never_stops", False):
        return False
    base = keras.callbacks.Callback
    return any(
        hook in vars(callback) or getattr(type(callback), hook, None) is not getattr(base, hook)
        for hook in hooks
    )


def _showing_agreed_weights(state: FitState) -> keras.callbacks.Callback:
    """Lets callbacks see the weights that the ranks agree on; Keras calls this one before them.

    At the end of an epoch a callback may evaluate or save the model, remember its weights, or set
    others. At the end of training the rounds end, and all ranks leave ``fit`` with one model.
    """

    def show(epoch: int, logs: Any) -> None:
        if state.sync:
            state.sync.show_callbacks()

    def end_rounds(logs: Any) -> None:
        if state.sync:
            state.sync.end_rounds()

    return keras.callbacks.LambdaCallback(on_epoch_end=show, on_train_end=end_rounds)


class InStep(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes all ranks take equally many steps, and stop when any does; called after ``others``."""

    def __init__(self, others: list[Any], state: FitState) -> None:
        super().__init__()
        self._state = state
        # Only a callback that could stop training inside an epoch is worth a collective per step.
        self._every_step = any(_acts(each, "on_batch_end", "on_train_batch_end") for each in others)
        # A callback may set weights there.
        self._at_the_end = any(_acts(each, "on_train_end") for each in others)

    def on_train_begin(self, logs: Any = None) -> None:
        """Make sure that all ranks that know their number of steps have the same number."""
        state, group = self._state, self._state.group
        facts = (self.params or {}).get("steps"), self._every_step, self._at_the_end, state.rows
        gathered = collectives.gather("fit", facts, group)
        steps, every_step, at_the_end, rows = zip(*gathered, strict=True)
        state.even = rows[0] is not None and len(set(rows)) == 1
        self._every_step, self._at_the_end = any(every_step), any(at_the_end)
        must_agree = state.equal_steps or self._every_step
        if must_agree and len({count for count in steps if count is not None}) > 1:
            error = RanksDisagreeError(
                f"fit has data of different length on each rank, {list(steps)} steps per epoch in "
                "rank order: every rank must take the same number of steps; use hvkit.shard(data)"
            )
            raise mark_as_shown_by(error, group.first)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._state.begin()
        self._state.in_epoch = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._every_step:
            self._stop_together()

    def _stop_together(self) -> None:
        self.model.stop_training = any_rank_of(self._state.group, self.model.stop_training)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._state.compare()
        self._stop_together()
        if sync := self._state.sync:
            sync.keep_what_callbacks_set()
            sync.put_back()

    def on_train_end(self, logs: Any = None) -> None:
        """Compare the weights that callbacks may have set: ``EarlyStopping`` those of an epoch."""
        if self._at_the_end:
            self._state.compare()
