"""Averages gradients while ``backward()`` computes them.

A hook on each parameter copies its gradient into a bucket as soon as it is final; a full bucket
goes out at once. When backward ends, a callback of the autograd engine sends what is left, waits,
and writes the means into the parameters' gradients.

Graphs may differ between ranks and from step to step, so every rank always sends every bucket,
with zeros where it has nothing. Flags that travel at the end of the last bucket tell all ranks
what the others had, so that they decide alike: whether any has a gradient for a parameter, whether
it is sparse somewhere, and whether a bucket went out before its last change. After a reduction the
gradients are the same on every rank, whatever they were before.

Averaging a mean again changes nothing. That makes the order of events harmless: several backward
passes before a step, or checkpointed segments that run a backward pass inside another, only cost
more reductions.
"""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from hvkit import metrics, runtime
from hvkit.adapters.pytorch.batch_norm import RunningStatistics
from hvkit.adapters.pytorch.buckets import Bucket, average_rows, make_buckets, make_narrow_buckets
from hvkit.adapters.pytorch.checks import Checks
from hvkit.adapters.pytorch.step_report import Flags
from hvkit.errors import RanksDisagreeError
from hvkit.watch.calls import call
from hvkit.watch.failures import mark_as_shown_by

# By number, in the order of the calls of distribute, which is the same on every rank. Hooks on
# the parameters keep a reducer alive as long as its model.
_reducers: WeakValueDictionary[int, GradientReducer] = WeakValueDictionary()
_numbers = itertools.count()


# What decides which parameters share a bucket: of each its dtype, device, whether it is trained,
# and whether its gradient is row-sparse.
_Layout = tuple[tuple[torch.dtype, torch.device, bool, bool], ...]
_LAYOUTS_KEPT = 4


class GradientReducer:
    """Keeps the gradients of some parameters averaged over ranks.

    Args:
        parameters: in an order that is the same on every rank.
        row_sparse: those whose gradients are known to be sparse; others are learnt.
        accumulate: backward passes from one reduction to the next.
        name: the same on every rank, and no other reducer's.
        checks: what the ranks compare before they use the means.
        narrow: dtype of 16 bits in which gradients travel; None for their own.
        statistics: averaged along with the gradients.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        row_sparse: set[torch.Tensor],
        accumulate: int,
        name: str,
        checks: Checks,
        narrow: torch.dtype | None = None,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self._hvd = runtime.engine("torch").hvd
        self.name = name
        self._checks = checks
        self._accumulate = accumulate
        self._narrow = narrow
        self._statistics = statistics
        self._number: dict[torch.Tensor, int] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._sparse: set[int] = set()
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._layout: _Layout | None = None
        self._layouts: dict[_Layout, list[Bucket]] = {}
        self._layouts_made = itertools.count()
        self._task: int | None = None
        self._passes = 0
        self._outdated: set[int] = set()
        self._reduced_for: dict[int, bool] = {}
        self._steps = 0
        self._counted = False
        self._stepping: set[int] = set()
        self._optimizers: list[Optimizer] = []
        # Parameters on several devices have their hooks called from several threads.
        self._lock = threading.RLock()
        _reducers[next(_numbers)] = self
        self.add(parameters)
        self._sparse = {self._number[p] for p in row_sparse}

    @property
    def step(self) -> int:
        """The optimizer step that the gradients of now are for, counted from 1."""
        return self._steps + 1

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._number

    def add(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of more parameters; the same ones on every rank."""
        for p in parameters:
            self._number[p] = len(self._parameters)
            self._parameters.append(p)
            if p.is_floating_point() or p.is_complex():
                _hook(p, self._gradient_ready)

    def watch(self, optimizer: Optimizer, adopt: Callable[[], bool]) -> None:
        """Make sure that a step of this optimizer comes after a reduction on every rank.

        Args:
            optimizer: updates some of the parameters.
            adopt: adds those that the optimizer has come to hold, and returns whether there were
                any.
        """
        key = id(optimizer)
        self._optimizers.append(optimizer)
        self._reduced_for[key] = False

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
            if key in self._stepping:  # a step that calls the step of its parent class
                return None
            self._stepping.add(key)
            closure = args[1] if len(args) > 1 else kwargs.get("closure")  # args[0] is optimizer
            if torch._C._current_graph_task_id() != -1:
                raise ValueError(
                    f"{type(optimizer).__name__}.step() was called while backward() runs, where "
                    "gradients are not averaged yet: call it after backward()"
                )
            overlooked = adopt() or self._passes > 0 or not self._reduced_for[key]
            if overlooked and closure is None:
                with call(f"{type(optimizer).__name__}.step()", self.step, self.name):
                    self._reduce()
            self._reduced_for[key] = False
            if closure is None:
                return None
            rest = {name: value for name, value in kwargs.items() if name != "closure"}
            return (args[0], _averaged(closure), *args[2:]), rest

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._stepping.discard(key)
            # Several optimizers may use the gradients of one backward pass.
            self._steps += not self._counted
            self._counted = True

        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)

    def _gradient_ready(self, parameter: torch.Tensor) -> None:
        with self._lock:
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._begin_pass(task)
            i = self._number[parameter]
            if self._passes + 1 < self._accumulate:
                return
            gradient, bucket = parameter.grad, self._bucket_of.get(i)
            if bucket is None or gradient is None or gradient.is_sparse:
                return
            if bucket.handle is not None:
                self._outdated.add(i)
                return
            bucket.pack(i, gradient.detach())
            if bucket.full and bucket is not self._buckets[-1]:
                bucket.launch(self._hvd)

    def _begin_pass(self, task: int) -> None:
        """First gradient of a backward pass: have :func:`_end_pass` called when it is over."""
        self._task = task
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: _end_pass(task))
        # What a pass that failed has left behind is not this pass's.
        for bucket in self._buckets:
            if bucket.handle is None:
                bucket.reset()
            else:
                self._outdated.update(bucket.views)
        if not self._passes:
            self._arrange()

    def _end_pass(self) -> bool:
        """Count the pass; whether it is one to reduce after."""
        self._task = None
        self._passes += 1
        return self._passes >= self._accumulate

    def _arrange(self) -> None:
        """Lay out the buckets, again if the parameters are no longer what they were."""
        layout = tuple(
            (p.dtype, p.device, p.requires_grad, i in self._sparse)
            for i, p in enumerate(self._parameters)
        )
        if layout == self._layout or any(bucket.handle is not None for bucket in self._buckets):
            return
        if layout not in self._layouts:
            # Freezing and thawing, as GANs do in every step, comes back to few layouts.
            while len(self._layouts) >= _LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[layout] = self._new_buckets()
        self._layout = layout
        self._buckets = self._layouts[layout]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.views}

    def _new_buckets(self) -> list[Bucket]:
        dense: list[tuple[int, torch.Tensor]] = [
            (i, p)
            for i, p in enumerate(self._parameters)
            if p.requires_grad and i not in self._sparse
        ]
        if not dense:  # the flags need a bucket to travel in
            dense = [(-1, torch.zeros(1, device=self._parameters[0].device))]
        name = f"{self.name}.{next(self._layouts_made)}"
        # Every rank sends it, also one that lays out its buckets as no other rank does.
        last = f"{self.name}.last"
        extra = Flags.length(len(self._parameters))
        if self._statistics:
            extra += self._statistics.length
        if self._narrow:
            return make_narrow_buckets(name, last, dense, extra, self._narrow)
        return make_buckets(name, last, dense, extra)

    def _reduce(self) -> None:
        """Average everything that has come since the last reduction; a collective."""
        self._send_rest()
        self._receive()

    @torch.no_grad()
    def _send_rest(self) -> None:
        with self._lock:
            self._arrange()
            for bucket in self._buckets:
                if bucket.handle is None:
                    self._send(bucket)
            self._checks.send(self._steps, self._parameters, self._hvd)

    @torch.no_grad()
    def _receive(self) -> None:
        with self._lock:
            *buckets, last = self._buckets
            flags = self._flags_of_all_ranks(last)
            for bucket in buckets:
                bucket.exchange(self._hvd)
            for bucket in buckets:
                bucket.wait(self._hvd)
            self._checks.receive(self._steps, self._hvd)
            again = {id(self._bucket_of[i]): self._bucket_of[i] for i in flags.outdated}
            for bucket in again.values():
                bucket.reset()
                self._send(bucket)
                bucket.exchange(self._hvd)
                bucket.wait(self._hvd)
            self._write(flags)
            if self._statistics:
                self._statistics.write(self._statistics_in(self._buckets[-1]))
            self._outdated.clear()
            self._passes = 0
            self._task = None
            self._reduced_for = dict.fromkeys(self._reduced_for, True)
            self._stepping.clear()
            self._counted = False

    def _flags_of_all_ranks(self, last: Bucket) -> Flags:
        """Wait for the last bucket, the only one that no rank lacks.

        Raises:
            RanksDisagreeError: the ranks are at different steps, train different parameters, or
                use different learning rates.
        """
        try:
            last.wait(self._hvd)
        except RanksDisagreeError:  # it has another length elsewhere
            self._refuse_other_parameters()
            raise
        flags = Flags.decode(self._flags_in(last), self._hvd.size())
        if flags.steps_differ:
            raise RanksDisagreeError(
                f"the ranks are at different optimizer steps (rank {runtime.rank()} has done "
                f"{self._steps}): every rank must call backward() and step() equally often"
            )
        if flags.frozen_on_some:
            self._refuse_other_parameters()
        if flags.rates_differ:
            self._refuse_other_rates()
        return flags

    def _refuse_other_parameters(self) -> None:
        """Raise on every rank unless all train the same parameters; a collective."""
        mine = {i for i, p in enumerate(self._parameters) if p.requires_grad}
        everyone = runtime.gather("backward()", mine)
        for rank, theirs in enumerate(everyone):
            if theirs == everyone[0]:
                continue
            i = min(theirs ^ everyone[0])
            trains, freezes = (rank, 0) if i in theirs else (0, rank)
            error = RanksDisagreeError(
                f"{self._checks.label(i, self._parameters[i])} requires a gradient on rank "
                f"{trains} but not on rank {freezes}: freeze the same parameters on every rank "
                "(what is frozen at random, by a generator of the same seed on all)"
            )
            raise mark_as_shown_by(error, 0)

    def _refuse_other_rates(self) -> None:
        """Raise on every rank unless all use the same learning rates; a collective."""
        everyone = runtime.gather("backward()", self._rates())
        for rank, theirs in enumerate(everyone):
            for (name, first), (_, other) in zip(everyone[0], theirs, strict=True):
                if first != other:
                    error = RanksDisagreeError(
                        f"the learning rate of {name} is {first!r} on rank 0 but {other!r} on "
                        f"rank {rank}: set the same on every rank; a scheduler that goes by a "
                        "metric needs that of all ranks: scheduler.step(hvkit.average(loss))"
                    )
                    raise mark_as_shown_by(error, 0)

    def _rates(self) -> list[tuple[str, float]]:
        """Where they are at hand; to fetch one from a GPU would hold up every step."""
        return [
            (f"parameter group {g} of {type(optimizer).__name__}", float(rate))
            for optimizer in self._optimizers
            for g, group in enumerate(optimizer.param_groups)
            if isinstance(rate := group.get("lr"), int | float)
            or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")
        ]

    def _send(self, bucket: Bucket) -> None:
        """Complete a bucket from the gradients as they are now, and launch it."""
        for i in bucket.views.keys() - bucket.packed:
            gradient = self._parameters[i].grad if i >= 0 else None
            bucket.pack(i, None if _is_sparse(gradient) else gradient)
        if bucket is self._buckets[-1]:
            self._set_flags(bucket)
            if self._statistics:
                self._statistics.read_into(self._statistics_in(bucket))
        bucket.launch(self._hvd)

    def _flags_in(self, last: Bucket) -> torch.Tensor:
        return last.extra[: Flags.length(len(self._parameters))]

    def _statistics_in(self, last: Bucket) -> torch.Tensor:
        return last.extra[Flags.length(len(self._parameters)) :]

    def _set_flags(self, bucket: Bucket) -> None:
        trained = {i: p.grad for i, p in enumerate(self._parameters) if p.requires_grad}
        sparse = {i for i, gradient in trained.items() if _is_sparse(gradient)}
        dense = {i for i, gradient in trained.items() if gradient is not None} - sparse
        total = len(self._parameters)
        flags = Flags.encode(
            total,
            dense=dense,
            sparse=sparse,
            outdated=self._outdated,
            trained=trained,
            rates=zlib.crc32(repr([rate for _, rate in self._rates()]).encode()),
            steps=self._steps,
        )
        self._flags_in(bucket).copy_(flags)

    def _write(self, flags: Flags) -> None:
        """Put the means into the gradients, where any rank had one."""
        by_row = flags.sparse | (flags.dense & self._sparse)
        for bucket in self._buckets:
            for i in bucket.views.keys() & (flags.dense - by_row):
                p, mean = self._parameters[i], bucket.views[i]
                if p.grad is None:
                    p.grad = torch.empty_like(p).copy_(mean)
                else:
                    p.grad.detach().copy_(mean)
            bucket.reset()
        for i in sorted(by_row):
            p = self._parameters[i]
            rows = average_rows(p.grad, p, f"{self.name}.{i}", self._hvd, self._narrow)
            p.grad = rows.to_dense() if i in flags.dense else rows
        self._sparse = (self._sparse | flags.sparse) - (flags.dense - flags.sparse)


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether this is a parameter of a distributed model."""
    return any(parameter in reducer for reducer in _reducers.values())


def _end_pass(task: int) -> None:
    """A backward pass is over: reduce for all models that had a part in it.

    All send before any waits, in the same order on every rank: the passes of other ranks may have
    come to the models in another order.
    """
    taking_part = [reducer for _, reducer in sorted(_reducers.items()) if reducer._task == task]
    due = [reducer for reducer in taking_part if reducer._end_pass()]
    if not due:
        return
    with call("backward()", due[0].step, due[0].name):
        for reducer in due:
            reducer._send_rest()
        for reducer in due:
            reducer._receive()


def _averaged(closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure whose loss is the mean over ranks.

    LBFGS decides by it how far to go and when to stop, which has to come out alike everywhere.
    """

    def averaged() -> Any:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        return loss.new_tensor(metrics.average(float(loss)))

    return averaged


def _hook(parameter: torch.nn.Parameter, function: Callable[[torch.Tensor], None]) -> None:
    """Have ``function`` called when a gradient is final, also if the parameter is frozen now.

    PyTorch takes the hook only from parameters that require a gradient, and keeps it when that
    changes.
    """
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(function)  # type: ignore[no-untyped-call]
    if frozen:
        parameter.requires_grad_(False)


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.is_sparse
