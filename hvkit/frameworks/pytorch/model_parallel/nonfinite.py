"""Gradients of a model in a mesh that are NaN or infinite: steps are skipped, or training stops.

No rank has all gradients of a model, so the ranks agree when an optimizer's step begins. Clipping
spreads a NaN to all gradients before that: the ranks look at them then, too, for their names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.frameworks.pytorch.batch_norm import LastStatistics
from hvkit.frameworks.pytorch.gradients.nonfinite import skip_steps
from hvkit.frameworks.pytorch.model_parallel.gradient_norm import clipping_observers, local_part
from hvkit.frameworks.pytorch.optimizers import stepping_in
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.log import logger
from hvkit.sync.nonfinite import describe, skipped_steps
from hvkit.watch.calls import of_run
from hvkit.watch.rank_errors import mark_as_shown_by


class NonFiniteInMesh:
    """What a rank finds in the gradients of its part of a model.

    Args:
        action: ``"skip"`` or ``"stop"``.
        model: of which the ranks of a mesh have parts.
    """

    def __init__(self, action: str, model: nn.Module) -> None:
        self._action, self._model = action, model
        self._statistics = LastStatistics(model) if action == "skip" else None
        # The names of this rank's parameters that clipping has found.
        self._clipped: list[str] = []
        self._steps = 0
        clipping_observers.add(self)

    def attach(self, optimizer: Optimizer, hooks: UpdateHooks) -> None:
        """Look at the gradients before each step of an optimizer; a collective of all ranks."""
        skip_steps(self._action, stepping_in(optimizer), hooks, self._skips_step)

    def before_clipping(self, parameters: Sequence[torch.Tensor]) -> None:
        """Look at the gradients of these parameters."""
        self._clipped = self._found(parameters)

    def _found(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        """The names of those of the parameters whose gradient is NaN or infinite on this rank."""
        wanted = set(parameters)
        return [
            name
            for name, p in self._model.named_parameters()
            if p in wanted and p.grad is not None and not _is_finite(local_part(p.grad))
        ]

    def _skips_step(self, optimizer: Optimizer) -> bool:
        """Whether the step that begins now changes nothing.

        Raises:
            FloatingPointError: on every rank, with ``"stop"``.
        """
        self._steps += 1
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        mine = self._found(parameters), self._clipped
        self._clipped = []
        now, clipped = zip(*collectives.gather("optimizer.step()", mine), strict=True)
        if not any(now):
            if self._statistics is not None:
                self._statistics.keep()
            return False
        found = describe(clipped if any(clipped) else now)
        text = f"step {of_run(self._steps)}: {found}"
        if self._statistics is None:
            raise mark_as_shown_by(FloatingPointError(f"in {text}"), 0)
        self._statistics.put_back()
        skipped_steps.add()
        if not runtime.rank():
            logger.warning("skipped %s", text)
        return True


def _is_finite(gradient: torch.Tensor) -> bool:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return bool(torch.isfinite(values).all())
