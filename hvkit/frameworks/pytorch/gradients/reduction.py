"""Averages the gradients of one model: sends buckets and a report, and gives the means.

Graphs may differ between ranks and from step to step. Every rank therefore sends every bucket each
time, with zeros where it has no gradient. A report at the end of the last bucket has a few numbers
of each rank: which gradients it has, whether one of them is sparse or has changed after its bucket
was sent, how many steps it has done, a checksum of its learning rates, one of its losses' shapes
(``loss_counts.py``), and how the script has changed gradients (``checks.py``). All ranks read the
mean of the reports, and so make the same decisions and get the same gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Set
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hvkit.compression import Compression
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch import ops
from hvkit.frameworks.pytorch.buffers import RunningStatistics
from hvkit.frameworks.pytorch.checks import NO_CHANGES, Changes, Checks, Disagreement
from hvkit.frameworks.pytorch.gradients.bucket_layout import Layout, Layouts, StepReport
from hvkit.frameworks.pytorch.gradients.buckets import Bucket, average_rows
from hvkit.frameworks.pytorch.gradients.nonfinite import NonFinite
from hvkit.frameworks.pytorch.learning_rate import checksum_of_rates
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.strategies.strategy import Averaging
from hvkit.sync.compression_state import CompressionState

# Ranks compare their steps modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8
# Bits that travel of the checksum that must be equal, and of the checksum of losses' shapes.
_BITS = 24
_SHAPE_BITS = 12
# Numbers behind these: whether a gradient is not finite; whether gradients have changed too early,
# since the last reduction, and in a new way; the step, and its square.
_TAIL = 6


class ReportVector:
    """Writes reports as numbers that can be averaged, and reads their mean, if anything is new."""

    def __init__(self, parameters: int) -> None:
        self.parameters = parameters
        self.length = 4 * parameters + _BITS + _SHAPE_BITS + _TAIL
        self._report: StepReport | None = None
        self._bits = slice(4 * parameters, -_TAIL)
        self._checksums: tuple[int, int] | None = None
        self._flags = False, NO_CHANGES
        self._vector = np.zeros(self.length, np.float32)

    def encode(
        self,
        report: StepReport,
        checksum: int,
        steps: int,
        nonfinite: bool = False,
        changes: Changes = NO_CHANGES,
        shapes: int = 0,
    ) -> NDArray[np.float32]:
        """This rank's report as float32 of shape ``(length,)``, valid until the next call."""
        vector = self._vector
        if report is not self._report:
            rows = vector[: self._bits.start].reshape(4, -1)
            rows[:] = 0
            sets = (report.dense, report.sparse, report.outdated, report.trained)
            for row, indices in zip(rows, sets, strict=True):
                row[list(indices)] = 1
            self._report = report
        if (checksum, shapes) != self._checksums:
            bits = [checksum >> b & 1 for b in range(_BITS)]
            bits += [shapes >> b & 1 for b in range(_SHAPE_BITS)]
            vector[self._bits] = bits
            self._checksums = checksum, shapes
        step = steps % _STEP_CYCLE
        self._flags = nonfinite, changes
        vector[-_TAIL:] = nonfinite, *changes, step, step * step
        return vector

    def decode(self, mean: NDArray[Any], size: int) -> tuple[StepReport, Disagreement]:
        """The gradients of any rank, and how the ranks differ, from the mean of their reports.

        It is the same on every rank. The last result of ``encode`` was this rank's report.
        """
        # All are whole numbers, so a mean is either this rank's number or at least 1 / size off. If
        # one rank's number is another one, then it is off on every rank; for steps, their squares'.
        sent = self._vector
        same = mean.tobytes() == sent.tobytes() or np.abs(mean - sent).max() < 0.25 / size
        if self._report is not None and same:
            nonfinite, changes = self._flags
            return self._report, Disagreement(nonfinite=nonfinite, changes=changes)
        values = mean.astype(np.float64)
        rows = values[: self._bits.start].reshape(4, -1)
        bits = _on_some(values[self._bits], size)
        nonfinite, *changed = (bool(flag > 0.5 / size) for flag in values[-_TAIL:-2])
        step, square = values[-2:]
        found = StepReport(*(frozenset(np.flatnonzero(r > 0.5 / size).tolist()) for r in rows))
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


class Reduction:
    """Averages the gradients of some parameters over ranks, again and again.

    Callers hold ``lock``, since hooks of parameters on several devices run in several threads.
    """

    def __init__(
        self,
        checks: Checks,
        strategy: Averaging,
        compression: Compression | None,
        statistics: RunningStatistics | None,
        nonfinite: NonFinite | None,
    ) -> None:
        self.checks, self._parameters = checks, checks.parameters
        self.changes = checks.changes
        self.strategy, self.compression = strategy, compression
        self.nonfinite, self._statistics = nonfinite, statistics
        # Names the script's hooks for which each pass is averaged.
        self.hooks_of_passes: Callable[[], list[str]] = list
        self._wire = Wire("gradients", checks.group)
        chosen = strategy.gradient_compression(compression)
        self.state = CompressionState(chosen, ops, self._wire) if chosen else None
        length = statistics.length if statistics else 0
        self.layouts = Layouts(checks.name, self._parameters, self.state, length)
        self._report = ReportVector(0)
        # Buckets that were sent before one of their gradients changed.
        self.outdated: set[Bucket] = set()
        # Indices of the parameters to which the last reduction has given means.
        self.averaged: Set[int] = frozenset()
        self.lock = threading.RLock()
        # The weight of this rank's gradients in the mean over ranks, and the factor of the mean
        # with which N ranks' weights add up to N.
        self.rank_weight: Callable[[], float] = lambda: 1.0
        self.correction: Callable[[], float] = lambda: 1.0
        # Indices of the parameters whose gradients stay the same tensors.
        self._kept: set[int] = set()

    def arrange(self) -> Layout:
        """Lay the buckets out for the parameters as they are now; call before gradients come."""
        if self._report.parameters != len(self._parameters):
            self._report = ReportVector(len(self._parameters))
        layout = self.layouts.arrange(self._report.length)
        self._kept |= self.layouts.gradients_to_keep()
        return layout

    def send(self, bucket: Bucket) -> None:
        """Complete a bucket from the gradients of its members, and launch it."""
        bucket.pack(self._wire.prescale)
        if bucket.views and (weight := self.rank_weight()) != 1:
            torch._foreach_mul_(bucket.views, weight)
        if self.nonfinite:
            self.nonfinite.look(bucket)
        layout = self.layouts.current
        if bucket is layout.statistics.bucket and self._statistics:
            self._statistics.read_into(layout.statistics.values)
        if bucket is layout.report.bucket:
            layout.report.values.copy_(torch.from_numpy(self._encoded_report()))
        bucket.launch(self._wire)

    def _encoded_report(self) -> NDArray[np.float32]:
        report, checks = self.layouts.report(self.outdated), self.checks
        found = self.nonfinite is not None and self.nonfinite.found(report.sparse)
        checksum = checksum_of_rates(checks.optimizers) ^ self.changes.checksum()
        checksum ^= self.layouts.current.checksum ^ bool(self.hooks_of_passes())
        changes, shapes = self.changes.report(), checks.losses.checksum()
        return self._report.encode(report, checksum, checks.steps, found, changes, shapes)

    def send_rest(self) -> None:
        """Send all buckets that are not in flight yet."""
        buckets = self.layouts.current.buckets
        if buckets[-1].handle is not None:
            self._drop()  # buckets of a reduction that failed, of another model perhaps
        for bucket in buckets:
            if bucket.handle is None:
                self.send(bucket)
        if self.checks.due:
            self.checks.send()

    def receive(self) -> bool:
        """Give the parameters the means; return whether any rank's gradient was not finite."""
        layout = self.layouts.current
        *buckets, last = layout.buckets
        report, disagreement = self._report_of_all_ranks(last)
        for bucket in buckets:
            bucket.exchange(self._wire)
        for bucket in buckets:
            bucket.wait(self._wire)
        if self.checks.handle is not None:
            self.checks.receive()
        again = {id(layout.bucket_of[i]): layout.bucket_of[i] for i in report.outdated}
        for bucket in again.values():
            bucket.reset()
            self.send(bucket)
            bucket.exchange(self._wire)
            bucket.wait(self._wire)
        self._write(report)
        self.averaged = report.dense
        if self._statistics:
            self._statistics.write(layout.statistics.values)
        self.outdated.clear()
        self.checks.losses.begin()
        self._kept = set()
        self.changes.remember()
        return disagreement.nonfinite

    def _report_of_all_ranks(self, last: Bucket) -> tuple[StepReport, Disagreement]:
        """Wait for the last bucket, the only one that every rank is sure to send."""
        try:
            last.wait(self._wire)
        except RanksDisagreeError:  # it has another length on another rank
            self.checks.require_same_parameters()
            raise
        layout = self.layouts.current
        report, found = self._report.decode(layout.report.values.numpy(), self._wire.size)
        hooks = self.hooks_of_passes() if found.checksums else []
        self.checks.refuse(found, layout.channels_last, hooks, self._drop)
        if found.shapes:
            self.checks.compare_losses()
        self.changes.reported(found.changes, self.checks.steps)
        return report, found

    def _drop(self) -> None:
        """Wait for all buckets in flight, and forget them: a script may go on after the error."""
        for bucket in self.layouts.current.buckets:
            if bucket.handle is not None:
                bucket.wait(self._wire)
            bucket.reset()
        if self.state:
            self.state.pending.clear()
        self.changes.early = False
        self.checks.losses.begin()
        self.outdated.clear()

    def _write(self, report: StepReport) -> None:
        """Give each parameter that had a gradient on any rank the mean."""
        layouts = self.layouts
        by_row = report.sparse | (report.dense & layouts.sparse)
        wanted = None if report is layouts.current.usual else report.dense - by_row
        correction = self.correction()
        for bucket in layouts.current.buckets:
            if bucket.views and correction != 1:
                torch._foreach_mul_(bucket.views, correction)
            bucket.give(wanted, self._kept)
            bucket.reset()
        if by_row and self.state and self.state.compression.exclusive:
            raise ValueError(
                f"{self.checks.label(min(by_row))} has a row-sparse gradient, which "
                f"{self.strategy} cannot use: make the layer with sparse=False"
            )
        for i in sorted(by_row):
            p = self._parameters[i]
            if p.grad is not None and (weight := self.rank_weight() * correction) != 1:
                p.grad = p.grad * weight
            rows = average_rows(p.grad, p, f"{self.checks.name}.{i}", self._wire, self.compression)
            p.grad = rows.to_dense() if i in report.dense else rows
        layouts.sparse = (layouts.sparse | report.sparse) - (report.dense - report.sparse)
