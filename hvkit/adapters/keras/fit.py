"""``fit`` and ``evaluate`` on several ranks: every rank gets the metrics of all ranks.

``train_on_batch`` reports this rank's; of it, hvkit only translates errors.

Metrics keep sums (a total and a count, a confusion matrix). Added up over ranks, these give exactly
the result of one process on all the data. Keras reads the metrics in one method, after each pass
over the data and before callbacks see them; hvkit replaces that method on the model's instance.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.trainers.epoch_iterator import EpochIterator

from hvkit import runtime
from hvkit.adapters.keras.callbacks import Epoch, for_this_rank
from hvkit.adapters.keras.gradients.averager import GradientAverager
from hvkit.adapters.keras.weights.parameter_server import ServedModel
from hvkit.adapters.keras.weights.rounds import RoundKeeper
from hvkit.communication import collectives
from hvkit.watch.calls import call_within
from hvkit.watch.rank_errors import translated


def share_results(
    model: keras.Model,
    averagers: Sequence[GradientAverager],
    make_alike: Callable[[], None],
    rounds: RoundKeeper | ServedModel | None = None,
) -> None:
    """Make ``fit`` and ``evaluate`` of this model report the metrics of all ranks.

    Both become collectives. Only rank 0 shows progress and writes files.

    Args:
        model: a distributed one.
        averagers: of the optimizers that update it.
        make_alike: ends an epoch; raises on every rank if the ranks differ; a collective.
        rounds: for strategies whose ranks train alone. ``evaluate`` then uses the weights that the
            ranks would agree on, with which they also leave ``fit``.
    """
    epoch = Epoch(averagers, make_alike, rounds)
    model._get_metrics_result_or_logs = functools.partial(
        _over_all_ranks, model, epoch, model._get_metrics_result_or_logs
    )
    model.fit = _on_this_rank(model, model.fit, epoch)
    model.train_on_batch = _translating(model.train_on_batch)
    evaluate = _in_settled(model.evaluate, rounds) if rounds else model.evaluate
    for method in (evaluate, model.predict):
        setattr(model, method.__name__, _on_this_rank(model, method, epoch, trains=False))


def _in_settled(
    evaluate: Callable[..., Any], rounds: RoundKeeper | ServedModel
) -> Callable[..., Any]:
    @functools.wraps(evaluate)
    def settled(*args: Any, **kwargs: Any) -> Any:
        with rounds.settled():
            return evaluate(*args, **kwargs)

    return settled


def _translating(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def translating(*args: Any, **kwargs: Any) -> Any:
        with translated():
            return method(*args, **kwargs)

    return translating


def _on_this_rank(
    model: keras.Model, method: Callable[..., Any], epoch: Epoch, *, trains: bool = True
) -> Callable[..., Any]:
    """The method, with callbacks and verbosity adapted to this rank."""

    @functools.wraps(method)
    def on_this_rank(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(method, args, kwargs)
        if _takes(method, "verbose") and runtime.rank() != 0:
            kwargs["verbose"] = 0
        if _takes(method, "callbacks"):
            given = kwargs.get("callbacks")
            kwargs["callbacks"] = for_this_rank(given, epoch if trains else None, model)
        aside = _each_epoch_to_its_end(epoch.rounds) if trains else epoch.set_aside()
        with aside, call_within(method.__name__), translated():
            try:
                return method(*args, **kwargs)
            finally:
                if trains and epoch.rounds:  # an error may have come while callbacks ran
                    epoch.rounds.put_back()

    return on_this_rank


@contextlib.contextmanager
def _each_epoch_to_its_end(rounds: RoundKeeper | ServedModel | None) -> Iterator[None]:
    """Let ``fit`` read data of unknown length to its end in every epoch.

    Keras takes no more steps than in the first epoch. Where ranks may take different numbers of
    steps, and each batch goes to the rank that has time, that would leave batches behind.
    """
    if rounds is None or rounds.equal_steps:
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
    kinds = {p.kind for p in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            return args, kwargs
        # A user's method that passes its remaining arguments on to Keras's.
        keras_method = functools.partial(getattr(keras.Model, method.__name__), None)
        parameters = inspect.signature(keras_method).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][: len(args)]
    if len(names) < len(args) or not kwargs.keys().isdisjoint(names):
        return args, kwargs  # one too many, or one twice: Python raises the error
    return (), dict(zip(names, args, strict=True)) | kwargs


def _over_all_ranks(
    model: keras.Model, epoch: Epoch, read: Callable[[Any], Any], logs: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The metrics of one pass over the data, combined over all ranks; a collective.

    Args:
        model: its metrics have seen this rank's batches.
        epoch: the state of ``fit``; this may be its end.
        read: returns the metrics that Keras reports, from the metrics' states or from ``logs``.
        logs: the return value of the last step; empty if this rank had no batch.
    """
    epoch.end()
    # Without a batch, compiled metrics may have no state yet.
    own: Mapping[str, Any] = read(logs) if logs else logs
    # A train_step or test_step may return other numbers than the model's metrics.
    from_state = own is not logs
    variables = [v for metric in model.metrics for v in metric.variables]
    state = [v.numpy() for v in variables] if from_state else None
    numbers = None if from_state else {k: _as_float(v) for k, v in own.items()}
    everyone = collectives.gather("fit or evaluate", (state, numbers))
    states = [theirs for theirs, _ in everyone if theirs is not None]
    if states and state is not None:
        own = _result_of(variables, _combined(variables, states), state, lambda: read(logs))
    elif not from_state and numbers:
        own = _means(own, [theirs for _, theirs in everyone if theirs])
    if all(theirs or numbers for theirs, numbers in everyone):
        return own
    return _result_of_first_with_data(own, [bool(t or n) for t, n in everyone])


def _combined(variables: list[Any], states: list[list[Any]]) -> list[Any]:
    """The states of all ranks' metrics in one, each variable by its own ``aggregation``."""
    combined = []
    for variable, values in zip(variables, zip(*states, strict=True), strict=True):
        way = getattr(variable, "aggregation", "sum")
        if way == "sum":
            combined.append(np.sum(values, axis=0, dtype=values[0].dtype))
        elif way == "mean":
            combined.append(np.mean(values, axis=0).astype(values[0].dtype))
        else:
            combined.append(values[0])
    return combined


def _result_of(
    variables: list[Any], combined: list[Any], own: list[Any], read: Callable[[], Any]
) -> dict[str, float]:
    """The result that the metrics report for the combined states; they keep their own states."""
    for variable, value in zip(variables, combined, strict=True):
        variable.assign(value)
    result = {name: _as_float(value) for name, value in read().items()}
    for variable, value in zip(variables, own, strict=True):
        variable.assign(value)
    return result


def _means(own: Mapping[str, Any], numbers: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over ranks of the numbers that all ranks have."""
    return {
        name: float(np.mean([theirs[name] for theirs in numbers]))
        if all(isinstance(theirs.get(name), float) for theirs in numbers)
        else value
        for name, value in own.items()
    }


def _result_of_first_with_data(own: Mapping[str, Any], with_data: list[bool]) -> Mapping[str, Any]:
    """The metrics of the first rank that had data, for ranks whose part was empty."""
    if not any(with_data):
        return own
    return collectives.from_rank(with_data.index(True), dict(own))


def _as_float(value: Any) -> Any:
    """A number as a float; anything else as it is."""
    array = np.asarray(value)
    return float(array) if array.ndim == 0 and array.dtype.kind in "fiub" else value
