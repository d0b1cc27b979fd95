"""The learning rate and the norm of the gradients of PyTorch's optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from hvkit import runtime

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor


class Gradients:
    """Computes the norm in the steps that end with a record, just before the update.

    Args:
        monitor: knows which steps those are.
        optimizers: those that update the models.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._monitor = monitor
        self._optimizers = list(optimizers)
        self._norms: dict[int, torch.Tensor] = {}
        for number, each in enumerate(self._optimizers):
            each.register_step_pre_hook(lambda opt, *_, i=number: self._before_step(i, opt))

    def blocked(self) -> float:
        """Seconds in collectives of graphs: PyTorch's are all seen from Python."""
        return 0.0

    def expect(self, due: bool) -> None:
        """Whether the next step ends with a record: ``_before_step`` looks itself."""

    def read(self) -> dict[str, float]:
        """``learning_rate`` of the first parameter group, and ``gradient_norm`` over all."""
        values: dict[str, float] = {}
        groups = [group for each in self._optimizers for group in each.param_groups]
        if groups and groups[0].get("lr") is not None:
            values["learning_rate"] = float(groups[0]["lr"])
        if self._norms:
            values["gradient_norm"] = sum(float(n) ** 2 for n in self._norms.values()) ** 0.5
            self._norms.clear()
        return values

    @torch.no_grad()
    def _before_step(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        if not self._monitor.due:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        divided = any(isinstance(each, DTensor) for each in gradients)
        # Averaged gradients are the same on all ranks; the norm of divided ones is a collective.
        if not gradients or (runtime.rank() != 0 and not divided):
            return
        values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
        norm = torch.nn.utils.get_total_norm(values)
        self._norms[number] = norm.full_tensor() if isinstance(norm, DTensor) else norm


def watch(
    monitor: Monitor, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]
) -> Gradients:
    """Record the rate and the norm of these optimizers."""
    return Gradients(monitor, optimizers)
