"""What each rank reports of a step, in a few numbers that travel along with the gradients.

Every rank reports which gradients it has, how many steps it has done, a checksum of its learning
rates, one of its losses' shapes (``loss_counts.py``), and what the script has done to gradients.
The numbers are averaged like gradients, at the end of the last bucket. All ranks read the same
report from the mean, and so they make the same decisions about the gradients.

A reduction leaves the same gradients on every rank. Clipping, unscaling and the like change them in
the same way everywhere, so the weights stay the same. Noise that each rank draws for itself does
not. Ranks compare the gradients that an optimizer uses in its first step, and after 1, 2, 4, 8, ...
steps. In between they look at the version counters of the gradients, which costs next to nothing,
and compare again if a rank has changed its gradients in a way that is new to it, and after 1, 2, 4,
8, ... steps with changes. Changes through ``data`` or a NumPy array do not move the counters. To
compare, ranks combine a checksum of the gradients with that of the rates. Only if it differs do
they send fingerprints (``checks.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter, sub
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.fingerprints import rows_of_gradients
from hvkit.sync.fingerprints import Rows
from hvkit.watch.rank_errors import mark_as_shown_by

# Ranks compare their steps modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8
# Bits that travel of the checksum of what must be equal, and of that of losses' shapes.
_BITS = 24
_SHAPE_BITS = 12
# Numbers behind these: whether a gradient is not finite; whether gradients have changed too early,
# since the last reduction, and in a new way; the step, and its square.
_TAIL = 6

# How the gradients of a model have changed: see ``ChangedGradients._kinds``.
_Kinds = frozenset[Hashable]
# Sets of kinds that a comparison follows at once. There are few; this bounds what odd scripts cost.
_MOST_KINDS = 16

_gradient = attrgetter("grad")
_version: Callable[[object], int] = attrgetter("_version")


@dataclass(frozen=True)
class StepReport:
    """What one rank, or any rank, had in one reduction.

    Attributes:
        dense: indices of the parameters with a dense gradient.
        sparse: indices of those with a sparse gradient.
        outdated: indices of some whose gradient changed after their bucket had been sent.
        trained: indices of those that require a gradient.
    """

    dense: Set[int]
    sparse: Set[int]
    outdated: Set[int]
    trained: Set[int]


def report_of(gradients: Mapping[int, torch.Tensor | None], outdated: Set[int]) -> StepReport:
    """The report of a rank.

    Args:
        gradients: of the parameters that require one, by index.
        outdated: indices of some whose gradient changed after their bucket had been sent.
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
        checksums: whether they use different learning rates, have used different gradients, or only
            some have hooks of the script.
        steps: whether they have done different numbers of optimizer steps.
        nonfinite: whether any has a gradient that is NaN or infinite.
        shapes: whether their losses have other shapes.
        changes: what any has done to gradients.
    """

    frozen: bool = False
    checksums: bool = False
    steps: bool = False
    nonfinite: bool = False
    shapes: bool = False
    changes: Changes = Changes()


_NO_CHANGES = Changes()


class ReportVector:
    """Writes reports as numbers that can be averaged, and reads their mean.

    It does so anew only if something is not as in the last step.

    Args:
        parameters: how many the model has.
    """

    def __init__(self, parameters: int) -> None:
        self.length = 4 * parameters + _BITS + _SHAPE_BITS + _TAIL
        self._report: StepReport | None = None
        self._bits = slice(4 * parameters, -_TAIL)
        self._checksums: tuple[int, int] | None = None
        self._flags = False, _NO_CHANGES
        self._vector = np.zeros(self.length, np.float32)

    def encode(
        self,
        report: StepReport,
        checksum: int,
        steps: int,
        nonfinite: bool = False,
        changes: Changes = _NO_CHANGES,
        shapes: int = 0,
    ) -> NDArray[np.float32]:
        """This rank's report as a float32 array of shape ``(length,)``, valid until the next call.

        Args:
            report: of this rank.
            checksum: of what must be equal on all ranks.
            steps: optimizer steps done.
            nonfinite: whether a gradient is NaN or infinite.
            changes: what the script has done to gradients.
            shapes: a checksum of those of the losses.
        """
        vector = self._vector
        if report is not self._report:
            rows = vector[: self._bits.start].reshape(4, -1)
            rows[:] = 0
            kinds = (report.dense, report.sparse, report.outdated, report.trained)
            for row, indices in zip(rows, kinds, strict=True):
                row[list(indices)] = 1
            self._report = report
        if (checksum, shapes) != self._checksums:
            bits = [checksum >> b & 1 for b in range(_BITS)]
            bits += [shapes >> b & 1 for b in range(_SHAPE_BITS)]
            vector[self._bits] = bits
            self._checksums = checksum, shapes
        step = steps % _STEP_CYCLE
        self._flags = nonfinite, changes
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
        own = self._vector
        same = mean.tobytes() == own.tobytes() or np.abs(mean - own).max() < 0.25 / size
        if self._report is not None and same:
            nonfinite, changes = self._flags
            return self._report, Disagreement(nonfinite=nonfinite, changes=changes)
        values = mean.astype(np.float64)
        rows = values[: self._bits.start].reshape(4, -1)
        bits = _on_some(values[self._bits], size)
        nonfinite, *changed = (bool(flag > 0.5 / size) for flag in values[-_TAIL:-2])
        step, square = values[-2:]
        found = StepReport(*(_indices(row > 0.5 / size) for row in rows))
        return found, Disagreement(
            frozen=bool(_on_some(rows[3], size).any()),
            checksums=bool(bits[:_BITS].any()),
            steps=bool(square - step * step > 0.25 / size),
            nonfinite=nonfinite,
            shapes=bool(bits[_BITS:].any()),
            changes=Changes(*changed),
        )


def _on_some(means: NDArray[Any], size: int) -> NDArray[np.bool_]:
    """Which means come from zeros on some ranks and ones on others."""
    return (means > 0.5 / size) & (means < 1 - 0.5 / size)


def _indices(row: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(row.nonzero()[0].tolist())


def checksum_of_rates(optimizers: Sequence[Optimizer]) -> int:
    """A number that differs, in all likelihood, if the learning rates do."""
    return zlib.crc32(repr([rate for _, rate in rates_of(optimizers, fetch=False)]).encode())


def rates_of(optimizers: Sequence[Optimizer], *, fetch: bool) -> list[tuple[str, float]]:
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


def refuse_other_rates(everyone: Mapping[int, Sequence[tuple[str, float]]]) -> None:
    """Raise on every rank unless all use the same learning rates.

    Args:
        everyone: the ranks' rates, with names, by rank in ascending order.

    Raises:
        RanksDisagreeError: names the first rate that differs.
    """
    (shows, rates), *others = everyone.items()
    for rank, theirs in others:
        for (name, first), (_, other) in zip(rates, theirs, strict=True):
            if first != other:
                error = RanksDisagreeError(
                    f"the learning rate of {name} is {first!r} on rank {shows} but {other!r} on "
                    f"rank {rank}: set the same rate on every rank; a scheduler that follows a "
                    "metric needs the mean over ranks: scheduler.step(hvkit.average(loss))"
                )
                raise mark_as_shown_by(error, shows)


class ChangedGradients:
    """The changes to the gradients of one model.

    Args:
        parameters: all of the model; it may grow.

    Attributes:
        early: whether the script has changed gradients before they were averaged.
        used: fingerprints of gradients that steps have used, by parameter, to be compared.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.early = False
        self.used: dict[int, Rows] = {}
        self._parameters = parameters
        # Of all gradients, as the last pass or reduction has left them. Not the gradients: whoever
        # holds one keeps its bucket from being used again.
        self._identities: list[int] = []
        self._versions: list[int] = []
        self._known: set[_Kinds] = set()
        self._changed = self._new = False
        self._steps_with_changes = 0
        self._compares = True
        # The optimizers whose first step is done.
        self._stepped: set[int] = set()

    def remember(self) -> None:
        """Take the gradients as they are now for unchanged."""
        gradients = list(map(_gradient, self._parameters))
        self._identities = list(map(id, gradients))
        self._versions = _versions(gradients)

    def changed(self) -> bool:
        """Whether the script has changed a gradient since; removing one is no change."""
        return bool(self._kinds() - {"removed"})

    def use(self, optimizer_index: int, indices: Iterable[int]) -> None:
        """Note what a step uses.

        Args:
            optimizer_index: of the one that steps.
            indices: of its parameters.
        """
        if kinds := self._kinds():
            self._changed = True
            if kinds not in self._known and len(self._known) < _MOST_KINDS:
                self._known.add(kinds)
                self._new = True
        if not self._compares and optimizer_index in self._stepped:
            return
        self._stepped.add(optimizer_index)
        held = {i: g for i in indices if (g := self._parameters[i].grad) is not None}
        self.used.update(zip(held, rows_of_gradients(list(held.values())), strict=True))

    def report(self) -> Changes:
        """What this rank reports of its steps since the last reduction."""
        return Changes(early=self.early, changed=self._changed, new=self._new)

    def checksum(self) -> int:
        """A number that differs, in all likelihood, if ranks have used different gradients."""
        if not self.used:
            return 0
        rows = [(i, row.tolist()) for i, row in sorted(self.used.items())]
        return zlib.crc32(repr(rows).encode())

    def reported(self, on_any_rank: Changes, steps: int) -> None:
        """Decide, as all ranks do, whether the next step's gradients are compared.

        Args:
            on_any_rank: what any rank has reported.
            steps: how many each rank has done.
        """
        self._steps_with_changes += on_any_rank.changed
        counts = [steps, self._steps_with_changes if on_any_rank.changed else 0]
        again = on_any_rank.new or any(n.bit_count() == 1 for n in counts)
        self._compares = again or (self._compares and not self.used)
        self.used.clear()
        self.early = self._changed = self._new = False

    def _kinds(self) -> _Kinds:
        """How gradients have changed: a number of operations in place, or what was done instead."""
        gradients = list(map(_gradient, self._parameters))
        identities, versions = list(map(id, gradients)), _versions(gradients)
        if identities == self._identities:
            if versions == self._versions:
                return frozenset()
            return frozenset(map(sub, versions, self._versions)) - {0}
        then = zip(self._identities, self._versions, strict=True)
        now = zip(gradients, identities, versions, strict=True)
        kinds: set[Hashable] = set()
        # Parameters that have come since are at the end, and have not been averaged yet.
        for (was, old), (gradient, identity, new) in zip(then, now, strict=False):
            if was != identity:
                kinds.add("removed" if gradient is None else "replaced")
            elif old != new:
                kinds.add(new - old)
        return frozenset(kinds)


def _versions(gradients: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return list(map(_version, gradients))
    # None has none, and nor have tensors that inference mode has made.
    except (AttributeError, RuntimeError):
        return [-1 if g is None or g.is_inference() else g._version for g in gradients]
