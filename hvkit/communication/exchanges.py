"""Requests for collectives and messages, which compressions and strategies yield.

Every rank yields the same ones. ``collectives/wire.py`` of each port carries them out, and sends
the result back into the generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any
"""A tensor of PyTorch or TensorFlow: it has ``+ - * / @``, comparisons and slices."""


class Place(Protocol):
    """This rank's place among the ranks."""

    rank: int
    size: int


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
