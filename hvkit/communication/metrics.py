"""Metrics of all ranks: means over ranks, and decisions that all ranks take together."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, overload

from hvkit.argument_checks import check_count, check_number, check_one_of
from hvkit.communication.collectives import gather_or_raise
from hvkit.errors import RanksDisagreeError
from hvkit.registry import gather_module, in_graph
from hvkit.runtime import Group
from hvkit.watch.calls import named


@overload
def average(value: float, weight: float | None = None) -> float: ...


@overload
def average(value: Mapping[str, float], weight: float | None = None) -> dict[str, float]: ...


@named("hvkit.average")
def average(
    value: float | Mapping[str, float], weight: float | None = None
) -> float | dict[str, float]:
    """Mean over ranks of a number, or of each number in a dict, in float64.

    A collective: every rank must call it, and every rank gets the mean. A NaN on any rank makes the
    mean NaN.

    It also works in graphs of TensorFlow, as in a loss of ``fit``: the means are tensors there,
    through which no gradients flow.

    Args:
        value: this rank's number or numbers, for instance its mean loss.
        weight: the number of samples behind them; ranks with unequal parts of the data then give
            the mean over all samples. A rank with weight 0 has no influence, whatever its values,
            and may pass an empty dict. If all weights are 0, the means are NaN. None: every rank
            counts the same.

    Raises:
        TypeError: a value or the weight is not a number, or only some ranks pass a weight.
        ValueError: a weight is negative or not finite.
        RanksDisagreeError: the ranks' dicts have different keys.
        RankLostError: another rank has ended, or waits in another call.
    """
    single = not isinstance(value, Mapping)
    values = {"value": value} if single else dict(value)  # type: ignore[arg-type]
    if in_graph("hvkit.average", weight, *values.values()):
        found: Any = gather_module("tensorflow").average(values, weight)
        return found["value"] if single else found  # type: ignore[no-any-return]
    numbers: dict[str, float] = {}
    factor: float | None = None
    problem: Exception | None = None
    try:
        numbers = {
            key: _as_float(each, "average takes numbers", f" for {key!r}")
            for key, each in values.items()
        }
        if weight is not None:
            factor = _as_float(weight, "weight must be a number")
            if not (math.isfinite(factor) and factor >= 0):
                raise ValueError(f"weight must be a finite number from 0, got {weight!r}")
    except (TypeError, ValueError) as error:
        problem = error
    gathered = gather_or_raise("average", problem, (numbers, factor))
    if len({w is None for _, w in gathered}) > 1:
        without = [rank for rank, (_, w) in enumerate(gathered) if w is None]
        raise TypeError(f"average needs a weight on every rank or on none: none on {without}")
    weights = [1.0 if w is None else w for _, w in gathered]
    counted = {rank: gathered[rank][0] for rank, w in enumerate(weights) if w}
    if counted:
        total = math.fsum(weights)
        means = {
            key: sum(of_rank[key] * weights[rank] for rank, of_rank in counted.items()) / total
            for key in _same_keys(counted)
        }
    else:
        means = {key: math.nan for of_rank, _ in gathered for key in of_rank}
    return means["value"] if single else means


@named("hvkit.any_rank")
def any_rank(flag: bool) -> bool:
    """Whether the flag is true on any rank; the same result on every rank.

    For decisions that all ranks must take together, such as leaving the training loop:
    ``if hvkit.any_rank(out_of_time()): break``. A collective: every rank must call it each time.
    If rank 0 alone decides, use ``hvkit.broadcast(flag)``.

    Args:
        flag: this rank's; anything with a truth value.

    Raises:
        TypeError: the flag is neither true nor false.
        RanksDisagreeError: another rank makes another collective call.
    """
    if in_graph("hvkit.any_rank", flag):  # as in a loss of ``fit``; a tensor there
        return gather_module("tensorflow").any_rank(flag)  # type: ignore[no-any-return]
    return any_rank_of(None, flag)


def any_rank_of(group: Group | None, flag: bool) -> bool:
    """``any_rank`` among the ranks of a group; None for all."""
    value, problem = False, None
    try:
        value = bool(flag)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = TypeError(f"any_rank takes True or False, got {flag!r}: {error}")
    return any(gather_or_raise("any_rank", problem, value, group))


class EarlyStopping:
    """Ends a custom training loop when a metric stops improving, on all ranks at once.

    Call it once an epoch with the rank's metric:

        early_stopping = hvkit.EarlyStopping(patience=3)
        for epoch in range(epochs):
            ...
            if early_stopping(val_loss, weight=samples):
                break

    It averages the metric over ranks first, so all ranks see the same number and stop together.
    With Keras's ``fit`` use ``keras.callbacks.EarlyStopping``: its metrics are averaged already.

    Args:
        patience: stop after this many calls in a row without improvement; at least 1.
        min_delta: an improvement must exceed this.
        mode: ``"min"`` if lower is better, ``"max"`` if higher is.

    Raises:
        TypeError: ``patience`` is not an int, or ``min_delta`` no number.
        ValueError: ``patience``, ``min_delta`` or ``mode`` has a wrong value.
    """

    def __init__(
        self, patience: int, *, min_delta: float = 0.0, mode: Literal["min", "max"] = "min"
    ) -> None:
        self.patience = check_count("patience", patience)
        self.min_delta = check_number("min_delta", min_delta, least=0)
        self.mode = check_one_of("mode", mode, ("min", "max"))
        self.best = math.nan
        """The best mean so far; NaN before the first."""
        self.waited = 0
        """Calls since that one."""

    @named("hvkit.EarlyStopping")
    def __call__(self, metric: float, weight: float | None = None) -> bool:
        """Whether to stop now; the same on every rank. A collective, see ``average``.

        A NaN counts as no improvement.
        """
        mean = average(metric, weight)
        if self._is_better(mean):
            self.best, self.waited = mean, 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _is_better(self, mean: float) -> bool:
        if math.isnan(self.best):
            return not math.isnan(mean)
        gain = self.best - mean if self.mode == "min" else mean - self.best
        return gain > self.min_delta

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint saves."""
        return {"best": None if math.isnan(self.best) else self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of ``state_dict``."""
        best = state["best"]
        self.best, self.waited = math.nan if best is None else float(best), int(state["waited"])


def _as_float(value: Any, wanted: str, of: str = "") -> float:
    try:
        return float(value)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        got = f"{value!r} of type {type(value).__name__}"
        raise TypeError(f"{wanted}, got {got}{of}") from error


def _same_keys(by_rank: Mapping[int, Mapping[str, float]]) -> Mapping[str, float]:
    first, reference = next(iter(by_rank.items()))
    for rank, other in by_rank.items():
        if other.keys() != reference.keys():
            raise RanksDisagreeError(
                f"average needs the same keys on every rank: rank {first} has "
                f"{sorted(reference)}, rank {rank} has {sorted(other)}"
            )
    return reference
