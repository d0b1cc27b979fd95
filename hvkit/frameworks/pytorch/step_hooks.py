"""Calls what hvkit does around the steps of PyTorch's optimizers, and notices new parameters.

``attach`` puts an optimizer's ``hvkit.sync.update_hooks.UpdateHooks`` around its ``step()``, by
hooks of PyTorch's: they also run if a script compiles ``optimizer.step``, or has kept it from
before the call of ``distribute``. PyTorch skips its hooks after a step that raises, so ``attach``
also replaces ``step`` on the instance; pickled optimizers leave that out.

Other optimizers must not step for a distributed model, because nothing keeps their state, rate and
steps equal on all ranks: ``refuse_other_optimizers`` looks at each.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvkit.communication.collectives import require_equal
from hvkit.communication.group import Group
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.frameworks.pytorch.optimizers import (
    hook_steps_of_parents,
    leaves_update_to_parent,
    optimizers_held,
    optimizers_inside,
)
from hvkit.sync.port import warn_of_own_models
from hvkit.sync.update_hooks import Closure, Rate, UpdateHooks

_Hooks = OrderedDict[int, Callable[..., Any]]

# Not compiled with a step that is: what hooks look at differs from step to step, and torch.compile
# compiles the update as it would without hvkit.
_uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


def attach(optimizers: Sequence[Optimizer], hooks: UpdateHooks) -> None:
    """Call hooks around the steps of an optimizer; add all features before.

    Args:
        optimizers: the optimizer, and those inside it, whose steps may be called directly.
        hooks: around the outermost of steps that run inside each other.
    """
    rates = None if hooks.rate is None else _MultipliedRates(hooks.rate, hooks)
    for each in optimizers:
        _attach(each, hooks, rates)


def _attach(optimizer: Optimizer, hooks: UpdateHooks, rates: _MultipliedRates | None) -> None:
    def enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = closure_of(args, kwargs)
        called = hooks.begin(optimizer, closure)
        if called is None or called is closure:
            return None
        return _with_closure(torch.enable_grad()(called), args, kwargs)

    def leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        hooks.end(optimizer)

    def fail(optimizer: Optimizer, depth: int) -> None:
        if rates:
            rates.end()
        hooks.fail(optimizer, depth)

    failed = _uncompiled(fail)
    optimizer.register_step_pre_hook(_uncompiled(enter))
    optimizer.register_step_post_hook(_uncompiled(leave))
    keep_innermost = rates.attach(optimizer) if rates else None
    step = optimizer.step

    # A method, because schedulers made later expect one. functools.wraps copies the mark that
    # schedulers made earlier have left on the step, for which they look.
    @functools.wraps(step)
    def step_with_hooks(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if keep_innermost:
            keep_innermost()
        depth = hooks.depth
        try:
            return step(*args, **kwargs)
        except BaseException:
            failed(optimizer, depth)
            raise

    optimizer.step = MethodType(step_with_hooks, optimizer)  # type: ignore[method-assign]


class _MultipliedRates:
    """Hooks that multiply the rates of an optimizer, and of those inside it, for each update.

    Args:
        rate: multiplies them.
        hooks: count the steps that run inside each other.
    """

    def __init__(self, rate: Rate, hooks: UpdateHooks) -> None:
        self._rate = rate
        self._hooks = hooks
        # How many nested steps were running when the rates were multiplied; 0 if they are not.
        self._multiplied_at = 0

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Multiply in each update; return what keeps the hooks nearest to it, to call before."""
        hook_steps_of_parents(type(optimizer))
        before = optimizer.register_step_pre_hook(_uncompiled(self._multiply))
        after = optimizer.register_step_post_hook(_uncompiled(self._restore))

        def keep_innermost() -> None:
            # The user's own hooks read and set the user's rate.
            cast(_Hooks, optimizer._optimizer_step_pre_hooks).move_to_end(before.id)
            cast(_Hooks, optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)

        keep_innermost()
        return keep_innermost

    def end(self) -> None:
        """After a step that raised."""
        self._multiplied_at = 0
        self._rate.restore()

    def _multiply(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A step that calls its parent's runs the hooks twice. Before that call it may set the
        # user's rate itself.
        depth, kind = self._hooks.depth, type(optimizer)
        if self._multiplied_at or leaves_update_to_parent(kind, depth):  # type: ignore[arg-type]
            return None
        self._multiplied_at = depth
        self._rate.multiply(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None
        return _with_closure(self._at_the_users_rate(optimizer, closure), args, kwargs)

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._hooks.depth <= self._multiplied_at:
            self.end()

    def _at_the_users_rate(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """The user's closure; while it runs, it reads and sets the user's rate."""

        def at_the_users_rate() -> Any:
            self._rate.restore()
            loss = closure()
            self._rate.multiply(optimizer)
            return loss

        return at_the_users_rate


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of a hook of ``step``, ``args[0]`` being the optimizer."""
    closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def _with_closure(closure: Closure, args: Any, kwargs: Any) -> Any:
    """The arguments with another closure, as a hook before ``step`` returns them."""
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure, *args[2:]), rest


class Adopting(Protocol):
    """What keeps parameters in step."""

    def __contains__(self, parameter: torch.Tensor) -> bool: ...

    def add(self, parameters: Iterable[Any], /) -> None:
        """Keep more in step; the same ones on every rank, with the same values."""


def follow_groups(
    optimizers: Sequence[Optimizer], keeper: Adopting, ranks: Group
) -> Callable[[], bool]:
    """Keep parameters in step that the script adds to an optimizer later, too.

    This replaces ``add_param_group`` on the instance only; pickled optimizers leave it out.

    Args:
        optimizers: one, and those inside it.
        keeper: gets the new parameters, once all ranks hold the first one's values.
        ranks: those that train them.

    Returns:
        What looks for parameters that came in another way, and returns whether there were any; a
        collective if there are.
    """

    def adopt() -> bool:
        groups = [group for each in optimizers for group in each.param_groups]
        held = dict.fromkeys(p for group in groups for p in group["params"])
        new = [p for p in held if p not in keeper]
        if new:
            facts = [f"parameter {tuple(p.shape)}, {p.dtype}" for p in new]
            advice = "add the same group on every rank"
            require_equal("new parameter group", facts, advice, group=ranks)
            broadcast_tensors(new, ranks)
            keeper.add(new)
        return bool(new)

    def add_and_adopt(add: Callable[[Any], None], param_group: dict[str, Any]) -> None:
        add(param_group)
        adopt()

    for each in optimizers:
        each.add_param_group = functools.partial(  # type: ignore[method-assign]
            add_and_adopt, each.add_param_group
        )
    return adopt


_ours: WeakSet[Optimizer] = WeakSet()
# Optimizers that held no parameter of a distributed model, with their number of parameters then.
_harmless: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()


def refuse_other_optimizers(
    optimizers: Sequence[Optimizer], is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    """Let only these optimizers, and those of earlier calls, update distributed models.

    Args:
        optimizers: those that ``distribute`` got.
        is_averaged: whether any distributed model has the parameter.
    """
    _ours.update(optimizers)
    _check_who_steps(is_averaged)


@functools.cache
def _check_who_steps(is_averaged: Callable[[torch.Tensor], bool]) -> None:
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in _ours:
            _refuse_if_distributed(optimizer, is_averaged)

    register_optimizer_step_pre_hook(before)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _refuse_if_distributed(
    optimizer: Optimizer, is_averaged: Callable[[torch.Tensor], bool]
) -> None:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    if _harmless.get(optimizer) == held:
        return
    around_one_of_ours = any(each in _ours for each in optimizers_inside(optimizer))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not around_one_of_ours and any(map(is_averaged, parameters)):
        raise ValueError(
            f"optimizer {type(optimizer).__name__} updates parameters of a model that was passed "
            "to hvkit.distribute, but was not passed itself, so nothing keeps it equal on all "
            "ranks: use the optimizer that was passed, and pass those of later phases in the same "
            "call: distribute(model, [first, second])"
        )
    # One of ours may update copies, such as master weights, with an optimizer that it holds.
    held_by_ours = any(optimizer is each for ours in _ours for each in optimizers_held(ours))
    # Tensors that are no parameters may be inputs or codes, of which each rank has its own.
    of_model = any(isinstance(p, nn.Parameter) for p in parameters)
    if of_model and not around_one_of_ours and not held_by_ours:
        warn_of_own_models(type(optimizer).__name__)
    _harmless[optimizer] = held
