"""The weights that ranks would agree on now, shown for a while.

While they are shown, the model holds them, and this rank's own weights wait aside.
"""

from __future__ import annotations

import atexit
import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from hvkit.communication import collectives
from hvkit.communication.group import Group, all_ranks
from hvkit.errors import RankLostError, RanksDisagreeError
from hvkit.watch.calls import call
from hvkit.watch.rank_errors import mark_as_shown_by


class AgreedView(ABC):
    """What ``hvkit.settled`` needs of a model whose weights differ between ranks."""

    equal_steps: ClassVar[bool]
    """Whether all ranks must take equally many steps."""

    def __init__(self) -> None:
        self._own: list[tuple[Any, Any]] | None = None

    def arrive(self) -> None:  # noqa: B027  # not every strategy has any
        """Wait for overlapped agreements; a collective."""

    @abstractmethod
    def _compare_ranks(self) -> bool:
        """Wait for all ranks; a collective. Return whether their weights differ."""

    @abstractmethod
    def _values(self) -> list[tuple[Any, Any]]:
        """Everything that an agreement changes, and a copy of its value."""

    @abstractmethod
    def _set_values(self, values: list[tuple[Any, Any]]) -> None:
        """Set what ``_values`` returned."""

    @abstractmethod
    def _show_agreed(self) -> None:
        """Set the weights that the ranks would agree on now; training goes on. A collective."""

    @property
    def shown(self) -> bool:
        """Whether the model holds the agreed weights for a while."""
        return self._own is not None

    def show(self) -> bool:
        """Show the agreed weights; a collective. Return whether they were not shown already."""
        if self.shown:
            return False
        differ = self._compare_ranks()
        self._own = self._values()
        try:
            if differ:
                self._show_agreed()
        except BaseException:
            self.put_back()
            raise
        return True

    def put_back(self) -> None:
        """Hold this rank's own weights again."""
        if self._own is not None:
            self._set_values(self._own)
            self._own = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the weights that the ranks would agree on now; put this rank's own back after it."""
        first = self.show()
        try:
            yield
        finally:
            if first:
                self.put_back()

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Hold this rank's own weights for a while, inside ``settled``."""
        if self._own is None:
            yield
            return
        own, self._own, agreed = self._own, None, self._values()
        self._set_values(own)
        try:
            yield
        finally:
            self._set_values(agreed)
            self._own = own

    def refuse_step(self) -> None:
        """Raise if the agreed weights are shown: they go away when the block ends."""
        if self.shown:
            raise ValueError(
                "an optimizer steps inside hvkit.settled, which puts each rank's own weights back "
                "at its end: train outside of the block"
            )


class OverlapsTraining(Protocol):
    """What lets agreements overlap with training."""

    def arrive(self) -> None:
        """Wait for them; a collective."""


# In the order in which they began, the same on all ranks.
_overlapping: WeakKeyDictionary[OverlapsTraining, None] = WeakKeyDictionary()


def arrive_before_exit(keeper: OverlapsTraining) -> None:
    """Wait at the end of the script: Horovod ends on all ranks with the first that ends."""
    _overlapping[keeper] = None
    _register()


@functools.cache
def _register() -> None:
    # Registered after Horovod's own function and the watcher's, so it runs before them.
    atexit.register(_arrive)


def _arrive() -> None:
    if getattr(sys, "last_value", None) is None:  # this rank has not failed
        with suppress(RankLostError), call("the end of the script"):
            for keeper in list(_overlapping):
                keeper.arrive()


def require_equal_steps(mine: Sequence[int], group: Group | None = None) -> None:
    """Meet the other ranks in ``hvkit.settled``; a collective.

    Args:
        mine: this rank's steps since the last agreement, for each optimizer.
        group: the ranks that take part; None for all.

    Raises:
        RanksDisagreeError: the ranks have taken different numbers of steps.
    """
    group = group or all_ranks()
    steps = collectives.gather("hvkit.settled", list(mine), group)
    for rank, theirs in zip(group.members, steps, strict=True):
        if theirs != steps[0]:
            error = RanksDisagreeError(
                f"rank {rank} has taken {sum(theirs)} steps since the last agreement, rank "
                f"{group.first} {sum(steps[0])}: every rank must take equally many; "
                "hvkit.shard(data) gives each as many batches"
            )
            raise mark_as_shown_by(error, group.first)
