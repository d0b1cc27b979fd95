"""Which samples of an epoch are this rank's, seeds, and a loader's position.

An epoch has one order, the same on every rank. With batch size B and N ranks, step k has the
positions from k*B*N to (k+1)*B*N of that order, and rank r takes those at r, r+N, r+2N, ...
One process with batch size B*N would read the same samples in this step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Split:
    """One of as many equal parts of each step as there are ranks."""

    rank: int
    size: int
    exact: bool = False
    """Whether every sample is on exactly one rank, so that parts may differ by one. Otherwise some
    are repeated, so that all parts have the same length."""

    def of(self, length: int) -> slice | Positions:
        """This rank's positions among ``length`` positions, in order: a slice if none repeats."""
        if self.exact or length % self.size == 0:
            return slice(self.rank, length, self.size)
        positions = self.rank + self.size * np.arange(self.count(length), dtype=np.int64)
        missing = positions >= length
        positions[missing] = (positions[missing] - length) % max(length, 1)
        return positions

    def in_order(self, length: int) -> range:
        """As many positions that follow each other; past the end they begin again at the first."""
        if self.exact:
            return range(self.rank * length // self.size, (self.rank + 1) * length // self.size)
        return range(self.rank * self.count(length), (self.rank + 1) * self.count(length))

    def count(self, length: int, *, group: int | None = None, drop_last: bool = False) -> int:
        """The number of this rank's positions among ``length`` positions.

        With ``drop_last``, but not with ``exact``, an incomplete last step is left out; ``group``
        is the number of samples of a step on all ranks together.
        """
        if self.exact:
            return len(range(self.rank, length, self.size))
        if drop_last and group:
            length -= length % group
        return -(-length // self.size)


def seed_from(*numbers: int) -> int:
    """A seed of 63 bits, computed from several numbers, none negative: seed, epoch, rank, ..."""
    state: Any = np.random.SeedSequence(numbers).generate_state(1, np.uint64)
    return int(state[0]) >> 1


class Position:
    """A loader's position: epochs done, and samples of the current one that all ranks have read."""

    def __init__(self) -> None:
        self.epoch = 0
        self.samples = 0
        self.random: dict[str, str] = {}
        """The generators' states at the beginning of the epoch, as text; empty with a seed."""
        self._iteration: object | None = None
        self._left = False

    def begin(self) -> object:
        """Begin an iteration: the rest of the current epoch after a load, else a new epoch.

        Returns an identifier for ``advance``, ``end`` and ``reading``, which do nothing unless it
        is that of the latest iteration.
        """
        if self._iteration is not None:
            self._next_epoch()
        self._iteration, self._left = object(), False
        return self._iteration

    def advance(self, iteration: object, samples: int) -> None:
        if iteration is self._iteration:
            self.samples += samples

    def end(self, iteration: object) -> None:
        if iteration is self._iteration:
            self._next_epoch()
            self._iteration = None

    @contextmanager
    def reading(self, iteration: object) -> Iterator[None]:
        """Within, in a generator: the rest of an iteration. Notes if a loop leaves it."""
        try:
            yield
        except GeneratorExit:
            self._left = self._left or iteration is self._iteration
            raise
        self.end(iteration)

    def end_if_left(self) -> None:
        if self._left:
            self.end(self._iteration)
            self._left = False

    def _next_epoch(self) -> None:
        self.epoch, self.samples, self.random = self.epoch + 1, 0, {}

    def save(self) -> dict[str, Any]:
        position = {"epoch": self.epoch, "samples": self.samples}
        return position | ({"random": dict(self.random)} if self.random else {})

    def load(self, state: Mapping[str, Any]) -> None:
        """Go to a position; ValueError if ``save`` did not return it."""
        counts, random = [state.get(name) for name in ("epoch", "samples")], state.get("random", {})
        if not all(isinstance(each, int) and each >= 0 for each in counts) or not (
            isinstance(random, Mapping) and all(isinstance(each, str) for each in random.values())
        ):
            raise ValueError(
                "the state of a loader must be what its state_dict() returned, "
                f"{{'epoch': int, 'samples': int}}; got {dict(state)!r}"
            )
        self.epoch, self.samples = state["epoch"], state["samples"]
        self.random = dict(random)
        self._iteration, self._left = None, False


class WithPosition:
    """Data whose position a checkpoint saves."""

    _position: Position

    def end_epoch(self) -> None:
        """Count an epoch that a loop left with ``break`` as done, as the next loop would."""
        self._position.end_if_left()

    def state_dict(self) -> dict[str, Any]:
        """The position: epochs done, and samples of this epoch that all ranks have read.

        Without a seed, also the generators' states at the beginning of this epoch.
        """
        return self._position.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that ``state_dict`` returned: the next iteration ends its epoch."""
        self._position.load(state)


class Queue:
    """Numbers of batches, each for the rank that requests the next one, so fast ranks get more.

    The parameter server distributes them. Every rank must make its queues in the same order.
    """

    _made = itertools.count()

    def __init__(self) -> None:
        self._number = next(self._made)

    def take(self, iteration: int, batches: int = 1) -> int:
        """Take the next batch in this rank's n-th iteration; too large a number if none is left.

        With 0 ``batches`` it only returns the number of the batch that is taken next.
        """
        # Imported here, since only ranks with a parameter server need it.
        from hvkit.sync.parameter_server_client import take_batch

        return take_batch(self._number, iteration, batches)
