"""What compressions and strategies may ask of the other ranks; every rank asks for the same.

``collectives/wire.py`` of each port carries it out.
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
    """Asks for the mean over ranks of a float vector."""

    vector: Tensor


@dataclass(frozen=True)
class Gather:
    """Asks for all ranks' rows below each other, in rank order."""

    rows: Tensor


@dataclass(frozen=True)
class Shares:
    """Asks for this rank's share of every rank's rows, in rank order.

    The number of rows is a multiple of the number of ranks.
    """

    rows: Tensor


@dataclass(frozen=True)
class Messages:
    """Asks for messages between single ranks, and gets those to this one in rank order.

    Attributes:
        rows: of shape (sum of ``sent``, ...), the messages to ranks 0, 1 and so on.
        sent: by rank, how many rows go there.
        received: by rank, how many rows come from there.
    """

    rows: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


Exchange = Mean | Gather | Shares | Messages
"""A collective, or messages; whoever asks for it gets the result."""


@dataclass(frozen=True)
class Neighbours:
    """Asks for the vectors of single ranks, which get this rank's; a list, by offset.

    Attributes:
        vector: of the same shape on every rank.
        offsets: the vector goes to the ranks so many places after this one, counted in a circle,
            and those of the ranks as many places before it come.
    """

    vector: Tensor
    offsets: tuple[int, ...]


def circle(offsets: Sequence[int], place: Place) -> tuple[list[int], list[int]]:
    """The ranks some places after this one, which it sends to, and those as many before it.

    Args:
        offsets: how many places, in the order of the results; no multiple of the size.
        place: of this rank.
    """
    rank, size = place.rank, place.size
    return [(rank + o) % size for o in offsets], [(rank - o) % size for o in offsets]


def by_rank(length: int, ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """For ``Messages``: this many rows for some ranks, none for the others."""
    return tuple(length if rank in ranks else 0 for rank in range(size))
