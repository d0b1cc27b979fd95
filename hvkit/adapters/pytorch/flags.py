"""What each rank tells the others along with its gradients: a few numbers, averaged like them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Optimizer steps are compared modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8


@dataclass(frozen=True)
class Flags:
    """What any rank had in a reduction; the same on every rank.

    Attributes:
        dense: numbers of the parameters with a dense gradient.
        sparse: numbers of those with a sparse one.
        outdated: numbers of those whose gradient changed after their bucket had gone out.
        steps_differ: whether the ranks have done different numbers of optimizer steps.
    """

    dense: set[int]
    sparse: set[int]
    outdated: set[int]
    steps_differ: bool

    @staticmethod
    def length(parameters: int) -> int:
        """Numbers that the flags of so many parameters take."""
        return 3 * parameters + 2

    @staticmethod
    def encode(
        parameters: int,
        dense: Iterable[int],
        sparse: Iterable[int],
        outdated: Iterable[int],
        steps: int,
    ) -> torch.Tensor:
        """This rank's flags as a float32 tensor of shape ``(length(parameters),)``."""
        rows = torch.zeros(3, parameters)
        for row, numbers in zip(rows, (dense, sparse, outdated), strict=True):
            row[list(numbers)] = 1
        step = float(steps % _STEP_CYCLE)
        return torch.cat([rows.view(-1), torch.tensor([step, step * step])])

    @staticmethod
    def decode(mean: torch.Tensor, size: int) -> Flags:
        """The flags from the mean over ``size`` ranks of what :meth:`encode` gave."""
        values = mean.cpu().double()
        rows = values[:-2].view(3, -1)
        step, square = values[-2:].tolist()
        dense, sparse, outdated = (set(row.nonzero().flatten().tolist()) for row in rows)
        return Flags(dense, sparse, outdated, steps_differ=square - step * step > 0.25 / size)
