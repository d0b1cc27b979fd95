"""Averages gradients while ``backward()`` computes them, and before each step if none has.

When all gradients of a bucket are final, they are copied into the bucket, and it is sent at once.
When backward ends, a callback of the autograd engine sends the rest, waits, and gives the
parameters the means.

Graphs may differ between ranks and from step to step. Every rank therefore sends every bucket each
time, with zeros where it has no gradient. From a report at the end of the last bucket all ranks
learn whether any rank has a gradient for a parameter, whether it is sparse on any rank, and whether
it changed after its bucket had been sent. After a reduction all ranks have the same gradients.

Averaging a mean again changes nothing. The order of events is therefore harmless: several backward
passes before a step only cost more reductions.
"""

from __future__ import annotations

import functools
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
from hvkit.frameworks.pytorch.collectives import ops
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients import step_report
from hvkit.frameworks.pytorch.gradients.backward_passes import (
    GradientHooks,
    Window,
    refuse_in_pass,
    watch_nested_passes,
)
from hvkit.frameworks.pytorch.gradients.bucket_layout import Layout, Layouts, device_index
from hvkit.frameworks.pytorch.gradients.buckets import NO_PARAMETER, Bucket
from hvkit.frameworks.pytorch.gradients.compressed_buckets import (
    refuse_another_mean,
    refuse_scaled_step,
)
from hvkit.frameworks.pytorch.gradients.nonfinite import NonFinite
from hvkit.frameworks.pytorch.gradients.script_hooks import ScriptHooks
from hvkit.frameworks.pytorch.gradients.sparse import average_rows
from hvkit.frameworks.pytorch.gradients.step_report import Disagreement, StepReport
from hvkit.frameworks.pytorch.optimizers import around_scaled_steps, before_unscaling, mean_of_ranks
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.strategies.strategy import Averaging
from hvkit.sync.compression_state import CompressionKeeper, CompressionState
from hvkit.sync.update_hooks import Closure, Feature, Order
from hvkit.watch.calls import call
from hvkit.watch.spans import REDUCTION

# By id, in the order of the calls of distribute, which is the same on every rank. A reducer lives
# as long as its model or an optimizer.
_reducers: WeakValueDictionary[int, GradientReducer] = WeakValueDictionary()
_reducer_ids = itertools.count()


class GradientReducer:
    """Keeps the gradients of some parameters averaged over ranks.

    Args:
        parameters: in the same order on every rank.
        row_sparse: those whose gradients are known to be sparse; the reducer notices others.
        accumulate: backward passes from one reduction to the next.
        checks: what the ranks compare before they use the means.
        strategy: what mean of the gradients updates use.
        compression: how float32 gradients travel; None for as they are.
        statistics: averaged along with the gradients.
        nonfinite: what looks for gradients that are NaN or infinite; None for nothing.
        counts_passes: whether it follows backward passes itself. If not, whoever runs them calls
            ``begin_pass`` and ``end_pass``.

    Attributes:
        keeper: of what the compression keeps; None if it keeps nothing.
        script_hooks: those of the script on the parameters, which get averaged gradients.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        row_sparse: set[torch.Tensor],
        accumulate: int,
        checks: Checks,
        strategy: Averaging,
        compression: Compression | None = None,
        statistics: RunningStatistics | None = None,
        nonfinite: NonFinite | None = None,
        *,
        counts_passes: bool = True,
    ) -> None:
        self._strategy = strategy
        self._compression = compression
        self._own_weight: Callable[[], float] = lambda: 1.0
        self._correction: Callable[[], float] = lambda: 1.0
        self._wire = Wire("gradients", checks.group)
        self.name = checks.name
        self._checks = checks
        self._statistics = statistics
        self._index_of: dict[torch.Tensor, int] = {}
        self._parameters: list[torch.nn.Parameter] = []
        chosen = strategy.gradient_compression(compression)
        self._state = state = CompressionState(chosen, ops, self._wire) if chosen else None
        self._layouts = Layouts(self.name, self._state)
        self._layout: Layout | None = None
        # Indices of the parameters to which the last reduction has given means.
        self._averaged: Set[int] = frozenset()
        self.keeper: CompressionKeeper | None = None
        if state and state.compression.keeps_state:
            in_order = self._parameters  # which grows
            self.keeper = CompressionKeeper(
                strategy, compression, {"": state}, lambda: range(len(in_order))
            )
        self._window = Window(accumulate, ends_with_epoch=self.keeper is None)
        self._changes = step_report.ChangedGradients(self._parameters)
        # Indices of the parameters whose gradients stay the same tensors.
        self._kept: set[int] = set()
        self._nonfinite = nonfinite
        self._counts_passes = counts_passes
        # Several optimizers that use one reduction take one step together.
        self._steps_done, self._step_counted = 0, False
        self._optimizers: list[Optimizer] = []
        self._optimizers_watched = 0
        # Indices of those among them that have not used what the last reduction has averaged.
        self._unused: set[int] = set()
        # Parameters on several devices have their hooks called from several threads.
        self._lock = threading.RLock()
        self._hooks = GradientHooks(
            self._begin_pass, _end_pass_of_all_models, self._send, self._lock
        )
        self.script_hooks = ScriptHooks(
            lambda p: self._label(self._index_of[p]), self._why_hooks_do_not_wait
        )
        _reducers[next(_reducer_ids)] = self
        checks.begin_step(0)
        self.add(parameters)
        self._sparse: Set[int] = {self._index_of[p] for p in row_sparse}

    @property
    def step(self) -> int:
        """The optimizer step that the current gradients are for, counted from 1."""
        return self._steps_done + 1

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._index_of

    def weigh(
        self, own_weight: Callable[[], float], correction: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Let gradients count more on some ranks than on others.

        Args:
            own_weight: returns how often this rank's count in the mean over ranks. It may wait for
                other ranks.
            correction: returns by what the mean is multiplied, where N ranks' weights add up to N
                only with it; the same on every rank. It may wait for other ranks.
        """
        self._own_weight = self._checks.losses.own_weight = own_weight
        self._correction = correction
        self._checks.losses.ignore_shapes()

    def add(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of more parameters; the same ones on every rank."""
        for p in parameters:
            i = self._index_of[p] = len(self._parameters)
            self._parameters.append(p)
            self.script_hooks.add([p])
            if self._counts_passes and (p.is_floating_point() or p.is_complex()):
                self._hooks.add(i, p)
        self._report = step_report.ReportVector(len(self._parameters))

    def watch(
        self, optimizers: Sequence[Optimizer], hooks: UpdateHooks, adopt: Callable[[], bool]
    ) -> None:
        """Make sure that each step of an optimizer follows a reduction on every rank.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            hooks: around their steps.
            adopt: adds parameters that are new in the optimizers; returns whether there are any.
        """
        optimizer_index = self._optimizers_watched
        self._optimizers_watched += 1
        self._optimizers.extend(optimizers)

        def average(point: str) -> None:
            if adopt() or self._window.waiting or optimizer_index not in self._unused:
                with call(point, self.step, self.name):
                    self._changes.early = self._window.waiting and self._changes.changed()
                    self.script_hooks.begin(missed=True)
                    self._reduce()
                    self.script_hooks.run()
            self._window.end()

        def before(optimizer: Optimizer, closure: Closure | None) -> None:
            refuse_in_pass(f"{type(optimizer).__name__}.step()")
            if closure is not None:
                adopt()

        def gradients(optimizer: Optimizer) -> None:
            average(f"{type(optimizer).__name__}.step()")
            self._unused.discard(optimizer_index)
            groups = (group for each in optimizers for group in each.param_groups)
            held = (p for group in groups for p in group["params"])
            indices = (self._index_of[p] for p in held if p in self._index_of)
            self._changes.use(optimizer_index, indices)

        def renewed() -> bool:
            return self._window.waiting or optimizer_index in self._unused

        end = self._end_step
        hooks.add(Feature(Order.RANKS, before, gradients, renewed, loss=mean_of_ranks, after=end))
        for each in optimizers:
            before_unscaling(each, lambda: average("GradScaler.unscale_()"))
            if self._state and self.keeper:
                around_scaled_steps(each, functools.partial(refuse_scaled_step, self._state))
        if self._nonfinite:
            self._nonfinite.attach(optimizers, hooks)

    def _label(self, i: int) -> str:
        return self._checks.label(i, self._parameters[i])

    def _why_hooks_do_not_wait(self) -> str | None:
        """Why the script's hooks on parameters see gradients that are not averaged; None if not."""
        if self._strategy.has_momentum:  # no update uses a mean of gradients
            return ""
        if self.keeper is not None and self._window.length > 1:
            return f"where accumulate={self._window.length} averages compressed gradients once"
        return None

    def _end_step(self, optimizer: Optimizer) -> None:
        if self._state:
            self._state.commit(self._averaged)
            self._state.pending.clear()  # of parameters that no rank had a gradient of
        self._steps_done += not self._step_counted
        self._step_counted = True
        if self._steps_done >= self._checks.next:
            self._checks.begin_step(self._steps_done)

    def _begin_pass(self) -> bool:
        """Prepare for a backward pass; return whether it ends with a reduction."""
        if not self._window.passes and self._state:
            refuse_another_mean(self._state, "backward()")
        self._arrange()
        self._kept |= self._gradients_to_keep()
        self.script_hooks.begin(divided=not self._counts_passes)
        return self._window.begin_pass(reduces=self._hooks_need_each_pass())

    def _hooks_need_each_pass(self) -> bool:
        """Whether passes are averaged that would not be without hooks of the script.

        One process calls them in each pass.
        """
        if self._window.length == 1 or not self.script_hooks:
            return False
        return self._why_hooks_do_not_wait() is None

    def _gradients_to_keep(self) -> set[int]:
        """Indices of the parameters whose gradients must stay the same tensors.

        Called at a time when no pass has replaced them: one that a pass makes is nobody else's.
        """
        if torch.is_grad_enabled():  # backward(create_graph=True): they carry their graph
            return set(range(len(self._parameters)))
        return set().union(*(bucket.kept() for bucket in self._laid_out().buckets))

    def begin_pass(self) -> None:
        """Before a backward pass that the reducer does not follow itself."""
        self._begin_pass()

    @torch.no_grad()
    def end_pass(self) -> None:
        """After such a pass: average the gradients if they are those of a step; a collective."""
        if self._end_pass():
            with call("backward()", self.step, self.name, span=REDUCTION):
                self._send_rest()
                self._receive()
                self.script_hooks.run()

    def _end_pass(self) -> bool:
        """Count the pass; return whether a reduction follows."""
        self._hooks.end()
        self._checks.losses.keep()
        reduces = self._window.end_pass()
        if not reduces:
            self._changes.remember()
        return reduces

    def _arrange(self) -> None:
        """Lay the buckets out again if the parameters changed and no bucket is on its way."""
        kind = (
            [p.dtype for p in self._parameters],
            list(map(device_index, self._parameters)),
            list(map(torch.Tensor.is_contiguous, self._parameters)),
            [p.requires_grad for p in self._parameters],
            self._sparse,
        )
        if self._layout:
            on_its_way = any(bucket.handle is not None for bucket in self._layout.buckets)
            if kind == self._layout.kind or on_its_way:
                return
        statistics = self._statistics.length if self._statistics else 0
        self._layout = self._layouts.of(kind, self._parameters, self._report.length, statistics)
        self._hooks.follow(self._layout)

    def _laid_out(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def reduce(self) -> None:
        """Average what the gradients hold now; a collective.

        Raises:
            ValueError: a compression has averaged those of this step, and keeps what it left out;
                or a backward pass is running.
        """
        refuse_in_pass("hvkit.reduce_gradients()")
        if self._state:
            refuse_another_mean(self._state, "hvkit.reduce_gradients()")
        with call("hvkit.reduce_gradients", self.step, self.name):
            self._reduce()
        self._window.end()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Average everything since the last reduction, where no pass does; a collective."""
        with self._lock:
            self._arrange()
            self._kept |= self._gradients_to_keep()
            # A pass that failed may have sent gradients that count no more.
            buckets = self._laid_out().buckets
            self._hooks.outdated.update(b for b in buckets if b.handle is not None)
        self._send_rest()
        self._receive()

    @torch.no_grad()
    def _send_rest(self) -> None:
        with self._lock:
            self._hooks.end()
            if self._laid_out().buckets[-1].handle is not None:
                self._drop()  # what was sent for a reduction that failed, of another model perhaps
            for bucket in self._laid_out().buckets:
                if bucket.handle is None:
                    self._send(bucket, bucket.gradients())
            if self._steps_done >= self._checks.next:
                self._checks.send(self._parameters)

    @torch.no_grad()
    def _receive(self) -> None:
        with self._lock:
            layout = self._laid_out()
            *buckets, last = layout.buckets
            report, disagreement = self._report_of_all_ranks(last)
            for bucket in buckets:
                bucket.exchange(self._wire)
            for bucket in buckets:
                bucket.wait(self._wire)
            if self._checks.handle is not None:
                self._checks.receive(self._steps_done)
            again = {id(layout.of[i]): layout.of[i] for i in report.outdated}
            for bucket in again.values():
                bucket.reset()
                self._send(bucket, bucket.gradients())
                bucket.exchange(self._wire)
                bucket.wait(self._wire)
            self._write(report)
            self._averaged = report.dense
            if self._statistics:
                self._statistics.write(layout.statistics.values)
            self._hooks.outdated.clear()
            self._checks.losses.begin()
            self._kept = set()
            self._window.reduced()
            self._changes.remember()
            self._unused.update(range(self._optimizers_watched))
            self._step_counted = False
            if self._nonfinite:
                found = disagreement.nonfinite
                self._nonfinite.end(found, self.step, self._parameters, self._label)

    def _report_of_all_ranks(self, last: Bucket) -> tuple[StepReport, Disagreement]:
        """Wait for the last bucket, the only one that every rank is sure to send.

        Raises:
            RanksDisagreeError: about steps, parameters, learning rates, or gradients used so far.
            ValueError: a rank has changed gradients that were still to be averaged.
        """
        try:
            last.wait(self._wire)
        except RanksDisagreeError:  # it has another length on another rank
            self._checks.require_same_parameters(self._parameters)
            raise
        mean = self._laid_out().report.values.numpy()
        report, disagreement = self._report.decode(mean, self._wire.size)
        same_buckets = not disagreement.frozen
        try:
            if disagreement.steps:
                self._checks.refuse_other_steps(self._steps_done)
            if disagreement.frozen:
                self._checks.require_same_parameters(self._parameters)
            if disagreement.checksums:
                same_buckets = False
                self._checks.require_same_formats(self._laid_out().channels_last, self._parameters)
                same_buckets = not disagreement.frozen
                self._checks.require_same_rates(self._optimizers)
                hooks = self.script_hooks.names() if self._hooks_need_each_pass() else []
                self._checks.require_hooks_on_all_ranks(hooks, self._window.length)
                self._checks.require_same_gradients(self._changes.used, self._parameters)
            if disagreement.changes.early:
                self._checks.refuse_early_changes(self._window.length)
        except (RanksDisagreeError, ValueError):
            if same_buckets:  # else ranks may have sent different ones
                self._drop()
            raise
        if disagreement.shapes:
            self._checks.compare_losses()
        self._changes.reported(disagreement.changes, self._steps_done)
        return report, disagreement

    def _drop(self) -> None:
        """Wait for all that is on its way, and forget it; all ranks do after the same error.

        A script that catches the error may go on, and average its next gradients.
        """
        buckets = self._laid_out().buckets
        for bucket in buckets:
            if bucket.handle is not None:
                bucket.wait(self._wire)
            bucket.reset()
        if self._state:
            self._state.pending.clear()
        self._changes.early = False
        self._checks.losses.begin()
        self._hooks.outdated.clear()

    def _send(self, bucket: Bucket, gradients: list[torch.Tensor | None]) -> None:
        """Complete a bucket from the gradients of its members, and launch it."""
        bucket.pack(gradients, self._wire.prescale)
        if bucket.views and (weight := self._own_weight()) != 1:
            torch._foreach_mul_(bucket.views, weight)
        if self._nonfinite:
            self._nonfinite.look(bucket)
        layout = self._laid_out()
        if bucket is layout.statistics.bucket and self._statistics:
            self._statistics.read_into(layout.statistics.values)
        if bucket is layout.report.bucket:
            report = self._report_of_this_rank()
            if self._nonfinite and report.sparse:
                self._nonfinite.look_at_rows({i: self._parameters[i] for i in report.sparse})
            mine = self._report.encode(
                report,
                step_report.checksum_of_rates(self._optimizers)
                ^ self._changes.checksum()
                ^ layout.checksum
                ^ self._hooks_need_each_pass(),
                self._steps_done,
                self._nonfinite is not None and self._nonfinite.found(self._parameters),
                self._changes.report(),
                self._checks.losses.checksum(),
            )
            layout.report.values.copy_(torch.from_numpy(mine))
        bucket.launch(self._wire)

    def _report_of_this_rank(self) -> StepReport:
        """Which gradients this rank has; the same object as long as it has all dense ones."""
        layout = self._laid_out()
        complete = all(b.complete for b in layout.buckets if b.indices[0] != NO_PARAMETER)
        if complete and not self._hooks.outdated and not self._sparse & layout.trained:
            return layout.usual
        outdated = {bucket.indices[0] for bucket in self._hooks.outdated} - {NO_PARAMETER}
        gradients = {i: self._parameters[i].grad for i in layout.trained}
        return step_report.report_of(gradients, frozenset(outdated))

    def _write(self, report: StepReport) -> None:
        """Give each parameter that had a gradient on any rank the mean."""
        by_row = report.sparse | (report.dense & self._sparse)
        layout = self._laid_out()
        wanted = None if report is layout.usual else report.dense - by_row
        correction = self._correction()
        for bucket in layout.buckets:
            if bucket.views and correction != 1:
                torch._foreach_mul_(bucket.views, correction)
            bucket.give(wanted, self._kept)
            bucket.reset()
        if by_row and self._state and self._state.compression.exclusive:
            raise ValueError(
                f"{self._label(min(by_row))} has a row-sparse gradient, which "
                f"{self._strategy} cannot use: make the layer with sparse=False"
            )
        for i in sorted(by_row):
            p = self._parameters[i]
            if p.grad is not None and (weight := self._own_weight() * correction) != 1:
                p.grad = p.grad * weight
            rows = average_rows(p.grad, p, f"{self.name}.{i}", self._wire, self._compression)
            p.grad = rows.to_dense() if i in report.dense else rows
        self._sparse = (self._sparse | report.sparse) - (report.dense - report.sparse)


def reducers_of(parameters: Iterable[torch.Tensor]) -> list[GradientReducer]:
    """Those that average gradients of these parameters, in the same order on every rank."""
    held = set(parameters)
    return [each for _, each in sorted(_reducers.items()) if not held.isdisjoint(each._index_of)]


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether a distributed model has this parameter."""
    return any(parameter in reducer for reducer in _reducers.values())


def trained_parameters() -> list[torch.nn.Parameter]:
    """One of each model whose gradients are averaged: a pass to it averages those of the model."""
    trained = ([p for p in r._parameters if p.requires_grad] for _, r in sorted(_reducers.items()))
    return [parameters[0] for parameters in trained if parameters]


def watch_passes() -> None:
    """Follow the script's backward passes, also without gradients to average."""
    watch_nested_passes(_end_pass_of_all_models)


def _end_pass_of_all_models(pass_id: int) -> None:
    """Reduce, at the end of the script's backward pass, for all models that took part in it.

    All send before any waits, in the same order on every rank: the passes of other ranks may have
    reached the models in another order.
    """
    in_pass = [each for _, each in sorted(_reducers.items()) if each._hooks.outermost == pass_id]
    reducing = [reducer for reducer in in_pass if reducer._end_pass()]
    if not reducing:
        return
    with call("backward()", reducing[0].step, reducing[0].name, span=REDUCTION):
        for reducer in reducing:
            reducer._send_rest()
        for reducer in reducing:
            reducer._receive()
        for reducer in reducing:
            reducer.script_hooks.run()
