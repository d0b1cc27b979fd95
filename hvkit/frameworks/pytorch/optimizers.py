"""Optimizers that step in unusual ways: with a closure, through a parent class, inside another.

Each function here names the optimizers that need it. ``hvkit.frameworks.pytorch.learning_rate``,
``reducer``, ``rounds``, ``sharded`` and ``refusals`` use them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit import metrics
from hvkit.sync.port import Options

Closure = Callable[[], Any]

_SCALED_STEP = "_hvkit_scaled_step"
_UNSCALING = "_hvkit_unscaling"
_UNSCALED = "_hvkit_unscaled"


def has_step_length(optimizer: Optimizer) -> bool:
    """Whether ``lr`` is the length of a step rather than a factor of the gradient: for LBFGS.

    LBFGS takes the length from the curvature, and 1 is right for batches of any size. The rules
    that scale learning rates compare updates that are proportional to the gradient.
    """
    return isinstance(optimizer, torch.optim.LBFGS)


def refuse_own_steps(options: Options, optimizers: Sequence[Optimizer]) -> None:
    """Raise if ``on_nonfinite`` cannot leave out a step of an optimizer.

    Raises:
        ValueError: names it.
    """
    for each in optimizers:
        if options.on_nonfinite == "skip" and has_step_length(each):
            raise ValueError(
                f'on_nonfinite="skip" cannot leave out a step of {type(each).__name__}, which '
                'computes gradients itself: use on_nonfinite="stop"'
            )


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one wraps and shares groups with, as SAM and Lookahead do."""
    groups = {id(group) for group in optimizer.param_groups}
    return [
        each
        for each in optimizers_held(optimizer)
        if any(id(group) in groups for group in each.param_groups)
    ]


def optimizers_held(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers among this one's attributes, also those with groups of their own."""
    held: list[Any] = []
    for value in vars(optimizer).values():
        held.extend(value if isinstance(value, list | tuple) else [value])
    return [each for each in held if isinstance(each, Optimizer)]


def stepping_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and those inside it, as far as functions can be called around their steps.

    Those of Opacus and Accelerate leave out ``Optimizer.__init__``, which makes the lists of hooks;
    their steps call that of the optimizer inside.
    """
    everyone = [optimizer, *optimizers_inside(optimizer)]
    return [each for each in everyone if hasattr(each, "_optimizer_step_pre_hooks")]


def closure_of(args: Any, kwargs: Any) -> Closure | None:
    """The closure among the arguments of a hook of ``step``, ``args[0]`` being the optimizer."""
    closure: Closure | None = args[1] if len(args) > 1 else kwargs.get("closure")
    return closure


def with_closure(closure: Closure, args: Any, kwargs: Any) -> Any:
    """The arguments with another closure, as a hook before ``step`` returns them."""
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], closure, *args[2:]), rest


def with_averaged_loss(closure: Closure) -> Closure:
    """A closure that returns the mean of the ranks' losses.

    LBFGS decides by the loss how far to go and when to stop; all ranks have to decide alike.
    """

    def averaged() -> Any:
        with torch.enable_grad():
            loss = torch.as_tensor(closure()).detach()
        return loss.new_tensor(metrics.average(float(loss)))

    return averaged


class OutermostStep:
    """Calls functions around each update, once for steps that run inside each other.

    A step may call that of its parent class, or that of an optimizer inside.

    Args:
        before: called before the update.
        after: called after it, unless it raised.
        failed: called after an update that raised.
    """

    def __init__(
        self,
        before: Callable[[], None],
        after: Callable[[], None],
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._before = before
        self._after = after
        self._failed = failed
        self._depth = 0

    def attach(self, optimizer: Optimizer) -> None:
        """Call the functions around the steps of this optimizer; attach also to those inside."""
        uncompiled: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.compiler.disable
        optimizer.register_step_pre_hook(uncompiled(self._enter))
        optimizer.register_step_post_hook(uncompiled(self._leave))
        step = optimizer.step

        # PyTorch skips the hooks after a step that raises.
        @functools.wraps(step)
        def cleaned_up(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            depth = self._depth
            try:
                return step(*args, **kwargs)
            except BaseException:
                if depth == 0:
                    self._failed()
                raise
            finally:
                self._depth = depth

        optimizer.step = MethodType(cleaned_up, optimizer)  # type: ignore[method-assign]

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._depth == 0:
            self._before()
        self._depth += 1

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._after()


def around_scaled_steps(
    optimizer: Optimizer, function: Callable[[Any, Callable[[], Any]], Any]
) -> None:
    """Run ``function(scaler, step)`` in place of each ``GradScaler.step(optimizer)``.

    ``step()`` takes the step, or skips it because of an overflow.
    """
    # In the instance, so that the function may hold the optimizer; pickled ones leave it out.
    vars(optimizer)[_SCALED_STEP] = function
    _patch_scaler()


def before_unscaling(optimizer: Optimizer, function: Callable[[], None]) -> None:
    """Call a function before a ``GradScaler`` looks at the gradients of this optimizer."""
    vars(optimizer)[_UNSCALING] = function
    _patch_scaler()


def after_unscaling(optimizer: Optimizer, function: Callable[[], None]) -> None:
    """Call a function each time a ``GradScaler`` has unscaled the gradients of this optimizer."""
    vars(optimizer)[_UNSCALED] = function
    _patch_scaler()


@functools.cache
def _patch_scaler() -> None:
    scaled_step, unscale = torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_

    def prepare(scaler: Any, optimizer: Optimizer) -> None:
        function = vars(optimizer).get(_UNSCALING)
        if function is not None and scaler.is_enabled():
            function()

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        prepare(self, optimizer)
        unscale(self, optimizer)
        if self.is_enabled() and (function := vars(optimizer).get(_UNSCALED)):
            function()

    # It looks at the gradients itself if the optimizer unscales them.
    @functools.wraps(scaled_step)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        prepare(self, optimizer)
        plain = functools.partial(scaled_step, self, optimizer, *args, **kwargs)
        function = vars(optimizer).get(_SCALED_STEP)
        return plain() if function is None else function(self, plain)

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


def hook_steps_of_parents(kind: type[Any]) -> None:
    """Make the step hooks run around the steps of parent classes as well.

    PyTorch does this itself when it makes the first optimizer of such a class.
    """
    for each in _with_step(kind):
        if not getattr(vars(each)["step"], "hooked", False):
            each.step = Optimizer.profile_hook_step(each.step)
            each.step.hooked = True


@functools.cache
def leaves_update_to_parent(kind: type[Any], depth: int) -> bool:
    """Whether the running step calls the step of a parent class, as many own optimizers do.

    Args:
        kind: the optimizer's class.
        depth: how many of its classes' steps are running, from 1.
    """
    with_step = _with_step(kind)
    if depth >= len(with_step):
        return False
    code = inspect.unwrap(vars(with_step[depth - 1])["step"]).__code__
    parents = {each.__name__ for each in with_step[depth:]}
    return "step" in code.co_names and (
        "__class__" in code.co_freevars or not parents.isdisjoint(code.co_names)
    )


def _with_step(kind: type[Any]) -> list[type[Any]]:
    """The optimizer's classes that define a step, the class itself first."""
    return [each for each in kind.__mro__ if "step" in vars(each) and each is not Optimizer]
