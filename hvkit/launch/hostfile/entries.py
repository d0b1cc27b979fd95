"""The hosts of a file as they were named, and each of them once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvkit.errors import HostfileError
from hvkit.launch.hosts import Host


@dataclass(frozen=True)
class Entry:
    """A host as it was named in one place.

    Attributes:
        place: ``line 3`` of a file, or ``host 2`` of a list.
        host: what is said there.
    """

    place: str
    host: Host


def repeated(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """The hosts that were named more than once, with the places.

    Open MPI takes a host that stands on several lines only where no more than one of them has
    ``slots=``.
    """
    return {
        group[0].host.name: tuple(entry.place for entry in group)
        for group in _grouped(entries)
        if len(group) > 1
    }


def merged(entries: Sequence[Entry], name: str) -> tuple[Host, ...]:
    """Each host once, in the order of first mention; slots of several mentions are added.

    A bare name counts as one slot where its host is named again; named once, it keeps
    ``slots=None``.

    Args:
        entries: the hosts as they were named.
        name: of the file or the list, for errors.

    Raises:
        HostfileError: the places disagree about the user or about ``max_slots``, or the slots
            add up to more than ``max_slots``.
    """
    return tuple(_merge(group, name) for group in _grouped(entries))


def _grouped(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        # Names of hosts are the same in capitals.
        groups.setdefault(entry.host.name.lower(), []).append(entry)
    return list(groups.values())


def _merge(group: list[Entry], name: str) -> Host:
    first = group[0]
    if len(group) == 1:
        return first.host
    slots = sum(1 if entry.host.slots is None else entry.host.slots for entry in group)
    most = None
    for entry in group:
        if entry.host.user != first.host.user:
            raise HostfileError(
                f"{name}: {entry.place}: {first.host.name} has the user {entry.host.user!r} here "
                f"and {first.host.user!r} in {first.place}: name one"
            )
        if entry.host.max_slots is not None:
            if most not in (None, entry.host.max_slots):
                raise HostfileError(
                    f"{name}: {entry.place}: {first.host.name} has max_slots="
                    f"{entry.host.max_slots} here and {most} before: name one"
                )
            most = entry.host.max_slots
    if most is not None and slots > most:
        raise HostfileError(
            f"{name}: {group[-1].place}: the slots of {first.host.name} add up to {slots}, more "
            f"than its max_slots={most}"
        )
    return replace(first.host, slots=slots, max_slots=most)
