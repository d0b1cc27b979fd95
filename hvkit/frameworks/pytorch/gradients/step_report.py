"""The few numbers that travel along with the gradients, and the errors when ranks disagree.

Every rank reports which gradients it has, how many steps it has done, a checksum of its learning
rates, and what the script has done to gradients. The numbers are averaged like gradients, at the
end of the last bucket. All ranks read the same report from the mean and so decide alike what to do
with the gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.group import Group
from hvkit.errors import RanksDisagreeError
from hvkit.watch.rank_errors import mark_as_shown_by

# Ranks compare their steps modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8
# Bits of the checksum that travel.
_BITS = 24
# Numbers behind these: whether a gradient is not finite; whether gradients have changed too early,
# since the last reduction, and in a new way; the step, and its square.
_TAIL = 6


@dataclass(frozen=True)
class StepReport:
    """What one rank, or any rank, had in one reduction.

    Attributes:
        dense: numbers of the parameters with a dense gradient.
        sparse: numbers of those with a sparse gradient.
        outdated: numbers of some whose gradient changed after their bucket had been sent.
        trained: numbers of those that require a gradient.
    """

    dense: Set[int]
    sparse: Set[int]
    outdated: Set[int]
    trained: Set[int]


def report_of(gradients: Mapping[int, torch.Tensor | None], outdated: Set[int]) -> StepReport:
    """The report of a rank.

    Args:
        gradients: of the parameters that require one, by number.
        outdated: numbers of some whose gradient changed after their bucket had been sent.
    """
    there = {i: g.is_sparse for i, g in gradients.items() if g is not None}
    return StepReport(
        dense=frozenset(i for i, sparse in there.items() if not sparse),
        sparse=frozenset(i for i, sparse in there.items() if sparse),
        outdated=outdated,
        trained=frozenset(gradients),
    )


@dataclass(frozen=True)
class Changes:
    """What the script has done to gradients after ``backward()``, on one rank or on any.

    Attributes:
        early: whether it has changed some before they were averaged.
        changed: whether an optimizer has used some that were changed after they were averaged.
        new: whether they were changed in a way that has not been compared yet.
    """

    early: bool = False
    changed: bool = False
    new: bool = False


@dataclass(frozen=True)
class Disagreement:
    """How the ranks differ.

    Attributes:
        frozen: whether some ranks train parameters that others do not.
        checksums: whether they use different learning rates, or have used different gradients.
        steps: whether they have done different numbers of optimizer steps.
        nonfinite: whether any has a gradient that is NaN or infinite.
        changes: what any has done to gradients.
    """

    frozen: bool = False
    checksums: bool = False
    steps: bool = False
    nonfinite: bool = False
    changes: Changes = Changes()


_NO_CHANGES = Changes()


class ReportVector:
    """Writes reports as numbers that can be averaged, and reads their mean.

    It does so anew only if something is not as in the last step.

    Args:
        parameters: how many the model has.
    """

    def __init__(self, parameters: int) -> None:
        self.length = 4 * parameters + _BITS + _TAIL
        self._report: StepReport | None = None
        self._checksum: int | None = None
        self._vector = np.zeros(self.length, np.float32)

    def encode(
        self,
        report: StepReport,
        checksum: int,
        steps: int,
        nonfinite: bool = False,
        changes: Changes = _NO_CHANGES,
    ) -> NDArray[np.float32]:
        """This rank's report as a float32 array of shape ``(length,)``, valid until the next call.

        Args:
            report: of this rank.
            checksum: of what must be equal on all ranks.
            steps: optimizer steps done.
            nonfinite: whether a gradient is NaN or infinite.
            changes: what the script has done to gradients.
        """
        vector = self._vector
        if report is not self._report:
            rows = vector[: -_BITS - _TAIL].reshape(4, -1)
            rows[:] = 0
            kinds = (report.dense, report.sparse, report.outdated, report.trained)
            for row, numbers in zip(rows, kinds, strict=True):
                row[list(numbers)] = 1
            self._report = report
        if checksum != self._checksum:
            vector[-_BITS - _TAIL : -_TAIL] = [checksum >> b & 1 for b in range(_BITS)]
            self._checksum = checksum
        step = steps % _STEP_CYCLE
        flags = nonfinite, changes.early, changes.changed, changes.new
        vector[-_TAIL:] = *flags, step, step * step
        return vector

    def decode(self, mean: NDArray[Any], size: int) -> tuple[StepReport, Disagreement]:
        """What any rank reported, and how the ranks differ; the same on every rank.

        Args:
            mean: over ranks, of the results of ``encode``; this rank's was its last one.
            size: the number of ranks.
        """
        # All are whole numbers, so a mean is either this rank's number or at least 1 / size off. If
        # one rank's number is another one, then it is off on every rank; for steps, their squares'.
        if self._report is not None and np.abs(mean - self._vector).max() < 0.25 / size:
            nonfinite, *changes = (bool(flag) for flag in self._vector[-_TAIL:-2])
            return self._report, Disagreement(nonfinite=nonfinite, changes=Changes(*changes))
        values = mean.astype(np.float64)
        rows = values[: -_BITS - _TAIL].reshape(4, -1)
        nonfinite, *changes = (bool(flag > 0.5 / size) for flag in values[-_TAIL:-2])
        step, square = values[-2:]
        found = StepReport(*(_numbers(row > 0.5 / size) for row in rows))
        return found, Disagreement(
            frozen=bool(_on_some(rows[3], size).any()),
            checksums=bool(_on_some(values[-_BITS - _TAIL : -_TAIL], size).any()),
            steps=bool(square - step * step > 0.25 / size),
            nonfinite=nonfinite,
            changes=Changes(*changes),
        )


def _on_some(means: NDArray[Any], size: int) -> NDArray[np.bool_]:
    """Which means come from zeros on some ranks and ones on others."""
    return (means > 0.5 / size) & (means < 1 - 0.5 / size)


def _numbers(row: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(row.nonzero()[0].tolist())


def refuse_other_steps(done: int) -> None:
    """Raise because the ranks have done different numbers of optimizer steps.

    Args:
        done: how many this rank has done.
    """
    raise RanksDisagreeError(
        f"the ranks are at different optimizer steps (rank {runtime.rank()} has done {done}): "
        "every rank must call backward() and step() equally often"
    )


def refuse_other_parameters(
    parameters: Sequence[torch.nn.Parameter],
    label: Callable[[int, torch.Tensor], str],
    group: Group,
    call: str = "backward()",
) -> None:
    """Raise on every rank unless all train the same parameters; a collective.

    Args:
        parameters: all of the model's.
        label: what to call a parameter, from its number and itself.
        group: the ranks that train them.
        call: the user's call.
    """
    mine = {i for i, p in enumerate(parameters) if p.requires_grad}
    everyone = collectives.gather(call, mine, group)
    for rank, theirs in zip(group.members, everyone, strict=True):
        if theirs == everyone[0]:
            continue
        i = min(theirs ^ everyone[0])
        trains, freezes = (rank, group.first) if i in theirs else (group.first, rank)
        error = RanksDisagreeError(
            f"{label(i, parameters[i])} requires a gradient on rank {trains} but not on rank "
            f"{freezes}: freeze the same parameters on every rank (to choose them at random, use "
            "a generator with the same seed on all ranks)"
        )
        raise mark_as_shown_by(error, group.first)


def checksum_of_rates(optimizers: Sequence[Optimizer]) -> int:
    """A number that differs, in all likelihood, if the learning rates do."""
    return zlib.crc32(repr([rate for _, rate in _rates(optimizers, fetch=False)]).encode())


def refuse_other_rates(
    optimizers: Sequence[Optimizer], group: Group, call: str = "backward()"
) -> None:
    """Raise on every rank unless all use the same learning rates; a collective.

    Args:
        optimizers: those that update the parameters.
        group: the ranks that take part.
        call: the user's call.
    """
    everyone = collectives.gather(call, _rates(optimizers, fetch=True), group)
    for rank, theirs in zip(group.members, everyone, strict=True):
        for (name, first), (_, other) in zip(everyone[0], theirs, strict=True):
            if first != other:
                error = RanksDisagreeError(
                    f"the learning rate of {name} is {first!r} on rank {group.first} but {other!r} "
                    f"on rank {rank}: set the same rate on every rank; a scheduler that follows a "
                    "metric needs the mean over ranks: scheduler.step(hvkit.average(loss))"
                )
                raise mark_as_shown_by(error, group.first)


def _rates(optimizers: Sequence[Optimizer], *, fetch: bool) -> list[tuple[str, float]]:
    """The learning rates, with names.

    Args:
        optimizers: those that update the parameters.
        fetch: also those on a GPU, which would delay every step.
    """
    return [
        (f"parameter group {g} of {type(optimizer).__name__}", float(rate))
        for optimizer in optimizers
        for g, group in enumerate(optimizer.param_groups)
        if isinstance(rate := group.get("lr"), int | float)
        or (isinstance(rate, torch.Tensor) and (fetch or rate.device.type == "cpu"))
    ]
