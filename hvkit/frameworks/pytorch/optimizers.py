"""Optimizers that step in unusual ways: through a parent class, inside another, with a GradScaler.

Each function here names the optimizers that need it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from hvkit import metrics
from hvkit.sync.port import Options

_SCALED_STEP = "_hvkit_scaled_step"
_UNSCALING = "_hvkit_unscaling"
_UNSCALED = "_hvkit_unscaled"
_OVERFLOWS = "_hvkit_overflows"


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


def mean_of_ranks(loss: Any) -> torch.Tensor:
    """The mean over ranks of the loss that a closure returns to the optimizer; a collective.

    LBFGS decides by the loss how far to go and when to stop; all ranks must decide the same.
    """
    local = torch.as_tensor(loss).detach()
    return local.new_tensor(metrics.average(float(local)))


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one wraps and shares groups with, as SAM and Lookahead do."""
    groups = {id(group) for group in optimizer.param_groups}
    return [
        each
        for each in optimizers_held(optimizer)
        if any(id(group) in groups for group in each.param_groups)
    ]


def optimizers_held(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers among this one's attributes, also ones with separate groups."""
    attributes: list[Any] = []
    for value in vars(optimizer).values():
        attributes.extend(value if isinstance(value, list | tuple) else [value])
    return [each for each in attributes if isinstance(each, Optimizer)]


def stepping_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and the ones inside it, as far as functions can be called around their steps.

    Optimizers of Opacus and Accelerate leave out ``Optimizer.__init__``, which makes the lists of
    hooks; their steps call the step of the optimizer inside.
    """
    candidates = [optimizer, *optimizers_inside(optimizer)]
    return [each for each in candidates if hasattr(each, "_optimizer_step_pre_hooks")]


def around_scaled_steps(
    optimizer: Optimizer, function: Callable[[Any, Callable[[], Any]], Any]
) -> None:
    """Run ``function(scaler, step)`` in place of each ``GradScaler.step(optimizer)``.

    ``step()`` takes the step, or skips it because of an overflow.
    """
    # In the instance, so that the function may hold the optimizer; pickled ones leave it out.
    vars(optimizer)[_SCALED_STEP] = function
    _patch_scaler()


def refuse_grad_scaler(optimizer: Optimizer, text: str) -> None:
    """Raise a ``ValueError`` with this text if an enabled ``GradScaler`` steps the optimizer."""

    def refuse(scaler: Any, step: Callable[[], Any]) -> Any:
        if scaler.is_enabled():
            raise ValueError(text)
        return step()

    around_scaled_steps(optimizer, refuse)


def before_unscaling(optimizer: Optimizer, function: Callable[[], None]) -> None:
    """Call a function before a ``GradScaler`` looks at the gradients of this optimizer."""
    vars(optimizer)[_UNSCALING] = function
    _patch_scaler()


def after_unscaling(optimizer: Optimizer, function: Callable[[], None]) -> None:
    """Call a function each time a ``GradScaler`` has unscaled the gradients of this optimizer."""
    vars(optimizer)[_UNSCALED] = function
    _patch_scaler()


def share_overflows(optimizer: Optimizer, function: Callable[[Any], None]) -> None:
    """Call ``function(scaler)`` each time a ``GradScaler`` has looked for overflows.

    It unscales the gradients before every step, also of optimizers that do so themselves.
    """
    vars(optimizer)[_OVERFLOWS] = function
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
        if self.is_enabled() and (share := vars(optimizer).get(_OVERFLOWS)):
            share(self)
        if self.is_enabled() and (function := vars(optimizer).get(_UNSCALED)):
            function()

    # It looks at the gradients itself if the optimizer unscales them.
    @functools.wraps(scaled_step)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        prepare(self, optimizer)
        if self.is_enabled() and _OVERFLOWS in vars(optimizer) and _is_ready(self, optimizer):
            self.unscale_(optimizer)
        plain = functools.partial(scaled_step, self, optimizer, *args, **kwargs)
        function = vars(optimizer).get(_SCALED_STEP)
        return plain() if function is None else function(self, plain)

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


def _is_ready(scaler: Any, optimizer: Optimizer) -> bool:
    """Whether an enabled scaler has not unscaled the gradients of this step yet."""
    return scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY


def hook_steps_of_parents(cls: type[Any]) -> None:
    """Make the step hooks run around the steps of parent classes as well.

    PyTorch does this itself when it makes the first optimizer of such a class.
    """
    for each in _with_step(cls):
        if not getattr(vars(each)["step"], "hooked", False):
            each.step = Optimizer.profile_hook_step(each.step)
            each.step.hooked = True


@functools.cache
def leaves_update_to_parent(cls: type[Any], depth: int) -> bool:
    """Whether the running step calls the step of a parent class, as many derived optimizers do.

    Args:
        cls: the optimizer's class.
        depth: how many of its classes' steps are running, from 1.
    """
    with_step = _with_step(cls)
    if depth >= len(with_step):
        return False
    code = inspect.unwrap(vars(with_step[depth - 1])["step"]).__code__
    parents = {each.__name__ for each in with_step[depth:]}
    return "step" in code.co_names and (
        "__class__" in code.co_freevars or not parents.isdisjoint(code.co_names)
    )


def _with_step(cls: type[Any]) -> list[type[Any]]:
    """The optimizer's classes that define a step, the class itself first."""
    return [each for each in cls.__mro__ if "step" in vars(each) and each is not Optimizer]
