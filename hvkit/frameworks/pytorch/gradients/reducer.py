"""Decides when gradients are averaged: while ``backward()`` computes them, or before a step.

When all gradients of a bucket are final, they are copied into the bucket, and it is sent at once.
When backward ends, a callback of the autograd engine sends the rest, waits, and gives the
parameters the means. A step averages what no pass has averaged. Averaging a mean again changes
nothing, so several backward passes before a step only cost more reductions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.gradients.backward_passes import (
    AccumulationWindow,
    GradientHooks,
    refuse_in_pass,
    watch_nested_passes,
)
from hvkit.frameworks.pytorch.gradients.bucket_layout import refuse_another_mean
from hvkit.frameworks.pytorch.gradients.reduction import Reduction
from hvkit.frameworks.pytorch.gradients.script_hooks import ScriptHooks
from hvkit.frameworks.pytorch.optimizers import (
    mean_of_ranks,
    parameters_of,
    refuse_grad_scaler,
    scaler_hooks,
)
from hvkit.frameworks.pytorch.step_hooks import Closure, Feature, Order, UpdateHooks
from hvkit.sync.compression_state import CompressionSync
from hvkit.watch.calls import call
from hvkit.watch.spans import REDUCTION

# By id, in the order of the calls of distribute, which is the same on every rank. A reducer lives
# as long as its model or an optimizer.
_reducers: WeakValueDictionary[int, GradientReducer] = WeakValueDictionary()
_reducer_ids = itertools.count()


class GradientReducer:
    """Keeps the gradients of some parameters averaged over ranks.

    It notices row-sparse gradients also of other parameters. If it does not follow backward passes,
    its caller calls ``begin_pass`` and ``end_pass``.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        row_sparse: set[torch.Tensor],
        reduction: Reduction,
        *,
        follows_passes: bool = True,
    ) -> None:
        self._reduction, self._checks = reduction, reduction.checks
        self._changes, self._state = reduction.changes, reduction.state
        self._follows_passes = follows_passes
        self.name = self._checks.name
        self.sync: CompressionSync | None = None
        if self._state and self._state.compression.keeps_state:
            parameters_now, states = self._checks.parameters, {"": self._state}  # which grow
            strategy, compression = reduction.strategy, reduction.compression
            self.sync = CompressionSync(
                strategy, compression, states, lambda: range(len(parameters_now))
            )
        self._window = AccumulationWindow(
            self._checks.accumulate, ends_with_epoch=self.sync is None
        )
        # Several optimizers that use one reduction take one step together.
        self._step_counted = False
        self._optimizers_watched = 0
        # Indices of the optimizers that have not used the means of the last reduction.
        self._unused: set[int] = set()
        self._hooks = GradientHooks(reduction, self.begin_pass, _end_pass_of_all_models)
        self.script_hooks = ScriptHooks(
            lambda p: self._checks.label(self._checks.index_of[p]), self._why_hooks_do_not_wait
        )
        reduction.hooks_of_passes = self._hooks_of_passes
        _reducers[next(_reducer_ids)] = self
        self._checks.losses.look(wanted=True)
        self.add(parameters)
        reduction.layouts.sparse = {self._checks.index_of[p] for p in row_sparse}

    @property
    def step(self) -> int:
        """The optimizer step that the current gradients are for, counted from 1."""
        return self._checks.steps + 1

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._checks.index_of

    def weigh(
        self, rank_weight: Callable[[], float], correction: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Let gradients count more on some ranks than on others.

        ``correction`` returns the factor of the mean with which N ranks' weights add up to N, the
        same on every rank. Both functions may wait for other ranks.
        """
        self._reduction.rank_weight = self._checks.losses.rank_weight = rank_weight
        self._reduction.correction = correction
        self._checks.losses.ignore_shapes()

    def add(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Average the gradients of more parameters; the same ones on every rank."""
        for p in parameters:
            i = self._checks.add(p)
            self.script_hooks.add([p])
            if self._follows_passes and (p.is_floating_point() or p.is_complex()):
                self._hooks.add(i, p)

    def watch(
        self, optimizers: Sequence[Optimizer], hooks: UpdateHooks, adopt: Callable[[], bool]
    ) -> None:
        """Let each step of an optimizer, or of ones inside it, follow a reduction on all ranks.

        ``adopt`` adds parameters that are new in the optimizers; it returns whether there are any.
        """
        optimizer_index = self._optimizers_watched
        self._optimizers_watched += 1
        self._checks.optimizers.extend(optimizers)

        def average(call_name: str) -> None:
            if adopt() or self._window.waiting or optimizer_index not in self._unused:
                with call(call_name, self.step, self.name):
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
            indices = map(self._checks.index_of.get, parameters_of(*optimizers))
            self._changes.use(optimizer_index, [i for i in indices if i is not None])

        def renewed() -> bool:
            return self._window.waiting or optimizer_index in self._unused

        end = self._end_step
        hooks.add(Feature(Order.RANKS, before, gradients, renewed, loss=mean_of_ranks, after=end))
        for each in optimizers:
            scaler_hooks(each).before_unscaling = lambda: average("GradScaler.unscale_()")
            if self._state and self.sync:
                # Residuals of other steps would have another scale.
                refuse_grad_scaler(
                    each,
                    f"{self._state.compression} adds what earlier steps have not sent to the "
                    "gradients of this one, but GradScaler scales each step's differently: train "
                    "in bfloat16 without a GradScaler, or choose a compression without residuals",
                )
        if self._reduction.nonfinite:
            self._reduction.nonfinite.attach(optimizers, hooks)

    def _end_step(self, optimizer: Optimizer) -> None:
        if self._state:
            self._state.commit(self._reduction.averaged)
            self._state.pending.clear()  # of parameters that no rank had a gradient of
        if not self._step_counted:
            self._step_counted = True
            self._checks.count_step()

    def begin_pass(self) -> bool:
        """Prepare for a backward pass; return whether it ends with a reduction."""
        if not self._window.passes and self._state:
            refuse_another_mean(self._state, "backward()")
        self._reduction.arrange()
        self.script_hooks.begin(divided=not self._follows_passes)
        return self._window.begin_pass(reduces=bool(self._hooks_of_passes()))

    def end_pass(self) -> None:
        """After a pass that the reducer does not follow; a collective if it ends a window."""
        _reduce_after_pass([self])

    def count_pass(self) -> bool:
        """Count a pass that has ended; return whether a reduction follows."""
        self._hooks.end()
        self._checks.losses.keep()
        reduces = self._window.end_pass()
        if not reduces:
            self._changes.remember()
        return reduces

    def _hooks_of_passes(self) -> list[str]:
        """The script's hooks that need the mean of each pass, as one process calls them in each."""
        waits = self._window.length > 1 and self._why_hooks_do_not_wait() is None
        return self.script_hooks.names() if waits else []

    def _why_hooks_do_not_wait(self) -> str | None:
        """Why the script's hooks on parameters see gradients that are not averaged; None if not."""
        if self._reduction.strategy.has_momentum:  # no update uses a mean of gradients
            return ""
        if self.sync is not None and self._window.length > 1:
            return f"where accumulate={self._window.length} averages compressed gradients once"
        return None

    def reduce(self) -> None:
        """Average the gradients as they are now; a collective."""
        refuse_in_pass("hvkit.reduce_gradients()")
        if self._state:
            refuse_another_mean(self._state, "hvkit.reduce_gradients()")
        with call("hvkit.reduce_gradients", self.step, self.name):
            self._reduce()
        self._window.end()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Average everything since the last reduction, where no pass does; a collective."""
        with self._reduction.lock:
            layout = self._reduction.arrange()
            self._hooks.follow(layout)
            # A pass that failed may have sent gradients that count no more.
            self._reduction.outdated.update(b for b in layout.buckets if b.handle is not None)
        self.send_rest()
        self.receive()

    @torch.no_grad()
    def send_rest(self) -> None:
        """Send all buckets that are not in flight yet."""
        with self._reduction.lock:
            self._hooks.end()
            self._reduction.send_rest()

    @torch.no_grad()
    def receive(self) -> None:
        """Wait for all buckets, and give the parameters the means."""
        with self._reduction.lock:
            found = self._reduction.receive()
            self._window.reduced()
            self._unused.update(range(self._optimizers_watched))
            self._step_counted = False
            if nonfinite := self._reduction.nonfinite:
                nonfinite.end(found)


def reducers_of(parameters: Iterable[torch.Tensor]) -> list[GradientReducer]:
    """The reducers that average gradients of these parameters, in the same order on every rank."""
    wanted = set(parameters)
    return [each for each in _in_order() if not wanted.isdisjoint(each._checks.index_of)]


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether a distributed model has this parameter."""
    return any(parameter in reducer for reducer in _reducers.values())


def trained_parameters() -> list[torch.nn.Parameter]:
    """One parameter of each model: a pass to it averages the gradients of the model."""
    trained = ([p for p in each._checks.parameters if p.requires_grad] for each in _in_order())
    return [parameters[0] for parameters in trained if parameters]


def watch_passes() -> None:
    """Follow the script's backward passes, also without gradients to average."""
    watch_nested_passes(_end_pass_of_all_models)


def _in_order() -> list[GradientReducer]:
    return [each for _, each in sorted(_reducers.items())]


def _end_pass_of_all_models(pass_id: int) -> None:
    """Reduce, at the end of the script's backward pass, for all models that took part in it."""
    _reduce_after_pass([each for each in _in_order() if each._hooks.outermost == pass_id])


def _reduce_after_pass(reducers: Iterable[GradientReducer]) -> None:
    """Reduce for the models whose window ends with the pass that has ended.

    All send before any waits: the passes of other ranks may have reached them in another order.
    """
    reducing = [reducer for reducer in reducers if reducer.count_pass()]
    if not reducing:
        return
    with call("backward()", reducing[0].step, reducing[0].name, span=REDUCTION):
        for reducer in reducing:
            reducer.send_rest()
        for reducer in reducing:
            reducer.receive()
        for reducer in reducing:
            reducer.script_hooks.run()
