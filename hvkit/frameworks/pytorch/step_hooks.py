"""Calls features around each update of PyTorch's optimizers, in one order; notices new parameters.

Several features act around an update, each as a ``Feature`` at a position of ``Order``. They nest,
the first is the outermost, in whatever order ``distribute`` adds them::

    position    before               gradients            after                      failed
    TIMELINE                                              marks the step
    RANKS       refuses, adds new    averages them        counts the step;
                weights; begins a                         ends a round, or
                round                                     writes to the server
    NONFINITE                        takes them away,     puts them back             puts them back
                                     to skip the step
    DIVISION    refuses a closure;   hides those of       puts them back, sends      puts them back
                compares the order   other ranks'         what this rank has
                of layers            weights              updated
    RATE                                                  counts the step

One update runs every ``before`` and then every ``gradients``, from the first position to the last.
After the update, every ``after`` runs, from the last to the first: those further in have undone
their changes by then. If the update raises, ``failed`` runs in place of ``after``. If the ``after``
of one feature raises, ``failed`` runs for those further out.

Closest to the update are ``update_begins`` and ``update_ends``, between which RATE multiplies the
learning rate. The script's own hooks see the rate that the user set. Those that it has registered
after the call of ``distribute`` to run before an update run after ``gradients``, and see what the
update uses: not the gradients of weights that other ranks update, and none of a step that is
skipped. Those that it had registered earlier see the gradients as the backward pass has left them.
After an update it is the other way round.

An update may compute its gradients itself, in a closure, which sees the user's rate. Then
``gradients`` runs after each call of the closure instead, and after it ``loss``, from the last
position to the first, on what the closure has returned.

``attach`` uses hooks of PyTorch's, which also run if a script compiles ``optimizer.step``, or has
kept it from before the call of ``distribute``. PyTorch skips them after a step that raises, so
``attach`` also replaces ``step`` on the instance; pickled optimizers leave that out.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from hvkit.communication.collectives import require_equal
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.frameworks.pytorch.optimizers import (
    hook_steps_of_parents,
    is_left_to_rank,
    leaves_update_to_parent,
    parameters_of,
)
from hvkit.runtime import Group

Closure = Callable[..., Any]

# Hooks are not compiled with a compiled step: they look at values that differ from step to step.
# torch.compile compiles the update as it would without hvkit.
_uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


class Order(enum.IntEnum):
    """The positions at which features act; the first is the outermost."""

    TIMELINE = enum.auto()
    RANKS = enum.auto()
    NONFINITE = enum.auto()
    DIVISION = enum.auto()
    RATE = enum.auto()


def _nothing(*_: Any) -> None:
    """What a feature does where it does not act."""


def _unchanged(loss: Any) -> Any:
    return loss


@dataclass(frozen=True)
class Feature:
    """The functions that one feature has around an update.

    Functions that get an optimizer get the one that updates, of several inside each other the
    outermost; but ``update_begins`` gets the innermost.
    """

    position: Order
    before: Callable[[Any, Closure | None], None] = _nothing
    gradients: Callable[[Any], None] = _nothing
    renewed: Callable[[], bool] = lambda: False
    """Whether there are gradients that ``gradients`` has not seen."""
    loss: Callable[[Any], Any] = _unchanged
    """Computes the loss that the update gets from the one that the closure returned."""
    update_begins: Callable[[Any], None] = _nothing
    update_ends: Callable[[], None] = _nothing
    """Called when the update has ended or raised, and while it calls a closure."""
    after: Callable[[Any], None] = _nothing
    failed: Callable[[Any], None] = _nothing


class UpdateHooks:
    """The features around the updates of one optimizer, and of the optimizers inside it.

    An update may run others inside it, of a parent class or an optimizer that this one holds; only
    the outermost one has hooks. But if new gradients have come since that one began, it has
    computed them itself, or it has failed without a call of ``fail``: then the inner one has them.
    """

    def __init__(self) -> None:
        self.depth = 0  # how many updates are running inside each other
        # How many were running when the update of the innermost began; 0 outside of any.
        self._begun_at = 0
        self._features: list[Feature] = []  # from the outermost to the innermost

    def add(self, feature: Feature) -> None:
        if any(each.position is feature.position for each in self._features):
            raise ValueError(
                f"two features at {feature.position.name} around an optimizer's updates"
            )
        self._features = sorted([*self._features, feature], key=lambda each: each.position)

    def begin(self, optimizer: Any, closure: Closure | None = None) -> Closure | None:
        """Before an update, which is only counted inside another; return a new closure."""
        if self.depth and closure is None and any(each.renewed() for each in self._features):
            self.fail(optimizer, 0)
        self.depth += 1
        if self.depth > 1:
            return closure
        try:
            for each in self._features:
                each.before(optimizer, closure)
            for each in self._features if closure is None else ():
                each.gradients(optimizer)
        except BaseException:
            self.fail(optimizer, 0)
            raise
        of_closure = {(each.gradients, each.loss) for each in self._features}
        if closure is None or of_closure <= {(_nothing, _unchanged)}:
            return closure

        def with_hooks(*args: Any) -> Any:
            loss = closure(*args)
            for each in self._features:
                each.gradients(optimizer)
            for each in reversed(self._features):
                loss = each.loss(loss)
            return loss

        return with_hooks

    def end(self, optimizer: Any) -> None:
        """After an update; an update that began inside another ends inside it."""
        if not self.depth:  # the hooks ran around an update inside this one
            return
        self.depth -= 1
        if self.depth:
            return
        outwards = reversed(self._features)
        try:
            for each in outwards:
                each.after(optimizer)
        except BaseException:
            for each in outwards:  # the rest of them
                each.failed(optimizer)
            raise

    def fail(self, optimizer: Any, depth: int) -> None:
        """After an update that raised, when it began inside ``depth`` others."""
        if self.depth and not depth:
            for each in reversed(self._features):
                each.failed(optimizer)
        self.depth = depth

    def stay_innermost(self, optimizer: Optimizer) -> Callable[[], None]:
        """Call features closest to each update; return what keeps them there, before each step."""
        if all(each.update_begins is _nothing for each in self._features):
            return _nothing
        hook_steps_of_parents(type(optimizer))
        before: Any = optimizer.register_step_pre_hook(_uncompiled(self._begin_innermost))
        after: Any = optimizer.register_step_post_hook(_uncompiled(self._end_innermost))

        def keep_innermost() -> None:
            # The user's hooks read and set the user's rate.
            before.hooks_dict_ref().move_to_end(before.id)
            after.hooks_dict_ref().move_to_end(after.id, last=False)

        keep_innermost()
        return keep_innermost

    def _begin_innermost(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A step that calls its parent's runs the hooks twice. Before that call it may set the
        # user's rate itself.
        depth, cls = self.depth, type(optimizer)
        if self._begun_at or leaves_update_to_parent(cls, depth):  # type: ignore[arg-type]
            return None
        self._begun_at = depth
        self._begin_update(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None

        def outside(*args: Any) -> Any:  # of the update: the closure sees the user's rate
            self._end_update()
            loss = closure(*args)
            self._begin_update(optimizer)
            return loss

        return _with_closure(outside, args, kwargs)

    def _end_innermost(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.depth <= self._begun_at:
            self.end_innermost()

    def end_innermost(self) -> None:
        """After an update, also one that raised."""
        self._begun_at = 0
        self._end_update()

    def _begin_update(self, optimizer: Any) -> None:
        for each in self._features:
            each.update_begins(optimizer)

    def _end_update(self) -> None:
        for each in reversed(self._features):
            each.update_ends()


class HiddenGradients:
    """Gradients that an optimizer does not see during a step."""

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hide(self, parameters: Iterable[torch.Tensor]) -> None:
        for p in parameters:
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def show(self, *_: Any) -> None:
        for p, gradient in self._hidden:
            if p.grad is None:  # else it is newer
                p.grad = gradient
        self._hidden.clear()


def attach(optimizer: Optimizer, hooks: UpdateHooks) -> None:
    """Call hooks, which have all features, around an optimizer's steps."""

    @_uncompiled
    def enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = closure_of(args, kwargs)
        called = hooks.begin(optimizer, closure)
        if called is None or called is closure:
            return None
        return _with_closure(torch.enable_grad()(called), args, kwargs)

    @_uncompiled
    def leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        hooks.end(optimizer)

    @_uncompiled
    def fail(optimizer: Optimizer, depth: int) -> None:
        hooks.end_innermost()
        hooks.fail(optimizer, depth)

    optimizer.register_step_pre_hook(enter)
    optimizer.register_step_post_hook(leave)
    keep_innermost, step = hooks.stay_innermost(optimizer), optimizer.step

    # A method, because schedulers made later expect one. functools.wraps copies the mark that
    # schedulers made earlier have left on the step, for which they look.
    @functools.wraps(step)
    def step_with_hooks(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        keep_innermost()
        depth = hooks.depth
        try:
            return step(*args, **kwargs)
        except BaseException:
            fail(optimizer, depth)
            raise

    optimizer.step = MethodType(step_with_hooks, optimizer)  # type: ignore[method-assign]


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of a hook of ``step``, ``args[0]`` being the optimizer."""
    closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def _with_closure(closure: Closure, args: Any, kwargs: Any) -> Any:
    """The arguments with another closure, as a hook before ``step`` returns them."""
    return (args[0], closure, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}


class Parameters(Protocol):
    """Parameters that are kept in step; more are the same ones on every rank, with equal values."""

    def __contains__(self, parameter: torch.Tensor) -> bool: ...

    def add(self, parameters: Iterable[Any], /) -> None: ...


def follow_groups(
    optimizers: Sequence[Optimizer], known: Parameters, ranks: Group
) -> Callable[[], bool]:
    """Keep parameters in step that the script adds to an optimizer later, with rank 0's values.

    The result looks for ones added in another way, and returns whether there were any; then it is a
    collective. Pickled optimizers leave out the ``add_param_group`` of the instance.
    """

    def adopt() -> bool:
        updated = dict.fromkeys(parameters_of(*optimizers))
        # In a mesh, other ranks' parameters are on the meta device.
        new = [p for p in updated if not (p in known or p.is_meta or is_left_to_rank(p))]
        if new:
            facts = [f"parameter {tuple(p.shape)}, {p.dtype}" for p in new]
            advice = "add the same group on every rank"
            require_equal("new parameter group", facts, advice, group=ranks)
            broadcast_tensors(new, ranks)
            known.add(new)
        return bool(new)

    def add_and_adopt(add: Callable[[Any], None], param_group: dict[str, Any]) -> None:
        add(param_group)
        adopt()

    for each in optimizers:
        each.add_param_group = functools.partial(  # type: ignore[method-assign]
            add_and_adopt, each.add_param_group
        )
    return adopt
