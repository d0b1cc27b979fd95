"""Which samples of an epoch are this rank's, a loader's position, and random numbers in common.

An epoch has one order, the same on every rank. With batch size B and N ranks, step k has the
positions from k*B*N to (k+1)*B*N of that order, and rank r takes those at r, r+N, r+2N, ...
One process with batch size B*N would read the same samples in this step.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
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
        exact: every sample is on exactly one rank, so parts may differ by one. Otherwise all parts
            have the same length, and some samples are repeated to reach it.
    """

    rank: int
    size: int
    exact: bool = False

    def of(self, length: int, *, group: int | None = None, drop_last: bool = False) -> Positions:
        """This rank's positions among ``length`` positions, in order.

        Args:
            length: the number of samples to divide.
            group: samples of one step on all ranks together; a multiple of the size. An incomplete
                last step repeats its own samples. By default all samples are one step.
            drop_last: leave out an incomplete last step; ignored with ``exact``.
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
        """The number of positions that ``of`` returns."""
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
    """A seed of 63 bits, computed from several numbers, none negative: seed, epoch, rank, ..."""
    state: Any = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1


class Position:
    """How far a loader has come: epochs done, and samples read of the current one by all ranks."""

    def __init__(self) -> None:
        self.epoch = 0
        self.samples = 0
        self._iteration: object | None = None
        self._left = False

    def begin(self) -> object:
        """Begin an iteration: the rest of the current epoch after a load, else a new epoch.

        Returns:
            An identifier for ``advance``, ``end`` and ``leave``, which do nothing
            unless it is that of the latest iteration.
        """
        if self._iteration is not None:
            self.epoch, self.samples = self.epoch + 1, 0
        self._iteration, self._left = object(), False
        return self._iteration

    def advance(self, iteration: object, samples: int) -> None:
        """Count samples that all ranks together have read."""
        if iteration is self._iteration:
            self.samples += samples

    def end(self, iteration: object) -> None:
        """Count the epoch as done."""
        if iteration is self._iteration:
            self.epoch, self.samples, self._iteration = self.epoch + 1, 0, None

    def leave(self, iteration: object) -> None:
        """Note that a loop left the epoch before its end."""
        self._left = self._left or iteration is self._iteration

    def end_if_left(self) -> None:
        """Count the epoch as done if a loop left it."""
        if self._left:
            self.end(self._iteration)
            self._left = False

    def save(self) -> dict[str, int]:
        """The position, for ``load``."""
        return {"epoch": self.epoch, "samples": self.samples}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position that was saved.

        Raises:
            ValueError: ``save`` did not return it.
        """
        for name in ("epoch", "samples"):
            value = state.get(name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(
                    "the state of a loader must be what its state_dict() returned, "
                    f"{{'epoch': int, 'samples': int}}; got {dict(state)!r}"
                )
        self.epoch, self.samples = state["epoch"], state["samples"]
        self._iteration, self._left = None, False


class Queue:
    """Numbers of batches that each go to the rank that wants one next, so fast ranks take more.

    The parameter server hands them out. Every rank must make its queues in the same order.
    """

    _made = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._made)

    def take(self, iteration: int) -> int:
        """Take the next batch, and return its number, which is beyond the end if none is left.

        Args:
            iteration: each rank's count of its iterations over the data.
        """
        # Only ranks with a parameter server need it.
        from hvkit.adapters.weight_exchange import take_batch

        return take_batch(self._number, iteration)

    def next(self, iteration: int) -> int:
        """The number of the batch that is taken next."""
        from hvkit.adapters.weight_exchange import take_batch

        return take_batch(self._number, iteration, 0)


class FixedRandomness:
    """Makes code draw the same random numbers on every rank.

    Inside it, the global generators of Python, NumPy and PyTorch start from a seed. On exit they
    get back their earlier state. Entering it again continues the numbers where it was left.

    Args:
        seed: a seed of 63 bits.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._inside: Any = None

    def __enter__(self) -> None:
        self._outside = _state()
        if self._inside is None:
            _start(self._seed)
        else:
            _restore(self._inside)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside = _state()
        _restore(self._outside)


def _start(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(seed)


def _state() -> tuple[Any, Any, Any]:
    torch = sys.modules.get("torch")
    of_torch = None if torch is None else torch.get_rng_state()
    return random.getstate(), np.random.get_state(), of_torch


def _restore(state: tuple[Any, Any, Any]) -> None:
    of_python, of_numpy, of_torch = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    if of_torch is not None:
        sys.modules["torch"].set_rng_state(of_torch)
