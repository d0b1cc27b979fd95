"""What each rank tells the others along with its gradients: a few numbers, averaged like them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

# Optimizer steps are compared modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8
# Digits in base 2 of what stands for the learning rates.
_BITS = 24


@dataclass(frozen=True)
class Flags:
    """What any rank had in a reduction; the same on every rank.

    Attributes:
        dense: numbers of the parameters with a dense gradient.
        sparse: numbers of those with a sparse one.
        outdated: numbers of those whose gradient changed after their bucket had gone out.
        frozen_on_some: numbers of those that some ranks train and others do not.
        rates_differ: whether the ranks use different learning rates.
        steps_differ: whether the ranks have done different numbers of optimizer steps.
    """

    dense: set[int]
    sparse: set[int]
    outdated: set[int]
    frozen_on_some: set[int]
    rates_differ: bool
    steps_differ: bool

    @staticmethod
    def length(parameters: int) -> int:
        """Numbers that the flags of so many parameters take."""
        return 4 * parameters + _BITS + 2

    @staticmethod
    def encode(
        parameters: int,
        *,
        dense: Iterable[int],
        sparse: Iterable[int],
        outdated: Iterable[int],
        trained: Iterable[int],
        rates: int,
        steps: int,
    ) -> torch.Tensor:
        """This rank's flags as a float32 tensor of shape ``(length(parameters),)``.

        Args:
            parameters: how many there are.
            dense: see the attributes; ``sparse`` and ``outdated``, too.
            trained: numbers of the parameters that require a gradient.
            rates: a checksum of the learning rates.
            steps: optimizer steps done.
        """
        rows = torch.zeros(4, parameters)
        for row, numbers in zip(rows, (dense, sparse, outdated, trained), strict=True):
            row[list(numbers)] = 1
        bits = torch.tensor([rates >> b & 1 for b in range(_BITS)])
        step = float(steps % _STEP_CYCLE)
        return torch.cat([rows.view(-1), bits, torch.tensor([step, step * step])])

    @staticmethod
    def decode(mean: torch.Tensor, size: int) -> Flags:
        """The flags from the mean over ``size`` ranks of what :meth:`encode` gave."""
        values = mean.cpu().double()
        rows = values[: -_BITS - 2].view(4, -1)
        step, square = values[-2:].tolist()
        dense, sparse, outdated = (_numbers(row > 0) for row in rows[:3])
        return Flags(
            dense,
            sparse,
            outdated,
            frozen_on_some=_numbers(_on_some(rows[3], size)),
            rates_differ=bool(_on_some(values[-_BITS - 2 : -2], size).any()),
            steps_differ=square - step * step > 0.25 / size,
        )


def _on_some(means: torch.Tensor, size: int) -> torch.Tensor:
    """Which means are those of zeros and ones."""
    return (means > 0.5 / size) & (means < 1 - 0.5 / size)


def _numbers(row: torch.Tensor) -> set[int]:
    return set(row.nonzero().flatten().tolist())
