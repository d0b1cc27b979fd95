"""The ranks that do something together: all of them, or some, such as a row of a device mesh.

Whatever counts ranks, averages over them or names them takes a ``Group``: that of ``all_ranks()``,
or a smaller one, which ``hvkit.mesh.divide`` makes.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from hvkit import runtime
from hvkit.transport.engines import Engine, ProcessSet


@dataclass(frozen=True)
class Group:
    """Ranks that train together, one of which is this process."""

    rank: int  # this process's number among the members, from 0
    # Their numbers among all ranks, in ascending order. Errors and logs use these.
    members: tuple[int, ...]
    # None for all ranks, and for a single one, which sends nothing.
    process_set: ProcessSet | None = field(default=None, repr=False)
    # Whose Horovod has the process set, ``"torch"`` or ``"tensorflow"``.
    framework: str = field(default="", repr=False)

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def first(self) -> int:
        """The member whose weights all others get, and which logs for them."""
        return self.members[0]

    @property
    def is_all_ranks(self) -> bool:
        return self.size == runtime.size()

    @property
    def engine(self) -> Engine:
        """The Horovod that sends what is not a tensor of a framework."""
        return runtime.engine(self.framework) if self.framework else runtime.any_engine()

    def numbered(self, prefix: str) -> str:
        """A new name for collectives: ``hvkit.0``, then ``hvkit.1``; the same on every member.

        All members must request the names with a prefix in the same order. Each group counts
        separately, and its number is part of its names: ``hvkit.set1.0``.
        """
        within = f".set{self.process_set.process_set_id}" if self.process_set else ""
        return f"{prefix}{within}.{next(_numbers[self.members, prefix])}"


_numbers: defaultdict[tuple[tuple[int, ...], str], Iterator[int]] = defaultdict(itertools.count)


def all_ranks() -> Group:
    return Group(runtime.rank(), tuple(range(runtime.size())))
