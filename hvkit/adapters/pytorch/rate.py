"""The learning rates of an optimizer's parameter groups on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.learning_rate import warmup_multiplier


def multiply(groups: Sequence[dict[str, Any]], factor: float) -> list[tuple[float, float]]:
    """Multiply the groups' learning rates in place; returns (before, after) for each rate.

    Groups without a rate are left alone; a tensor that several groups share is multiplied once.
    """
    changes = []
    done: set[int] = set()
    for group in groups:
        rate = group.get("lr")
        if rate is None or id(rate) in done:
            continue
        before = float(rate)
        if isinstance(rate, torch.Tensor):
            done.add(id(rate))
            rate.mul_(factor)
        else:
            group["lr"] = rate * factor
        changes.append((before, before * factor))
    return changes


class WarmUp:
    """Lowers the rates inside ``step()`` only, so that schedulers never see them lowered."""

    def __init__(self, steps: int, factor: float) -> None:
        self._steps = steps
        self._factor = factor
        self.steps_done = 0
        """Optimizer steps so far; a checkpoint sets it when training resumes."""
        self._full: list[float | None] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Lower the rates of the optimizer's first steps."""
        optimizer.register_step_pre_hook(self._lower)

        def after(optimizer: Optimizer, args: object, kwargs: object) -> None:
            self._restore(optimizer)
            self.steps_done += 1

        optimizer.register_step_post_hook(after)

    def _lower(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self._restore(optimizer)  # after a step that failed
        if self.steps_done >= self._steps:
            return
        rates = [group.get("lr") for group in optimizer.param_groups]
        self._full = [None if rate is None else float(rate) for rate in rates]
        multiply(
            optimizer.param_groups, warmup_multiplier(self.steps_done, self._steps, self._factor)
        )

    def _restore(self, optimizer: Optimizer) -> None:
        for group, full in zip(optimizer.param_groups, self._full, strict=False):
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(full)
            elif full is not None:
                group["lr"] = full
        self._full = []
