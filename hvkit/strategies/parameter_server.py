"""Asynchronous training with a parameter server that bounds staleness.

A script chooses ``ParameterServer``. ``ServedWeights`` and ``Attendance`` are the server's
arithmetic on NumPy vectors; ``hvkit/sync/parameter_server_thread.py`` sends and receives the
messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.argument_checks import check_count
from hvkit.compression import Compression
from hvkit.strategies.strategy import Strategy

Array = NDArray[Any]


@dataclass(frozen=True)
class ParameterServer(Strategy):
    """A server on rank 0 holds the weights; every rank trains, and updates them in each step.

    With N ranks, the server's weights x, and the weights x_w that rank w last read, a step of rank
    w with its optimizer's update U is

        y <- U(x_w, g_w(x_w))
        x <- x + 1/N (y - x_w),    x_w <- x

    The server takes the ranks' steps as they come, so a rank computes with weights that others have
    changed since. ``staleness`` bounds that: a rank begins no step while it is more than this many
    steps ahead of the slowest. ``staleness=0`` lets each step wait for all ranks and adds their
    changes in rank order: with SGD, also with momentum and weight decay, that is ``Synchronous``.
    None sets no bound. The optimizer's state stays local.

    A rank that waits in a collective, such as ``hvkit.settled`` or the end of the script, holds up
    nobody, so ranks need not take equally many steps. Steps are counted from the last collective of
    all ranks.

    Of weights of P bytes, each rank but 0 sends P in a step, and rank 0 sends (N-1) P. Rank 0 keeps
    the server's weights in addition to its own, and each rank those that it last read. Compression
    is not supported: the server would have to keep a residual for each rank.

    Source: Ho et al., "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server" (2013); Dean et al., "Large Scale Distributed Deep Networks" (2012), Downpour SGD; Li et
    al., "Scaling Distributed Machine Learning with the Parameter Server" (2014).

    Args:
        staleness: how many steps a rank may be ahead of the slowest when it begins one, from 0;
            None for any number.
    """

    staleness: int | None

    def __post_init__(self) -> None:
        if self.staleness is not None:
            check_count("staleness", self.staleness, 0)

    def check(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(
                f"{self} sends weights, and {compression} would round them anew in each step: "
                "leave compression out, or use hvkit.LocalSGD"
            )


class ServedWeights:
    """A model's weights on the server; ``release`` decides which waiting ranks may continue."""

    def __init__(self, weights: Iterable[Array], size: int, staleness: int | None) -> None:
        self.weights = list(weights)
        self.clocks = [0] * size
        self.waiting: set[int] = set()
        self._staleness = staleness
        # By rank, with staleness 0: changes to add once those of all ranks have come.
        self._pending: dict[int, list[Array]] = {}

    def push(self, rank: int, changes: list[Array]) -> None:
        """Take and overwrite the changes of a rank, which waits from now on."""
        self.clocks[rank] += 1
        self.waiting.add(rank)
        self._pending[rank] = changes
        if self._staleness != 0:
            self._add_pending()

    def release(self, away: Set[int]) -> list[int]:
        """The waiting ranks that may continue, in rank order; they wait no more."""
        if self._staleness == 0 and self.waiting.issuperset(self._training(away)):
            self._add_pending()
        bound = math.inf if self._staleness is None else self._staleness
        released = sorted(rank for rank in self.waiting if self.lead(rank, away) <= bound)
        self.waiting.difference_update(released)
        return released

    def lead(self, rank: int, away: Set[int]) -> int:
        """How many steps a rank is ahead of the slowest that trains."""
        return self.clocks[rank] - min(self.clocks[each] for each in self._training(away))

    def slowest(self, away: Set[int]) -> list[int]:
        """The ranks that have done the fewest steps of those that train."""
        training = self._training(away)
        least = min(self.clocks[each] for each in training)
        return [each for each in training if self.clocks[each] == least]

    def restart_clocks(self) -> None:
        """Count steps from 0 again: all ranks have sent their changes and are in a collective."""
        self.clocks = [0] * len(self.clocks)

    def _training(self, away: Set[int]) -> list[int]:
        return [rank for rank in range(len(self.clocks)) if rank not in away]

    def _add_pending(self) -> None:
        for rank in sorted(self._pending):
            add(self.weights, self._pending.pop(rank), len(self.clocks))


def add(weights: Sequence[Array], changes: Sequence[Array], size: int) -> None:
    """Add a rank's changes to the weights, and overwrite the changes."""
    for vector, change in zip(weights, changes, strict=True):
        np.divide(change, size, out=change)
        np.add(vector, change, out=vector)


class Attendance:
    """Which ranks train. A rank that waits in a collective for all others must not hold up any.

    Ranks make the same collectives in the same order. So a rank that has entered more of them than
    another is still waiting in its last one.
    """

    def __init__(self, size: int) -> None:
        self._entered = [0] * size
        self._ended: set[int] = set()

    @property
    def away(self) -> set[int]:
        """The ranks that are not training now."""
        left_by_all = min(self._entered)
        inside = {rank for rank, count in enumerate(self._entered) if count > left_by_all}
        return inside | self._ended

    @property
    def all_ended(self) -> bool:
        """Whether all ranks have ended their scripts."""
        return len(self._ended) == len(self._entered)

    def enter(self, rank: int) -> bool:
        """Note that a rank enters a collective. Return whether all ranks have entered it now."""
        before = min(self._entered)
        self._entered[rank] += 1
        return min(self._entered) > before

    def train(self, rank: int) -> None:
        """Note that a rank trains a step, so it is in no collective."""
        self._entered[rank] = min(self._entered)

    def end(self, rank: int) -> None:
        """Note that a rank has ended its script."""
        self._ended.add(rank)
