"""The learning rate and the norm of the gradients of PyTorch's optimizers.

The norm is measured after ``backward()``, when the gradients are averaged and before the script
clips them. After clipping it would be the same in every step. It is measured once more when the
update begins, to record the norm that the script has changed it to.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hvkit import runtime
from hvkit.frameworks.pytorch.gradients.backward_passes import outermost_pass
from hvkit.frameworks.pytorch.optimizers import scaler_hooks, stepping_in
from hvkit.frameworks.pytorch.refusals import is_in_mesh
from hvkit.frameworks.pytorch.step_hooks import closure_of
from hvkit.watch.spans import PASS, REDUCTION, Span, observe


class GradientNorms:
    """Measures the norms of gradients in the steps that end with a record."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._pending = False
        self._optimizers = list(optimizers)
        # The norms after backward() and when an update began, by the optimizer's number, and the
        # numbers of the optimizers whose updates have begun.
        self._averaged: dict[int, torch.Tensor] = {}
        self._applied: dict[int, torch.Tensor] = {}
        self._stepped: set[int] = set()
        # Autograd's number of the backward pass whose end is awaited.
        self._passes: dict[int, int] = {}
        self._nested = False
        self._hooks: list[RemovableHandle] = []
        for number, each in enumerate(self._optimizers):
            stepping, *_ = stepping_in(each)
            stepping.register_step_pre_hook(functools.partial(self._before_step, number))
            scaler_hooks(stepping).after_unscaling = functools.partial(self._measure, number)
        reduced = _weakly(self, GradientNorms._completed)
        observe(reduced)
        weakref.finalize(self, observe, reduced, False)

    def expect(self, pending: bool) -> None:
        """Prepare for the next step; ``pending``: it ends with a record. Others need no hooks."""
        for measured in (self._averaged, self._applied, self._stepped):
            measured.clear()
        self._pending = pending
        if pending == bool(self._hooks):
            return
        while self._hooks:
            self._hooks.pop().remove()
        for number, optimizer in enumerate(self._optimizers if pending else ()):
            computed = _weakly(self, functools.partial(GradientNorms._begin_pass, number=number))
            for p in _parameters(optimizer):
                if p.requires_grad:
                    hook = p.register_post_accumulate_grad_hook(computed)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)

    def read(self) -> dict[str, float]:
        """``learning_rate`` of the first parameter group; ``gradient_norm`` of this rank's part.

        ``applied_gradient_norm`` is the norm at the update, which differs from it if the script has
        changed gradients. The norms of all ranks together give the norms of the model: only rank 0
        has some, unless the model is divided.
        """
        values: dict[str, float] = {}
        groups = [group for each in self._optimizers for group in each.param_groups]
        if groups and groups[0].get("lr") is not None:
            values["learning_rate"] = float(groups[0]["lr"])
        # Steps that a GradScaler has left out had infinite gradients.
        averaged = [self._averaged.get(i, self._applied.get(i)) for i in self._stepped]
        applied = [self._applied.get(i, self._averaged.get(i)) for i in self._stepped]
        if any(each is not None for each in averaged):
            values["gradient_norm"] = _joined(averaged)
            values["applied_gradient_norm"] = _joined(applied)
        return values

    def _begin_pass(self, _: torch.Tensor, number: int) -> None:
        """In a backward pass that gives an optimizer gradients: measure them at its end."""
        task = torch._C._current_graph_task_id()
        if self._passes.get(number) != task:
            self._passes[number] = task
            self._nested |= outermost_pass(task) != task
            queue: Callable[[Callable[[], None]], None] = (
                torch.autograd.Variable._execution_engine.queue_callback
            )
            # After the callbacks that are queued by the end of the pass, which average gradients.
            queue(lambda: queue(lambda: self._measure(number)))

    def _completed(self, span: Span) -> None:
        """After a reduction, or a pass through all stages: gradients that were measured are not
        the last ones, if passes inside another have ended before."""
        if span.name == PASS or (self._nested and span.name == REDUCTION):
            self._nested = False
            for number in self._passes:
                self._measure(number)

    def _measure(self, number: int) -> None:
        unmeasured = self._pending and number not in self._applied
        if unmeasured and (norm := _norm(self._optimizers[number])) is not None:
            self._averaged[number] = norm

    def _before_step(self, number: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._pending:
            return
        self._stepped.add(number)
        # A closure computes the gradients only now.
        if closure_of(args, kwargs) is not None or (norm := _norm(optimizer)) is None:
            return
        scale = getattr(optimizer, "grad_scale", None)  # a fused update unscales gradients itself
        if scale is not None:
            norm = norm / scale
            if number in self._averaged:
                self._averaged[number] = self._averaged[number] / scale
        self._applied[number] = norm


def _weakly(
    gradients: GradientNorms, call: Callable[[GradientNorms, Any], None]
) -> Callable[[Any], None]:
    """A hook that does not keep them alive: the garbage collector cannot see what it refers to."""
    reference = weakref.ref(gradients)

    def hook(argument: Any) -> None:
        if (found := reference()) is not None:
            call(found, argument)

    return hook


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@torch.no_grad()
def _norm(optimizer: Optimizer) -> torch.Tensor | None:
    """The norm of the gradients as they are that count on this rank; None if there are none.

    Those that all ranks hold count on rank 0.
    """
    parameters = _parameters(optimizer)
    if any(map(is_in_mesh, parameters)):
        from hvkit.frameworks.pytorch.model_parallel import mesh_gradients

        if (in_mesh := mesh_gradients.of(parameters)) is not None:
            return in_mesh.own_norm(parameters)
    gradients = (p.grad for p in parameters if p.grad is not None)
    counted = [
        each.to_local() if isinstance(each, DTensor) else each
        for each in gradients
        if isinstance(each, DTensor) or runtime.rank() == 0
    ]
    values = [each.coalesce().values() if each.is_sparse else each for each in counted]
    return torch.nn.utils.get_total_norm(values) if values else None


def _joined(norms: Sequence[torch.Tensor | None]) -> float:
    return math.hypot(*(float(each) for each in norms if each is not None))
