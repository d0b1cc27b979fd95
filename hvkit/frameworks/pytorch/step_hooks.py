"""Calls features around the steps of PyTorch's optimizers, and notices new parameters.

``attach`` puts an optimizer's ``UpdateHooks``, whose order is that of ``hvkit.sync.update_hooks``,
around its ``step()``, by hooks of PyTorch's: they also run if a script compiles ``optimizer.step``,
or has kept it from before the call of ``distribute``. PyTorch skips its hooks after a step that
raises, so ``attach`` also replaces ``step`` on the instance; pickled optimizers leave that out.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from types import MethodType
from typing import Any, Protocol, cast

import torch
from torch.optim import Optimizer

from hvkit.communication.collectives import require_equal
from hvkit.communication.group import Group
from hvkit.frameworks.pytorch.initial_state import broadcast_tensors
from hvkit.frameworks.pytorch.modules import is_left_to_rank
from hvkit.frameworks.pytorch.optimizers import (
    hook_steps_of_parents,
    leaves_update_to_parent,
)
from hvkit.sync.update_hooks import Closure, Feature

_Hooks = OrderedDict[int, Callable[..., Any]]

# Hooks are not compiled with a compiled step: they look at values that differ from step to step.
# torch.compile compiles the update as it would without hvkit.
_uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable


class UpdateHooks:
    """The features around the updates of one optimizer, and of the optimizers inside it.

    An update may run others inside it: of a parent class, or of an optimizer that this one holds.
    They belong to the outermost one, and only that one has hooks. But if new gradients have come
    since that one began, it has computed them itself, or it has failed without a call of ``fail``:
    then the hooks run around the inner one instead.

    Attributes:
        depth: how many updates are running inside each other.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._features: list[Feature] = []
        self._put_in_order()

    def add(self, feature: Feature) -> None:
        """Let a feature act around updates.

        Raises:
            ValueError: another feature has the same place.
        """
        if any(each.place is feature.place for each in self._features):
            raise ValueError(f"two features at {feature.place.name} around an optimizer's updates")
        self._features.append(feature)
        self._put_in_order()

    def _put_in_order(self) -> None:
        inwards = sorted(self._features, key=lambda feature: feature.place)
        self._outwards = inwards[::-1]
        self._before = [each.before for each in inwards if each.before]
        self._gradients = [each.gradients for each in inwards if each.gradients]
        self._renewed = [each.renewed for each in inwards if each.renewed]
        self._loss = [each.loss for each in self._outwards if each.loss]
        self._update_begins = [each.update_begins for each in inwards if each.update_begins]
        self._update_ends = [each.update_ends for each in self._outwards if each.update_ends]

    @property
    def act_in_updates(self) -> bool:
        """Whether any feature has ``update_begins`` or ``update_ends``."""
        return bool(self._update_begins or self._update_ends)

    def begin_update(self, optimizer: Any) -> None:
        """Just before the update of one optimizer, of several inside each other the innermost."""
        for begins in self._update_begins:
            begins(optimizer)

    def end_update(self) -> None:
        """Just after that update, or where it calls a closure."""
        for ends in self._update_ends:
            ends()

    def begin(self, optimizer: Any, closure: Closure | None = None) -> Closure | None:
        """Before an update; one inside another is only counted, but for new gradients.

        Args:
            optimizer: that updates.
            closure: computes the gradients; None if they are there.

        Returns:
            The function to call in place of the closure.
        """
        if self.depth and closure is None and any(renewed() for renewed in self._renewed):
            self.fail(optimizer, 0)
        if self.depth:
            self.depth += 1
            return closure
        self.depth = 1
        try:
            for before in self._before:
                before(optimizer, closure)
            if closure is None:
                for gradients in self._gradients:
                    gradients(optimizer)
        except BaseException:
            self.fail(optimizer, 0)
            raise
        return closure and self._around(closure, optimizer)

    def _around(self, closure: Closure, optimizer: Any) -> Closure:
        if not self._gradients and not self._loss:
            return closure

        def with_hooks() -> Any:
            loss = closure()
            for gradients in self._gradients:
                gradients(optimizer)
            for changed in self._loss:
                loss = changed(loss)
            return loss

        return with_hooks

    def end(self, optimizer: Any) -> None:
        """After an update; an update that began inside another ends inside it."""
        if not self.depth:  # the hooks ran around an update inside this one
            return
        self.depth -= 1
        if self.depth:
            return
        outwards = iter(self._outwards)
        try:
            for feature in outwards:
                if feature.after:
                    feature.after(optimizer)
        except BaseException:
            _fail(outwards, optimizer)
            raise

    def fail(self, optimizer: Any, depth: int) -> None:
        """After an update that raised.

        Args:
            optimizer: that updated.
            depth: how many updates were running when it began.
        """
        if self.depth and not depth:
            _fail(self._outwards, optimizer)
        self.depth = depth


def _fail(features: Iterable[Feature], optimizer: Any) -> None:
    for each in features:
        if each.failed:
            each.failed(optimizer)


def attach(optimizers: Sequence[Optimizer], hooks: UpdateHooks) -> None:
    """Call hooks around the steps of an optimizer; add all features before.

    Args:
        optimizers: the optimizer, and the ones inside it, whose steps may be called directly.
        hooks: around the outermost of steps that run inside each other.
    """
    innermost = _Innermost(hooks) if hooks.act_in_updates else None
    for each in optimizers:
        _attach(each, hooks, innermost)


def _attach(optimizer: Optimizer, hooks: UpdateHooks, innermost: _Innermost | None) -> None:
    def enter(optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = closure_of(args, kwargs)
        called = hooks.begin(optimizer, closure)
        if called is None or called is closure:
            return None
        return _with_closure(torch.enable_grad()(called), args, kwargs)

    def leave(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        hooks.end(optimizer)

    def fail(optimizer: Optimizer, depth: int) -> None:
        if innermost:
            innermost.end()
        hooks.fail(optimizer, depth)

    failed = _uncompiled(fail)
    optimizer.register_step_pre_hook(_uncompiled(enter))
    optimizer.register_step_post_hook(_uncompiled(leave))
    keep_innermost = innermost.attach(optimizer) if innermost else None
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


class _Innermost:
    """Calls the features closest to the updates of an optimizer, and of the ones inside it.

    Args:
        hooks: of these optimizers; they count the steps that run inside each other.
    """

    def __init__(self, hooks: UpdateHooks) -> None:
        self._hooks = hooks
        # How many nested steps were running when the update began; 0 outside of any.
        self._begun_at = 0

    def attach(self, optimizer: Optimizer) -> Callable[[], None]:
        """Call the features in each update.

        Returns:
            A function that keeps them the closest, to call before a step.
        """
        hook_steps_of_parents(type(optimizer))
        before = optimizer.register_step_pre_hook(_uncompiled(self._begin))
        after = optimizer.register_step_post_hook(_uncompiled(self._end))

        def keep_innermost() -> None:
            # The user's hooks read and set the user's rate.
            cast(_Hooks, optimizer._optimizer_step_pre_hooks).move_to_end(before.id)
            cast(_Hooks, optimizer._optimizer_step_post_hooks).move_to_end(after.id, last=False)

        keep_innermost()
        return keep_innermost

    def end(self) -> None:
        """After a step that raised."""
        self._begun_at = 0
        self._hooks.end_update()

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        # A step that calls its parent's runs the hooks twice. Before that call it may set the
        # user's rate itself.
        depth, cls = self._hooks.depth, type(optimizer)
        if self._begun_at or leaves_update_to_parent(cls, depth):  # type: ignore[arg-type]
            return None
        self._begun_at = depth
        self._hooks.begin_update(optimizer)
        closure = closure_of(args, kwargs)
        if closure is None:
            return None
        return _with_closure(self._outside(optimizer, closure), args, kwargs)

    def _end(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._hooks.depth <= self._begun_at:
            self.end()

    def _outside(self, optimizer: Optimizer, closure: Closure) -> Closure:
        """The user's closure, which runs as outside of the update: it sees the user's rate."""

        def outside() -> Any:
            self._hooks.end_update()
            loss = closure()
            self._hooks.begin_update(optimizer)
            return loss

        return outside


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of a hook of ``step``, ``args[0]`` being the optimizer."""
    closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def _with_closure(closure: Closure, args: Any, kwargs: Any) -> Any:
    """The arguments with another closure, as a hook before ``step`` returns them."""
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure, *args[2:]), rest


class ParameterKeeper(Protocol):
    """Keeps parameters in step."""

    def __contains__(self, parameter: torch.Tensor) -> bool: ...

    def add(self, parameters: Iterable[Any], /) -> None:
        """Keep more in step; the same ones on every rank, with the same values."""


def follow_groups(
    optimizers: Sequence[Optimizer], keeper: ParameterKeeper, ranks: Group
) -> Callable[[], bool]:
    """Keep parameters in step that the script adds to an optimizer later, too.

    This replaces ``add_param_group`` on the instance only; pickled optimizers leave it out.

    Args:
        optimizers: one, and the ones inside it.
        keeper: gets the new parameters, once all ranks have the first rank's values.
        ranks: train the parameters.

    Returns:
        A function that looks for parameters added in another way, and returns whether there were
        any; a collective if there are.
    """

    def adopt() -> bool:
        groups = [group for each in optimizers for group in each.param_groups]
        updated = dict.fromkeys(p for group in groups for p in group["params"])
        # In a mesh, other ranks' parameters are on the meta device.
        new = [p for p in updated if not (p in keeper or p.is_meta or is_left_to_rank(p))]
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
