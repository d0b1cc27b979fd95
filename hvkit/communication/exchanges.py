"""Requests for collectives and messages, which compressions and strategies yield.

Every rank yields the same ones. ``RunningExchanges`` has a framework carry them out, and sends the
results back into the generator.

``chunks`` decides how many messages carry gradients or weights. A few are enough to send the first
while backward computes the rest; each further one costs another negotiation between the ranks.
Large models get more, because nothing is left to compute behind the last one: it must stay short.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Generic, Protocol, TypeVar

Tensor = Any  # a tensor of PyTorch or TensorFlow: it has ``+ - * / @``, comparisons and slices


class Ranks(Protocol):
    """The ranks that exchange something, and this one's number among them; a ``Group`` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Mean:
    """The mean over ranks of a float vector."""

    vector: Tensor


@dataclass(frozen=True)
class Gather:
    """All ranks' rows in one matrix, in rank order: an allgather."""

    rows: Tensor


@dataclass(frozen=True)
class AllToAll:
    """This rank's part of every rank's rows, in rank order, of which there are equally many."""

    rows: Tensor


@dataclass(frozen=True)
class Messages:
    """Messages between single ranks; the result is the rows sent to this one, in rank order.

    ``sent`` and ``received`` are numbers of rows, by rank; ``rows`` has those to ranks 0, 1, ...
    """

    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


# A collective, or messages, with a tensor as its result.
Exchange = Mean | Gather | AllToAll | Messages


# Starts an exchange of some name, and returns what waits for its result.
Start = Callable[[Exchange, str], Callable[[], Tensor]]

Result = TypeVar("Result")


class RunningExchanges(Generic[Result]):
    """The exchanges of a generator, one after the other; making this starts the first.

    No other generator's exchanges that run at the same time may have the same name. ``waiting``
    waits for the exchange that runs, and is None after the last one.
    """

    def __init__(self, start: Start, flow: Generator[Exchange, Tensor, Result], name: str) -> None:
        self.waiting: Callable[[], Tensor] | None = None
        self._flow = flow
        self._start = start
        self._name = name
        self._count = 0
        self._result: Result
        self._send(None)

    def next(self) -> None:
        """Wait for the exchange that runs, and start the one after it."""
        assert self.waiting is not None
        self._send(self.waiting())

    def result(self) -> Result:
        """Wait for all exchanges; return what the generator returns."""
        while self.waiting is not None:
            self.next()
        return self._result

    def _send(self, answer: Tensor) -> None:
        try:
            exchange = self._flow.send(answer)
        except StopIteration as end:
            self.waiting, self._result = None, end.value
        else:
            self.waiting = self._start(exchange, f"{self._name}.{self._count}")
            self._count += 1


@dataclass(frozen=True)
class Neighbours:
    """An exchange of equally long vectors with some ranks; the result is a list, by offset.

    The ranks are in a circle: this one sends to those so many positions after it, and receives from
    those as many before it.
    """

    vector: Tensor
    offsets: tuple[int, ...]


def circle(offsets: Sequence[int], group: Ranks) -> tuple[list[int], list[int]]:
    """The ranks that this one sends to with ``Neighbours``, and those that it receives from."""
    rank, size = group.rank, group.size
    return [(rank + o) % size for o in offsets], [(rank - o) % size for o in offsets]


def by_rank(length: int, ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """For ``Messages``: ``length`` rows for each of these ranks, none for the others."""
    return tuple(length if rank in ranks else 0 for rank in range(size))


# Sizes in bytes.
_MOST_CHUNKS_OF_SMALL_MODELS = 4
_SMALLEST = 1 << 20
# A GPU computes the rest before the host has sent a small one.
_SMALLEST_ON_GPU = 8 << 20
_LARGEST = 32 << 20


def chunks(sizes: Sequence[int], *, on_gpu: bool = False) -> list[list[int]]:
    """Cut gradients of so many bytes, in the order of backward, into runs of positions to send."""
    smallest = _SMALLEST_ON_GPU if on_gpu else _SMALLEST
    target = min(max(-(-sum(sizes) // _MOST_CHUNKS_OF_SMALL_MODELS), smallest), _LARGEST)
    return _cut(range(len(sizes)), sizes, target)


def chunks_by_owner(
    sizes: Sequence[int], owners: Sequence[int], ranks: int
) -> list[list[list[int]]]:
    """The positions that each rank sends, by chunk, of up to 32 MiB of all ranks together."""
    runs = []
    for rank in range(ranks):
        owned = [position for position, owner in enumerate(owners) if owner == rank]
        runs.append(_cut(owned, sizes, _LARGEST // ranks))
    return [[run or [] for run in chunk] for chunk in zip_longest(*runs)]


def _cut(positions: Iterable[int], sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut positions into runs, each of at most ``most`` bytes in all or of one position."""
    runs: list[list[int]] = []
    filled = 0
    for position in positions:
        if not runs or filled + sizes[position] > most:
            runs.append([])
            filled = 0
        runs[-1].append(position)
        filled += sizes[position]
    return runs
