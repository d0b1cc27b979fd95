"""Averaging gradients, with the optimizer's state divided among the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvkit.strategies.strategy import Averaging


@dataclass(frozen=True)
class ShardedOptimizer(Averaging):
    """Each rank holds the optimizer's state for its part of the parameters, and updates those.

    With N ranks, the mean gradient g, and the set S_w of the parameters that rank w owns:

        x_i, state_i <- U(x_i, state_i, g_i)    on the rank that owns i
        x_i <- the owner's x_i                  on the others

    The update of a parameter is the same arithmetic on the same numbers as in ``Synchronous``, so
    the weights are the same, bit for bit. A rank keeps 1/N of Adam's two moments, and at most the
    moments of one parameter more. It has all mean gradients, so clipping does not change. A rank
    sends 1.5 times the bytes: 2 (N-1)/N P for the gradients and (N-1)/N P for the parameters.

    It suits optimizers that update each parameter from its own gradient and state, as those of
    PyTorch and Keras do.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020), stage 1.
    """

    def owners(self, sizes: Sequence[int], loads: list[int]) -> list[int]:
        """Choose a rank for each parameter: the largest first, each to the rank with the least.

        No rank gets more than the mean and the largest parameter together.

        Args:
            sizes: of the parameters, the same on every rank.
            loads: the sum of the sizes that each rank owns already; the new ones are added.
        """
        owners = [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += sizes[i]
        return owners
