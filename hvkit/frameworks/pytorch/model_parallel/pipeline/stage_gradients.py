"""Lets autograd enter and leave a stage, under the same settings of autocast as the script."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import autograd

from hvkit.frameworks.pytorch.refusals import is_in_pipeline
from hvkit.pipeline.channel import TensorSpec, in_pass


class StageInput:
    """Catches the gradients of the tensors that a stage receives.

    These are no leaves for autograd, since a stage may begin with an operation in place.
    """

    def __init__(self, specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> None:
        self.specs = [each for each in specs if each.requires_grad]
        self.caught: list[torch.Tensor | None] = [None] * len(self.specs)
        self._device = tensors[0].device if tensors else torch.device("cpu")

    def gradients(self) -> list[torch.Tensor]:
        """The gradients of the tensors that need one; zeros if the stage has not used a tensor."""
        return [
            torch.zeros(each.shape, dtype=each.dtype, device=self._device) if g is None else g
            for g, each in zip(self.caught, self.specs, strict=True)
        ]


class _Received(torch.autograd.Function):
    """The received tensors that need a gradient, as results of an operation."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, entry: StageInput, tensors: Any) -> Any:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.entry.caught = list(gradients)
        return None, None, None


_received_by: Callable[..., tuple[torch.Tensor, ...]] = _Received.apply


def enter(
    specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]
) -> tuple[StageInput, list[torch.Tensor]]:
    """Prepare the input of a stage, of which the caller must keep no tensor.

    Returns:
        What catches the gradients of the input, and the input.
    """
    entry = StageInput(specs, tensors)
    if not entry.specs or not torch.is_grad_enabled():
        return entry, list(tensors)
    pairs = zip(specs, tensors, strict=True)
    received = iter(_received_by(anchor(), entry, [t for each, t in pairs if each.requires_grad]))
    return entry, [
        next(received) if each.requires_grad else t for each, t in zip(specs, tensors, strict=True)
    ]


def anchor() -> torch.Tensor:
    """An input for an operation that autograd would not record without one."""
    return torch.empty(0, requires_grad=True)


def same_memory(t: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory, which autograd does not see as a view."""
    alias: torch.Tensor = torch.empty(0, dtype=t.dtype, device=t.device)
    return alias.set_(t)  # type: ignore[call-overload,no-any-return]


def autocast_state() -> tuple[tuple[bool, torch.dtype], ...]:
    """By kind of device, whether autocast is on, and its dtype."""
    return tuple(
        (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


def autocast_as(state: Sequence[tuple[bool, torch.dtype]]) -> ExitStack:
    """A context with the settings that ``autocast_state`` has returned."""
    stack = ExitStack()
    for kind, (enabled, dtype) in zip(("cpu", "cuda"), state, strict=True):
        if enabled or torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, dtype, enabled=enabled))
    return stack


@functools.cache
def refuse_chosen_inputs() -> None:
    """Make ``backward(inputs=...)`` and ``torch.autograd.grad`` raise for a model's parameters.

    Autograd would not run the other stages, and give no gradients and no error. ``backward()`` also
    raises for a loss without a value, which depends on weights of other stages. All of these call
    one function of PyTorch, also where a script has imported their names before.
    """
    module: Any = autograd
    run = module._engine_run_backward

    @functools.wraps(run)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # They follow the gradients, and whether to retain and to create a graph.
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        if not in_pass() and any(isinstance(t, torch.Tensor) and is_in_pipeline(t) for t in inputs):
            raise ValueError(
                "backward(inputs=...) and torch.autograd.grad cannot compute gradients of "
                "parameters in a pipeline, which other ranks compute in backward(): call "
                "loss.backward(), and read p.grad"
            )
        try:
            return run(tensors, *args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if in_pass() or not any(t.is_meta for t in tensors):
                raise
            raise ValueError(
                "the loss is computed from a parameter of another stage of the pipeline, which has "
                "no value on this rank, as in sum(p.square().sum() for p in model.parameters()). "
                "For c times that penalty leave it out, and pass weight_decay=2 * c to the "
                "optimizer, which for SGD and Adam is the same"
            ) from error

    module._engine_run_backward = checked
