"""How many ranks, and on how many hosts: the same for every system."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """Ranks, and how many of them a host takes at most.

    The last host may have fewer ranks than the others, as with ``mpirun``. It is given what all of
    its slots need nevertheless: both systems describe all hosts at once.

    Attributes:
        ranks: the number of ranks.
        slots: ranks per host, at most.
    """

    ranks: int
    slots: int

    @classmethod
    def of(cls, ranks: int, slots: int) -> "Size":
        """The size for so many ranks; a host has no more slots than there are ranks."""
        return cls(ranks, min(slots, ranks))

    @property
    def hosts(self) -> int:
        """As few hosts as have slots for all ranks."""
        return -(-self.ranks // self.slots)

    @property
    def idle(self) -> int:
        """Slots of the last host that have no rank."""
        return self.hosts * self.slots - self.ranks
