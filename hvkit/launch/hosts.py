"""The hosts that ranks are started on."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """A host and how many ranks may run there.

    Attributes:
        name: its name or its IPv4 or IPv6 address, without brackets.
        slots: ranks that it takes; ``None`` where that is left to the launcher, as for a bare
            name in a hostfile (Open MPI then counts the host's cores).
        max_slots: ranks that it takes at the very most; ``None`` for no limit.
        user: who logs in there; ``None`` for the user of this process.
    """

    name: str
    slots: int | None = None
    max_slots: int | None = None
    user: str | None = None
