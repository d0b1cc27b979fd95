"""Averages gradients while ``backward()`` computes them.

When all gradients of a bucket are final, they are copied into the bucket, and it goes out at once.
When backward ends, a callback of the autograd engine sends the rest, waits, and gives the
parameters the means.

Graphs may differ between ranks and from step to step. Every rank therefore sends every bucket each
time, with zeros where it has no gradient. A report at the end of the last bucket lets all ranks
decide alike: whether any rank has a gradient for a parameter, whether it is sparse on any rank, and
whether it changed after its bucket had gone out. After a reduction the gradients are the same on
every rank, whatever they were before.

Averaging a mean again changes nothing. The order of events is therefore harmless: several backward
passes before a step only cost more reductions.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence, Set
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from hvkit.compression import Compression
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.batch_norm import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients import step_report
from hvkit.frameworks.pytorch.gradients.arrivals import (
    Arrivals,
    calling_thread,
    outermost,
    running_pass,
    watch_nested_passes,
)
from hvkit.frameworks.pytorch.gradients.averaged_steps import AveragedSteps, Window
from hvkit.frameworks.pytorch.gradients.bucket_layout import Layout, Layouts
from hvkit.frameworks.pytorch.gradients.buckets import NO_PARAMETER, Bucket, average_rows
from hvkit.frameworks.pytorch.gradients.changed_gradients import (
    ChangedGradients,
    refuse_early_changes,
)
from hvkit.frameworks.pytorch.gradients.compressed_buckets import (
    ONE_MORE_PASS,
    CompressionKeeper,
    CompressionState,
)
from hvkit.frameworks.pytorch.gradients.nonfinite import NonFinite
from hvkit.frameworks.pytorch.gradients.step_report import (
    ReportVector,
    StepReport,
    checksum_of_rates,
    report_of,
)
from hvkit.frameworks.pytorch.optimizers import around_scaled_steps
from hvkit.strategies.strategy import Averaging
from hvkit.sync.update_hooks import UpdateHooks
from hvkit.watch.calls import call
from hvkit.watch.spans import REDUCTION

# By number, in the order of the calls of distribute, which is the same on every rank. A reducer
# lives as long as its model or an optimizer.
_reducers: WeakValueDictionary[int, GradientReducer] = WeakValueDictionary()
_numbers = itertools.count()


class GradientReducer:
    """Keeps the gradients of some parameters averaged over ranks.

    Args:
        parameters: in the same order on every rank.
        row_sparse: those whose gradients are known to be sparse; the reducer notices others.
        accumulate: backward passes from one reduction to the next.
        name: the same on every rank, and no other reducer's.
        checks: what the ranks compare before they use the means.
        strategy: what mean of the gradients updates use.
        compression: how float32 gradients travel; None for as they are.
        statistics: averaged along with the gradients.
        nonfinite: what looks for gradients that are NaN or infinite; None for nothing.

    Attributes:
        keeper: of what the compression keeps; None if it keeps nothing.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        row_sparse: set[torch.Tensor],
        accumulate: int,
        name: str,
        checks: Checks,
        strategy: Averaging,
        compression: Compression | None = None,
        statistics: RunningStatistics | None = None,
        nonfinite: NonFinite | None = None,
    ) -> None:
        self._strategy = strategy
        self._compression = compression
        self._group = checks.group
        self._wire = Wire("gradients", self._group)
        self.name = name
        self._checks = checks
        self._statistics = statistics
        self._number: dict[torch.Tensor, int] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._sparse: Set[int] = frozenset()
        travels = strategy.gradient_compression(compression)
        self._state = CompressionState(travels) if travels else None
        self._layouts = Layouts(name, self._state)
        self._layout: Layout | None = None
        # Numbers of the parameters to which the last reduction has given means.
        self._averaged: Set[int] = frozenset()
        self.keeper: CompressionKeeper | None = None
        if self._state and self._state.compression.keeps_state:
            self.keeper = CompressionKeeper(strategy, compression, self._state, self._parameters)
        self._window = Window(accumulate, ends_with_epoch=self.keeper is None)
        self._changes = ChangedGradients(self._parameters)
        # Numbers of the parameters whose gradients stay the same tensors.
        self._kept: set[int] = set()
        # What this rank reports if it has all gradients, and none is sparse.
        self._usual: StepReport | None = None
        self._nonfinite = nonfinite
        self._any_nonfinite = False
        self._steps = AveragedSteps(name, self._window, self._reduce_late, self._using, self._used)
        # Parameters on several devices have their hooks called from several threads.
        self._lock = threading.RLock()
        self._arrivals = Arrivals(self._begin_pass, self._send, self._lock)
        _reducers[next(_numbers)] = self
        watch_nested_passes(_end_pass)
        self.add(parameters)
        self._sparse = {self._number[p] for p in row_sparse}

    @property
    def step(self) -> int:
        """The optimizer step that the current gradients are for, counted from 1."""
        return self._steps.done + 1

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._number

    def add(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of more parameters; the same ones on every rank."""
        for p in parameters:
            i = self._number[p] = len(self._parameters)
            self._parameters.append(p)
            if p.is_floating_point() or p.is_complex():
                self._arrivals.add(i, p)
        self._report = ReportVector(len(self._parameters))

    def watch(
        self, optimizers: Sequence[Optimizer], hooks: UpdateHooks, adopt: Callable[[], bool]
    ) -> None:
        """Make sure that each step of an optimizer follows a reduction on every rank.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            hooks: around their steps.
            adopt: adds parameters that are new in the optimizers, and returns whether there were
                any.
        """
        if self._state and self.keeper:
            for each in optimizers:
                around_scaled_steps(each, self._state.refuse_scaled_step)
        if self._nonfinite:
            self._nonfinite.attach(optimizers, hooks)
        self._steps.watch(optimizers, hooks, adopt)

    def _label(self, i: int) -> str:
        return self._checks.label(i, self._parameters[i])

    def _using(self, optimizers: Sequence[Optimizer]) -> None:
        held = (p for each in optimizers for group in each.param_groups for p in group["params"])
        self._changes.use(id(optimizers[0]), (self._number[p] for p in held if p in self._number))

    def _used(self) -> None:
        if self._state:
            self._state.commit(self._averaged)

    def _begin_pass(self, task: int) -> None:
        """Prepare for the first gradient of a backward pass; ``_end_pass`` runs at its end."""
        with self._lock:
            whole = outermost(task)
            # Another thread was here first, or a nested pass begins or ends.
            if whole == self._arrivals.whole:
                self._arrivals.task = task
                return
            if task == whole:
                engine = torch.autograd.Variable._execution_engine
                engine.queue_callback(lambda: _end_pass(task))
            if not self._window.passes and self._state:
                self._state.refuse_another_mean()
            self._arrange()
            self._kept |= self._gradients_to_keep()
            reduces = self._window.begin_pass(calling_thread())
            self._arrivals.begin(task, whole, accumulates=not reduces)

    def _gradients_to_keep(self) -> set[int]:
        """Numbers of the parameters whose gradients must stay the same tensors.

        Called at a time when no pass has replaced them: one that a pass makes is nobody else's.
        """
        if torch.is_grad_enabled():  # backward(create_graph=True): they carry their graph
            return set(range(len(self._parameters)))
        return set().union(*(bucket.kept() for bucket in self._laid_out().buckets))

    def _end_pass(self) -> bool:
        """Count the pass; return whether a reduction is due after it."""
        self._arrivals.end()
        reduces = self._window.end_pass()
        if not reduces:
            self._changes.remember()
        return reduces

    def _arrange(self) -> None:
        """Lay the buckets out again if the parameters changed and no bucket is on its way."""
        if self._layout and any(bucket.handle is not None for bucket in self._layout.buckets):
            return
        statistics = self._statistics.length if self._statistics else 0
        layout = self._layouts.of(self._parameters, self._sparse, self._report.length, statistics)
        if layout is self._layout:
            return
        self._layout = layout
        self._arrivals.follow(layout)
        dense = frozenset(layout.of)
        self._usual = StepReport(dense, frozenset(), frozenset(), layout.trained)

    def _laid_out(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def _reduce_late(self) -> None:
        """Average in a step, if that is not too late; a collective."""
        self._changes.early = self._window.waiting and self._changes.changed()
        self._reduce()

    def reduce(self) -> None:
        """Average what the gradients hold now; a collective.

        Raises:
            ValueError: a compression has averaged those of this step, and keeps what it left out;
                or a backward pass is running.
        """
        if running_pass() != -1:
            raise ValueError(
                "hvkit.reduce_gradients was called while backward() was running, whose gradients "
                "are not complete yet: call it after backward()"
            )
        if self._state:
            self._state.refuse_another_mean("hvkit.reduce_gradients()", ONE_MORE_PASS)
        with call("hvkit.reduce_gradients", self.step, self.name):
            self._reduce()
        self._window.end()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Average everything since the last reduction, where no pass does; a collective."""
        with self._lock:
            self._arrange()
            self._kept |= self._gradients_to_keep()
        self._send_rest()
        self._receive()

    @torch.no_grad()
    def _send_rest(self) -> None:
        with self._lock:
            self._arrivals.end()
            for bucket in self._laid_out().buckets:
                if bucket.handle is None:
                    self._send(bucket, bucket.gradients())
            self._checks.send(self._steps.done, self._parameters)

    @torch.no_grad()
    def _receive(self) -> None:
        with self._lock:
            layout = self._laid_out()
            *buckets, last = layout.buckets
            report = self._report_of_all_ranks(last)
            for bucket in buckets:
                bucket.exchange(self._wire)
            for bucket in buckets:
                bucket.wait(self._wire)
            self._checks.receive(self._steps.done)
            again = {id(layout.of[i]): layout.of[i] for i in report.outdated}
            for bucket in again.values():
                bucket.reset()
                self._send(bucket, bucket.gradients())
                bucket.exchange(self._wire)
                bucket.wait(self._wire)
            self._write(report)
            self._averaged = report.dense
            if self._statistics:
                self._statistics.write(layout.statistics.numbers)
            self._arrivals.outdated.clear()
            self._kept = set()
            self._window.reduced()
            self._changes.remember()
            self._steps.reduced()
            if self._nonfinite:
                bad = self._any_nonfinite
                self._nonfinite.end(bad, self.step, self._parameters, self._label)

    def _report_of_all_ranks(self, last: Bucket) -> StepReport:
        """Wait for the last bucket, the only one that every rank is sure to send.

        Raises:
            RanksDisagreeError: the ranks are at different steps, train different parameters, use
                different learning rates, or have used different gradients.
            ValueError: a rank has changed gradients that were still to be averaged.
        """
        try:
            last.wait(self._wire)
        except RanksDisagreeError:  # it has another length on another rank
            self._refuse_other_parameters()
            raise
        mean = self._laid_out().report.numbers.numpy()
        report, disagreement = self._report.decode(mean, self._wire.size)
        if disagreement.steps:
            step_report.refuse_other_steps(self._steps.done)
        if disagreement.frozen:
            self._refuse_other_parameters()
        self._any_nonfinite = disagreement.nonfinite
        if disagreement.checksums:
            step_report.refuse_other_rates(self._steps.optimizers, self._group)
            self._checks.require_same_gradients(self._changes.used, self._parameters)
        if disagreement.changes.early:
            refuse_early_changes(self._window.length, self._group)
        self._changes.reported(disagreement.changes, self._steps.done)
        return report

    def _refuse_other_parameters(self) -> None:
        step_report.refuse_other_parameters(self._parameters, self._checks.label, self._group)

    def _send(self, bucket: Bucket, gradients: list[torch.Tensor | None]) -> None:
        """Complete a bucket from the gradients of its members, and launch it."""
        bucket.pack(gradients, self._wire.part)
        if self._nonfinite:
            self._nonfinite.look(bucket)
        layout = self._laid_out()
        if bucket is layout.statistics.bucket and self._statistics:
            self._statistics.read_into(layout.statistics.numbers)
        if bucket is layout.report.bucket:
            report = self._report_of_this_rank()
            if self._nonfinite and report.sparse:
                self._nonfinite.look_at_rows({i: self._parameters[i] for i in report.sparse})
            mine = self._report.encode(
                report,
                checksum_of_rates(self._steps.optimizers) ^ self._changes.checksum(),
                self._steps.done,
                self._nonfinite is not None and self._nonfinite.found(self._parameters),
                self._changes.report(),
            )
            layout.report.numbers.copy_(torch.from_numpy(mine))
        bucket.launch(self._wire)

    def _report_of_this_rank(self) -> StepReport:
        """Which gradients this rank has; the same object as long as it has all dense ones."""
        layout, usual = self._laid_out(), self._usual
        assert usual is not None
        complete = all(b.complete for b in layout.buckets if b.numbers[0] != NO_PARAMETER)
        if complete and not self._arrivals.outdated and not self._sparse & layout.trained:
            return usual
        outdated = {bucket.numbers[0] for bucket in self._arrivals.outdated} - {NO_PARAMETER}
        gradients = {i: self._parameters[i].grad for i in layout.trained}
        return report_of(gradients, frozenset(outdated))

    def _write(self, report: StepReport) -> None:
        """Give each parameter that had a gradient on any rank the mean."""
        by_row = report.sparse | (report.dense & self._sparse)
        wanted = None if report is self._usual else report.dense - by_row
        for bucket in self._laid_out().buckets:
            bucket.give(wanted, self._kept)
            bucket.reset()
        if by_row and self._state and self._state.compression.exclusive:
            raise ValueError(
                f"{self._label(min(by_row))} has a row-sparse gradient, which "
                f"{self._strategy} cannot use: make the layer with sparse=False"
            )
        for i in sorted(by_row):
            p = self._parameters[i]
            rows = average_rows(p.grad, p, f"{self.name}.{i}", self._wire, self._compression)
            p.grad = rows.to_dense() if i in report.dense else rows
        self._sparse = (self._sparse | report.sparse) - (report.dense - report.sparse)


def reducers_of(parameters: Iterable[torch.Tensor]) -> list[GradientReducer]:
    """Those that average gradients of these parameters, in the same order on every rank."""
    held = set(parameters)
    return [each for _, each in sorted(_reducers.items()) if not held.isdisjoint(each._number)]


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether a distributed model has this parameter."""
    return any(parameter in reducer for reducer in _reducers.values())


def _end_pass(number: int) -> None:
    """Reduce, at the end of the script's backward pass, for all models that took part in it.

    All send before any waits, in the same order on every rank: the passes of other ranks may have
    reached the models in another order.
    """
    taking_part = [
        reducer for _, reducer in sorted(_reducers.items()) if reducer._arrivals.whole == number
    ]
    due = [reducer for reducer in taking_part if reducer._end_pass()]
    if not due:
        return
    with call("backward()", due[0].step, due[0].name, span=REDUCTION):
        for reducer in due:
            reducer._send_rest()
        for reducer in due:
            reducer._receive()
