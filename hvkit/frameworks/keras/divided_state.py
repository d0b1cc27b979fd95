"""Optimizers whose state is divided among the ranks: what is whole, and what only a part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from hvkit.frameworks.keras.optimizers import inner_optimizer, parts_of


class Shards(Protocol):
    """What divides the state of one optimizer."""

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""

    def gathered(self) -> AbstractContextManager[None]:
        """Hold the whole state on rank 0 for a while; a collective."""

    def unfolded(self) -> AbstractContextManager[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""


# By optimizer: the innermost ones, which do the update.
_shards: WeakKeyDictionary[Any, Shards] = WeakKeyDictionary()


def remember(optimizer: Any, shards: Shards) -> None:
    """Note what divides the state of an optimizer."""
    _shards[optimizer] = shards


def shards_of(optimizer: Any) -> list[Shards]:
    """What divides the state of an optimizer, or of those inside it; empty if it is whole."""
    return [_shards[part] for part in parts_of(inner_optimizer(optimizer)) if part in _shards]


def ids_of_slots(optimizers: Sequence[Any]) -> set[int]:
    """The ids of the optimizers' variables that differ between ranks."""
    return {id(v) for each in optimizers for shards in shards_of(each) for v in shards.slots()}


@contextmanager
def gathered(optimizer: Any) -> Iterator[None]:
    """Hold an optimizer's whole state on rank 0 for a while; a collective if it is divided."""
    with ExitStack() as stack:
        for shards in shards_of(optimizer):
            stack.enter_context(shards.gathered())
        yield


@contextmanager
def unfolded(optimizer: Any) -> Iterator[None]:
    """Have room for an optimizer's whole state for a while, to load it."""
    with ExitStack() as stack:
        for shards in shards_of(optimizer):
            stack.enter_context(shards.unfolded())
        yield
