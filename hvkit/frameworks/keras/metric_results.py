"""The results of metrics over all ranks: the same numbers on every rank.

Metrics keep sums in variables (a total and a count, a confusion matrix). Added up over ranks, these
give exactly the result of one process on all the data. A metric of a user's own may keep its state
elsewhere, or in variables that do not add up; rank 0 then warns and names it. Callbacks decide by
these numbers when to stop and which weights to keep, so all ranks must see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import keras
import numpy as np

from hvkit.communication import collectives
from hvkit.frameworks.keras.loss_checks import warn_of_own_means
from hvkit.frameworks.keras.loss_means import noted_of
from hvkit.main_rank import warn_once
from hvkit.runtime import Group

Number = np.ndarray[Any, Any] | float

# Results whose relative difference is smaller differ by rounding.
_ROUNDING = 1e-5
# A result over all ranks that is so many times as large as any rank's own is no mean of these.
_BEYOND = 1.25


def over_all_ranks(
    model: keras.Model, read: Callable[[Any], Any], logs: Mapping[str, Any], group: Group
) -> Mapping[str, Any]:
    """The metrics of one pass over the data, combined over all ranks of a group; a collective.

    ``read`` returns the metrics that Keras reports, from the metrics' states or from ``logs``, the
    return value of the last step; empty if this rank had no batch.
    """
    logs = _flat(logs)
    # Without a batch, compiled metrics may have no state yet.
    result: Mapping[str, Any] = read(logs) if logs else logs
    # A train_step or test_step may return other numbers than the model's metrics.
    from_state = result is not logs
    variables = [v for metric in model.metrics for v in metric.variables]
    state = [v.numpy() for v in variables] if from_state else None
    local_facts = state, _numbers(result), noted_of(model)
    gathered = collectives.gather("fit or evaluate", local_facts, group)
    states = [of_rank for of_rank, *_ in gathered if of_rank is not None]
    results = [of_rank for _, of_rank, _ in gathered if of_rank]
    if states:
        if state is not None:
            combined = _combined(variables, states)
            changes = _corrections(model, [noted for *_, noted in gathered])
            for at, variable in enumerate(variables):
                if id(variable) in changes:
                    combined[at] = (combined[at] + changes[id(variable)]).astype(combined[at].dtype)
            result = _result_of(variables, combined, state, lambda: read(logs))
        _warn_of_sums(model, _numbers(result), results, group)
        result = _agreed(result, group)
    elif result:
        result = _means(result, results)
    with_data = [bool(of_rank or numbers) for of_rank, numbers, _ in gathered]
    if all(with_data) or not any(with_data):
        return result
    names = model._flatten_metrics_in_order({name: name for name in result})
    ordered = [(name, result[name]) for name in ([names] if isinstance(names, str) else names)]
    first = group.members[with_data.index(True)]
    return dict(collectives.from_rank(first, ordered, group))  # messages sort dictionaries


def _corrections(
    model: keras.Model, noted: Sequence[Sequence[np.ndarray[Any, Any]]]
) -> dict[int, float]:
    """Corrections of the totals of the losses that Keras reports, by the id of a metric's variable.

    Empty if a ``test_step`` of the script computes the losses of ``compile`` more than once, or not
    on all ranks. ``noted`` is by rank, from ``noted_of``.
    """
    compiled: Any = getattr(model, "_compile_loss", None)
    losses = getattr(compiled, "_flat_losses", None) or ()
    found: dict[int, float] = {}
    # One batch per rank; together they are one process's batch.
    for steps in zip_longest(*noted):
        numbers = [each for each in steps if each is not None]
        if len({len(each) for each in numbers}) > 1:
            warn_of_own_means()
            return {}
        rows = np.array([each[0] for each in numbers])
        reported = np.array([each[1] for each in numbers])
        of_ranks = np.array([each[2:].reshape(-1, 5) for each in numbers])
        if len({*of_ranks[0, :, 0]}) < of_ranks.shape[1]:
            warn_of_own_means()
            return {}
        for at, (number, mean, by_rows, *_) in enumerate(of_ranks[0]):
            sums, counts = of_ranks[:, at, 3:].T
            local = sums / np.where(counts, counts, 1) if mean else sums
            whole = sums.sum() / (counts.sum() or 1) if mean else sums.sum()
            _, _, weight, _ = losses[int(number)]
            times = 1.0 if weight is None else float(weight)
            trackers = [(model._loss_tracker, reported * times)]
            if len(losses) > 1:
                counted = rows if by_rows else np.ones_like(rows)
                trackers.append((compiled.metrics[int(number)], counted))
            for tracker, counted in trackers:
                change = counted.sum() * whole - counted @ local
                found[id(tracker.total)] = found.get(id(tracker.total), 0.0) + change
    return found


def _flat(logs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Logs without dictionaries inside, as of a train_step that returns all metrics' results."""
    if not any(isinstance(value, Mapping) for value in logs.values()):
        return logs
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _combined(variables: list[Any], states: list[list[Any]]) -> list[Any]:
    """The states of all ranks' metrics in one, each variable by its own ``aggregation``."""
    combined = []
    for variable, values in zip(variables, zip(*states, strict=True), strict=True):
        reduce: Any = {"sum": np.sum, "mean": np.mean}.get(getattr(variable, "aggregation", "sum"))
        found = reduce(values, axis=0).astype(values[0].dtype) if reduce else values[0]
        combined.append(found)
    return combined


def _result_of(
    variables: list[Any], combined: list[Any], own: list[Any], read: Callable[[], Any]
) -> dict[str, Any]:
    """The result that the metrics report for the combined states; they keep their own states."""
    for variable, value in zip(variables, combined, strict=True):
        variable.assign(value)
    result = {name: _as_float(value) for name, value in read().items()}
    for variable, value in zip(variables, own, strict=True):
        variable.assign(value)
    return result


def _warn_of_sums(
    model: keras.Model,
    combined: Mapping[str, Number],
    results: Sequence[Mapping[str, Number]],
    group: Group,
) -> None:
    """Warn of a user's metric whose variables are no sums: a ratio beyond the ranks' own."""
    for name, value in combined.items():
        if isinstance(value, float) and _is_users(model, name) and not value.is_integer():
            largest = max(float(np.abs(each[name])) for each in results if name in each)
            if abs(value) > _BEYOND * largest:
                warn_once(
                    f"sum {name}",
                    f"metric {name!r} is {value:.4g} over all ranks, but at most {largest:.4g} on "
                    "one: hvkit adds up a metric's variables, so they must be sums over samples "
                    "(add_weight and assign_add), from which result() computes; give one that is "
                    'no sum aggregation="mean" in add_variable',
                    group,
                )


def _is_users(model: keras.Model, name: str) -> bool:
    """Whether a result belongs to a metric whose class is not Keras's."""
    metrics = [*model.metrics]
    for each in metrics:
        metrics += getattr(each, "metrics", ())  # those that ``compile`` got
    own = {each.name for each in metrics if not type(each).__module__.startswith("keras.")}
    return any(name == each or name.endswith(f"_{each}") for each in own)


def _agreed(own: Mapping[str, Any], group: Group) -> dict[str, Any]:
    """Make results equal on all ranks if metrics keep state outside of variables; a collective."""
    local = _numbers(own)
    gathered = collectives.gather("fit or evaluate", local, group)
    numbers = [each for each in gathered if each]
    agreed = dict(own)
    for name in local:
        values = [np.asarray(each[name]) for each in numbers if name in each]
        if not all(np.array_equal(values[0], each, equal_nan=True) for each in values):
            agreed[name] = _as_float(_one_of(name, values, group))
    return agreed


def _one_of(name: str, values: list[np.ndarray[Any, Any]], group: Group) -> np.ndarray[Any, Any]:
    """The number that all ranks use, of ranks' results that differ: the mean, if possible."""
    first = values[0]
    same_shape = all(each.shape == first.shape for each in values)
    if same_shape and all(np.allclose(first, v, _ROUNDING, 0.0, equal_nan=True) for v in values):
        return first
    shown = ", ".join(str(each) for each in values[:4])
    warn_once(
        f"own state {name}",
        f"metric {name!r} differs between ranks ({shown}) although its variables were added up: it "
        "keeps state elsewhere, where each rank has seen its own samples. All ranks report the "
        f"{'mean' if same_shape else 'value of rank 0'}; keep the state in add_weight(...) for the "
        "result of one process",
        group,
    )
    return np.asarray(np.mean(values, axis=0)) if same_shape else first


def _means(own: Mapping[str, Any], numbers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        name: float(np.mean([each[name] for each in numbers]))
        if all(isinstance(each.get(name), float) for each in numbers)
        else value
        for name, value in own.items()
    }


def _numbers(result: Mapping[str, Any]) -> dict[str, Number]:
    found = {name: _as_array(value) for name, value in result.items()}
    return {
        name: float(each) if each.ndim == 0 else each
        for name, each in found.items()
        if each.dtype.kind in "fiub"
    }


def _as_float(value: Any) -> Any:
    array = _as_array(value)
    return float(array) if array.ndim == 0 and array.dtype.kind in "fiub" else value


def _as_array(value: Any) -> np.ndarray[Any, Any]:
    if not keras.ops.is_tensor(value):
        return np.asarray(value)
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":  # no number for NumPy
        value = keras.ops.cast(value, "float32")
    array: np.ndarray[Any, Any] = keras.ops.convert_to_numpy(value)
    return array
