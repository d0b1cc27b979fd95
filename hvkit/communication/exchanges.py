"""Requests for collectives and messages, which compressions and strategies yield.

Every rank yields the same ones. ``RunningExchanges`` has a framework carry them out, and sends the
results back into the generator.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Tensor = Any
"""A tensor of PyTorch or TensorFlow: it has ``+ - * / @``, comparisons and slices."""


class Place(Protocol):
    """This rank's place among the ranks."""

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
class Shares:
    """This rank's share of every rank's rows, in rank order: an all-to-all of equal parts.

    The number of rows is a multiple of the number of ranks.
    """

    rows: Tensor


@dataclass(frozen=True)
class Messages:
    """Messages between single ranks; the result is the rows sent to this one, in rank order.

    Attributes:
        rows: of shape (sum of ``sent``, ...), the messages to ranks 0, 1 and so on.
        sent: by rank, how many rows go there.
        received: by rank, how many rows come from there.
    """

    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


Exchange = Mean | Gather | Shares | Messages
"""A collective, or messages, with a tensor as its result."""


Start = Callable[[Exchange, str], Callable[[], Tensor]]
"""Starts an exchange of some name, and returns what waits for its result."""

Result = TypeVar("Result")


class RunningExchanges(Generic[Result]):
    """The exchanges of a generator, one after the other; making this starts the first.

    Args:
        start: starts each.
        flow: yields exchanges, and is sent their results.
        name: the same on every rank, and no other generator's whose exchanges run at the same time.

    Attributes:
        waiting: waits for the exchange that runs; None after the last one.
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
    """An exchange of vectors with some ranks; the result is a list, by offset.

    Attributes:
        vector: of the same shape on every rank.
        offsets: with the ranks in a circle, this rank sends its vector to those so many places
            after it, and receives the vectors of those as many places before it.
    """

    vector: Tensor
    offsets: tuple[int, ...]


def circle(offsets: Sequence[int], place: Place) -> tuple[list[int], list[int]]:
    """The ranks that this one sends to with ``Neighbours``, and those that it receives from.

    No offset is a multiple of the number of ranks.
    """
    rank, size = place.rank, place.size
    return [(rank + o) % size for o in offsets], [(rank - o) % size for o in offsets]


def by_rank(length: int, ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """For ``Messages``: ``length`` rows for each of these ranks, none for the others."""
    return tuple(length if rank in ranks else 0 for rank in range(size))
