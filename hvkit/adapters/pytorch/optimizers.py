"""Optimizers that step in unusual ways: with a closure, through a parent class, inside another.

Each function here names the optimizers that need it. ``hvkit.adapters.pytorch.learning_rate``,
``hvkit.adapters.pytorch.reducer`` and ``hvkit.adapters.pytorch.refusals`` use them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit import metrics

Closure = Callable[[], Any]


def has_step_length(optimizer: Optimizer) -> bool:
    """Whether ``lr`` is the length of a step rather than a factor of the gradient: for LBFGS.

    LBFGS takes the length from the curvature, and 1 is right for batches of any size. The rules
    that scale learning rates compare updates that are proportional to the gradient.
    """
    return isinstance(optimizer, torch.optim.LBFGS)


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one wraps and shares groups with, as SAM and Lookahead do."""
    groups = {id(group) for group in optimizer.param_groups}
    held: list[Any] = []
    for value in vars(optimizer).values():
        held.extend(value if isinstance(value, list | tuple) else [value])
    return [
        each
        for each in held
        if isinstance(each, Optimizer) and any(id(group) in groups for group in each.param_groups)
    ]


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
