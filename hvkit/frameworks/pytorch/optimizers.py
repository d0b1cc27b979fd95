"""Tensors of models and optimizers by name; optimizers that step in unusual ways.

An optimizer may step by a parent class, inside another optimizer, or with a ``GradScaler``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import nn
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from hvkit.communication import metrics

T = TypeVar("T", bound=torch.Tensor)

_SCALER_HOOKS = "_hvkit_scaler_hooks"


def parameters_of(*optimizers: Optimizer) -> list[Any]:
    return [p for each in optimizers for group in each.param_groups for p in group["params"]]


def named_parameters(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer]
) -> dict[str, nn.Parameter]:
    """The parameters of the models, and the ones that only optimizers have; each once."""
    names: dict[nn.Parameter, str] = {}
    for name, p in named_in(models, methodcaller("named_parameters")).items():
        names.setdefault(p, name)  # another model may share it
    for o, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                if not is_left_to_rank(p):
                    names.setdefault(p, f"optimizer {o} group {g} parameter {i}")
    return {name: p for p, name in names.items()}


def named_in(
    models: Sequence[nn.Module], named: Callable[[nn.Module], Iterable[tuple[str, T]]]
) -> dict[str, T]:
    """Tensors by a name for messages: ``0.weight``, of several models ``0.weight of model 1``."""
    of_model = " of model {}" if len(models) > 1 else ""
    return {
        name.replace("_orig_mod.", "") + of_model.format(number): tensor  # of torch.compile
        for number, model in enumerate(models)
        for name, tensor in named(model)
    }


_OF_THIS_RANK = "_hvkit_of_this_rank"


def leave_to_rank(parameter: torch.Tensor) -> None:
    """Let ranks have different values of an optimizer's tensor that no gradient will reach."""
    # No weak reference: PyTorch exchanges no tensor that has one.
    setattr(parameter, _OF_THIS_RANK, True)


def is_left_to_rank(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, _OF_THIS_RANK)


def has_step_length(optimizer: Optimizer) -> bool:
    """Whether ``lr`` is the length of a step rather than a factor of the gradient: for LBFGS.

    1 is right for batches of any size. The rules that scale learning rates compare updates that are
    proportional to the gradient.
    """
    return isinstance(optimizer, torch.optim.LBFGS)


def mean_of_ranks(loss: Any) -> torch.Tensor:
    """The mean over ranks of a closure's loss, by which LBFGS decides; a collective."""
    local = torch.as_tensor(loss).detach()
    return local.new_tensor(metrics.average(float(local)))


def optimizers_inside(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that this one wraps and shares groups with, as SAM and Lookahead do."""
    groups = {id(group) for group in optimizer.param_groups}
    held = optimizers_in_attributes(optimizer)
    return [each for each in held if not groups.isdisjoint(map(id, each.param_groups))]


def optimizers_in_attributes(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers among this one's attributes, also ones with separate groups."""
    values = vars(optimizer).values()
    lists = (value if isinstance(value, list | tuple) else [value] for value in values)
    return [each for each in itertools.chain(*lists) if isinstance(each, Optimizer)]


def stepping_in(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer and the ones inside it, as far as functions can be called around their steps.

    Optimizers of Opacus and Accelerate leave out ``Optimizer.__init__``, which makes the lists of
    hooks; their steps call the step of the optimizer inside.
    """
    candidates = [optimizer, *optimizers_inside(optimizer)]
    return [each for each in candidates if hasattr(each, "_optimizer_step_pre_hooks")]


@dataclass
class ScalerHooks:
    """What an enabled ``GradScaler`` calls around its work on one optimizer."""

    before_unscaling: Callable[[], None] | None = None
    """Before it looks at the gradients."""
    overflows: Callable[[Any], None] | None = None
    """Gets the scaler each time it has looked for overflows. It then unscales the gradients before
    every step, also of optimizers that do so themselves."""
    after_unscaling: Callable[[], None] | None = None
    step: Callable[[Any, Callable[[], Any]], Any] | None = None
    """Replaces the scaler's ``step``: gets the scaler, and what steps or skips."""


def scaler_hooks(optimizer: Optimizer) -> ScalerHooks:
    """The hooks of an optimizer, to be set; pickled optimizers leave them out."""
    _patch_scaler()
    # In the instance, so that hooks may hold the optimizer.
    hooks: ScalerHooks = vars(optimizer).setdefault(_SCALER_HOOKS, ScalerHooks())
    return hooks


def refuse_grad_scaler(optimizer: Optimizer, text: str) -> None:
    """Raise a ``ValueError`` with this text if an enabled ``GradScaler`` steps the optimizer."""

    def refuse(scaler: Any, step: Callable[[], Any]) -> Any:
        raise ValueError(text)

    scaler_hooks(optimizer).step = refuse


@functools.cache
def _patch_scaler() -> None:
    plain_step, plain_unscale = torch.amp.GradScaler.step, torch.amp.GradScaler.unscale_

    def hooks_of(scaler: Any, optimizer: Optimizer) -> ScalerHooks:
        found = vars(optimizer).get(_SCALER_HOOKS) if scaler.is_enabled() else None
        return found or ScalerHooks()

    @functools.wraps(plain_unscale)
    def unscale_(self: Any, optimizer: Optimizer) -> None:
        hooks = hooks_of(self, optimizer)
        if hooks.before_unscaling:
            hooks.before_unscaling()
        plain_unscale(self, optimizer)
        if hooks.overflows:
            hooks.overflows(self)
        if hooks.after_unscaling:
            hooks.after_unscaling()

    @functools.wraps(plain_step)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        hooks = hooks_of(self, optimizer)
        if hooks.before_unscaling:  # it looks at the gradients itself if the optimizer unscales
            hooks.before_unscaling()
        if hooks.overflows:
            state = self._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:
                self.unscale_(optimizer)
        plain = functools.partial(plain_step, self, optimizer, *args, **kwargs)
        return hooks.step(self, plain) if hooks.step else plain()

    torch.amp.GradScaler.step = step  # type: ignore[method-assign]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]


def hook_steps_of_parents(cls: type[Any]) -> None:
    """Run step hooks around parent classes' steps, as for the first optimizer of such a class."""
    for each in _with_step(cls):
        if not getattr(vars(each)["step"], "hooked", False):
            each.step = Optimizer.profile_hook_step(each.step)
            each.step.hooked = True


@functools.cache
def leaves_update_to_parent(cls: type[Any], depth: int) -> bool:
    """Whether the running step, the ``depth``-th of a class's from 1, calls a parent's."""
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
