"""``fit`` and ``evaluate`` on several ranks: every rank gets the metrics of all ranks.

So do ``train_on_batch`` and ``test_on_batch``, unless the ranks train local weights.

Keras reads the metrics in one method, after each pass over the data and before callbacks see them;
hvkit replaces that method on the model's instance (``metric_results``).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras.src.trainers.epoch_iterator import EpochIterator

from hvkit.communication.group import Group
from hvkit.frameworks.keras.callbacks import Epoch, for_this_rank
from hvkit.frameworks.keras.loss_means import know_rows, noted_of
from hvkit.frameworks.keras.metric_results import over_all_ranks
from hvkit.watch.calls import call_within, translated


def share_results(model: keras.Model, epoch: Epoch, same_part: Group | None = None) -> None:
    """Make ``fit`` and ``evaluate`` of this model report the metrics of all ranks.

    Both become collectives. Only rank 0 shows progress and writes files. ``same_part`` are the
    ranks whose batches differ, if these are not all of the epoch's group. With local weights,
    ``evaluate`` uses those that the ranks would agree on.
    """
    group = same_part or epoch.group
    know_rows(model, lambda: epoch.even)
    read, flatten = model._get_metrics_result_or_logs, model._flatten_metrics_in_order
    names: list[str] = []  # of the last results, if this rank had no batch

    def read_from_all_ranks(logs: Mapping[str, Any]) -> Mapping[str, Any]:
        names.clear()
        epoch.end()
        result = over_all_ranks(model, read, logs, group)
        names.extend(() if logs else result)
        return result

    def flatten_in_order(logs: Mapping[str, Any]) -> Any:
        # Without a batch, Keras does not know the metrics' order, which another rank has sent.
        return [logs[name] for name in names] if len(names) > 1 else flatten(logs)

    model._get_metrics_result_or_logs = read_from_all_ranks
    model._flatten_metrics_in_order = flatten_in_order
    model.fit = with_callbacks_of_this_rank(model, model.fit, epoch)
    model._symbolic_build = _unless_without_rows(model._symbolic_build)
    for batchwise in (model.train_on_batch, model.test_on_batch):
        found = _within(translated, batchwise)
        if not (epoch.local or same_part):
            found = _of_all_ranks(model, found, read, epoch)
        setattr(model, batchwise.__name__, found)
    evaluate = _within(epoch.agreed_weights, model.evaluate)
    for method in (evaluate, _also_without_rows(model, model.predict)):
        setattr(
            model, method.__name__, with_callbacks_of_this_rank(model, method, epoch, trains=False)
        )


def train_uncompiled(model: keras.Model) -> None:
    """Have Keras make its functions again, with present vocabularies, and without a compiler."""
    model.supports_jit = False
    if getattr(model, "compiled", False):
        model.jit_compile = False
    model.train_function = model.test_function = model.predict_function = None


def _within(
    context: Callable[[], AbstractContextManager[None]], method: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def within(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    return within


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
    model: keras.Model, method: Callable[..., Any], read: Callable[[Any], Any], epoch: Epoch
) -> Callable[..., Any]:
    """``train_on_batch`` or ``test_on_batch``, with the metrics of all ranks' batches."""

    @functools.wraps(method)
    def of_all_ranks(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(method, args, kwargs)
        if args or not _takes(method, "return_dict"):  # a method of the user
            return method(*args, **kwargs)
        as_dict = kwargs.pop("return_dict", False)
        with call_within(method.__name__):
            even, epoch.even = epoch.even, False  # a callback of ``fit`` may call it
            logs = method(**kwargs, return_dict=True)
            epoch.even = even
            logs = over_all_ranks(model, read, logs, epoch.group)
        return logs if as_dict else model._flatten_metrics_in_order(logs)

    return of_all_ranks


def with_callbacks_of_this_rank(
    model: keras.Model, method: Callable[..., Any], epoch: Epoch, *, trains: bool = True
) -> Callable[..., Any]:
    @functools.wraps(method)
    def on_this_rank(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(method, args, kwargs)
        if _takes(method, "verbose") and epoch.group.rank != 0:
            kwargs["verbose"] = 0
        if _takes(method, "callbacks"):
            given = kwargs.get("callbacks")
            kwargs["callbacks"] = for_this_rank(
                given, epoch.group, epoch if trains else None, model
            )
        aside = _each_epoch_to_its_end(epoch) if trains else epoch.set_aside()
        if trains:
            epoch.rows = _rows_of_batches(kwargs)
        else:
            noted_of(model)  # drops the numbers of a pass that failed
        with aside, call_within(method.__name__), translated():
            try:
                return method(*args, **kwargs)
            finally:
                if trains:
                    epoch.even = False
                if trains and epoch.keeper:  # an error may have come while callbacks ran
                    epoch.keeper.put_back()

    return on_this_rank


def _rows_of_batches(given: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """Facts that decide how many rows each batch of arrays has; None for other data."""
    shapes = [getattr(each, "shape", None) for each in keras.tree.flatten(given.get("x"))]
    if not shapes or not all(shapes):
        return None
    settings = (given.get(name) for name in ("batch_size", "validation_split", "steps_per_epoch"))
    return shapes[0][0], *settings  # type: ignore[index]


@contextlib.contextmanager
def _each_epoch_to_its_end(epoch: Epoch) -> Iterator[None]:
    """Let ``fit`` read data of unknown length to its end in every epoch.

    Keras takes no more steps than in the first epoch. Where ranks may take different numbers of
    steps, and each batch goes to the rank that has time, that would leave batches behind.
    """
    if epoch.equal_steps:
        yield
        return
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
