"""Which samples of an epoch are this rank's: plain arithmetic on positions.

An epoch has one order, the same on every rank. With batch size B and N ranks, step k is made of
the positions from k*B*N to (k+1)*B*N of that order, and rank r takes those at r, r+N, r+2N, ...
That is what one process with batch size B*N would read in this step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Share:
    """One rank's share of every step.

    Args:
        rank: this rank.
        size: the number of ranks.
        exact: every sample on exactly one rank, so that parts differ by one; otherwise parts are
            of one length, and where samples are missing some come twice.
    """

    rank: int
    size: int
    exact: bool = False

    def of(self, length: int, *, group: int | None = None, drop_last: bool = False) -> Positions:
        """This rank's positions among ``length`` ones, in order.

        Args:
            length: the number of samples to be divided.
            group: samples of one step on all ranks together; a multiple of the size. What the
                last step lacks is repeated from that step. By default all are one step.
            drop_last: leave out a last step that is not complete; not with ``exact``.
        """
        if self.exact:
            return np.arange(self.rank, length, self.size, dtype=np.int64)
        if drop_last and group:
            length -= length % group
        if length == 0:
            return np.empty(0, np.int64)
        last = (length - 1) // group * group if group else 0
        mine = self.rank + self.size * np.arange(-(-length // self.size), dtype=np.int64)
        missing = mine >= length
        mine[missing] = last + (mine[missing] - length) % (length - last)
        return mine

    def count(self, length: int, *, group: int | None = None, drop_last: bool = False) -> int:
        """How many positions :meth:`of` gives."""
        if self.exact:
            return len(range(self.rank, length, self.size))
        if drop_last and group:
            length -= length % group
        return -(-length // self.size)


def steps(length: int, group: int, *, drop_last: bool = False) -> Iterator[int]:
    """The number of samples of each step on all ranks together."""
    for start in range(0, length, group):
        if start + group <= length or not drop_last:
            yield min(group, length - start)


def seed_from(*numbers: int) -> int:
    """A seed of 63 bits from the seed, the epoch and what else; none of them negative."""
    state: Any = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1
