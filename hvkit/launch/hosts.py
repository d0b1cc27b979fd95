"""The hosts that ranks are started on.

The words of hostfiles: host names, addresses, users and numbers.

Errors raised here say what is wrong with the word; who reads the file adds where it stands.

The hosts of a file as they were named, and each of them once.

Hosts on a command line: ``-H node1:2,node2:2``, as of mpirun and horovodrun.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvkit.errors import HostfileError, LaunchError


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


# A label as in RFC 1123. Underscores are no part of it, but names of containers have them, and
# resolvers and launchers take them.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST_NAME = 253
# What Open MPI reads before the @; it cuts a name with a dot off and takes the start for the host.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
# Open MPI counts in 32 bits and wraps around without a word. No host has so many.
_MOST_SLOTS = 65_535
_LONGEST_SHOWN = 60


@dataclass(frozen=True)
class HostWord:
    """A word that names a host.

    Attributes:
        name: host name or address, without brackets.
        user: what stood before the ``@``.
        slots: what stood after the colon, as in MPICH's ``node1:4``, unread.
    """

    name: str
    user: str | None
    slots: str | None


def shown(text: str) -> str:
    """The text in quotes, cut if it is long."""
    return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")


def count(text: str, keyword: str) -> int:
    """The positive integer that ``keyword`` is set to.

    Raises:
        HostfileError: it is none, or more than any host has.
    """
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal() and digits):
        raise HostfileError(f"{keyword} must be a positive integer, got {shown(text)}")
    if len(digits) > len(str(_MOST_SLOTS)) or int(digits) > _MOST_SLOTS:
        raise HostfileError(f"{keyword} must be at most {_MOST_SLOTS}, got {shown(text)}")
    return int(digits)


def host_word(word: str) -> HostWord:
    """Take ``[user@]host[:slots]`` apart; the host is a name, an IPv4 or an IPv6 address.

    Raises:
        HostfileError: it is nothing of the kind.
    """
    _refuse_other_syntax(word)
    user, at, place = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise HostfileError(
            f"{shown(word)} has no valid user before the @ (letters, digits, _ and -): leave the "
            "user out and set User for this host in ~/.ssh/config"
        )
    name, slots = _split(place, word)
    if not name:
        raise HostfileError(f"{shown(word)} names no host")
    return HostWord(host_name(name), user or None, slots)


def host_name(name: str) -> str:
    """The host name or address, checked; an IPv6 address in its shortest form.

    Raises:
        HostfileError: it is neither.
    """
    if ":" in name:
        return _ipv6(name)
    labels = name.split(".")
    if labels[-1].isdecimal():
        return _ipv4(name)
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise HostfileError(
            f"{shown(name)} is not a host name: letters, digits, - and _ in parts of at most 63 "
            "between dots, no - at a part's start or end"
        )
    return name


def _split(place: str, word: str) -> tuple[str, str | None]:
    """Host and unread slots of what stands after the user."""
    if place.startswith("["):
        inside, bracket, rest = place[1:].partition("]")
        if not bracket or ":" not in inside or (rest and not rest.startswith(":")):
            raise HostfileError(
                f"{shown(word)}: brackets are for IPv6 addresses, as in [fd00::1] or [fd00::1]:4"
            )
        return inside, rest[1:] if rest else None
    if place.count(":") == 1:
        name, _, slots = place.partition(":")
        return name, slots
    return place, None


def _refuse_other_syntax(word: str) -> None:
    """What launchers, schedulers and shells write beside plain names, each with what to do."""
    if word.startswith("+"):
        raise HostfileError(
            f"{shown(word)} means a host by its place in another list, which hvkit does not read: "
            "write the host's name"
        )
    if word.startswith("^"):
        raise HostfileError(f"{shown(word)} takes a host out of another list: leave its line out")
    if word.startswith(("//", "/*")):
        raise HostfileError(f"{shown(word)}: a comment starts with #")
    if "'" in word or '"' in word:
        raise HostfileError(f"{shown(word)}: write names and numbers without quotes")
    if "," in word:
        raise HostfileError(f"{shown(word)}: write each host on a line of its own, without commas")
    if re.search(r"[^@]\[", word):
        raise HostfileError(
            f"{shown(word)}: ranges are not expanded here, write a line for each host"
        )


def _ipv4(name: str) -> str:
    try:
        return str(ipaddress.IPv4Address(name))
    except ValueError:
        raise HostfileError(
            f"{shown(name)} is neither an IPv4 address (four numbers up to 255) nor a host name "
            "(the last part of which has a letter)"
        ) from None


def _ipv6(name: str) -> str:
    if "%" in name:
        raise HostfileError(
            f"{shown(name)} holds on one link of this host only: write an address without %, or "
            "the host's name"
        )
    try:
        return str(ipaddress.IPv6Address(name))
    except ValueError:
        raise HostfileError(
            f"{shown(name)} is not an IPv6 address; with slots it is written [fd00::1]:4"
        ) from None


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


_NAME = "-H"


def read_hosts_option(text: str) -> tuple[Entry, ...]:
    """The hosts of such a list as they are named there.

    A host without ``:slots`` is one slot. IPv6 addresses stand in brackets, ``[fd00::1]:2``.

    Raises:
        HostfileError: it is not such a list; the message says which host is wrong.
    """
    return tuple(
        Entry(f"host {number}", _host(word.strip(" "), f"host {number}"))
        for number, word in enumerate(text.split(","), start=1)
    )


def hosts_option(hosts: Sequence[Host]) -> str:
    """The list that stands for ``hosts``; IPv6 addresses in brackets. It has no ``max_slots``.

    Raises:
        LaunchError: a host has no number of slots.
    """
    return ",".join(f"{_address(host)}:{slots_of(host)}" for host in hosts)


def slots_of(host: Host) -> int:
    """The host's slots, where they have to be written.

    Raises:
        LaunchError: the host has none.
    """
    if host.slots is None:
        raise LaunchError(f"{host.name} has no number of slots: add slots=N to it in the hostfile")
    return host.slots


def _address(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}" if host.user else name


def _host(word: str, place: str) -> Host:
    try:
        if not word:
            raise HostfileError("is empty: write host:slots between the commas")
        if "=" in word or " " in word:
            raise HostfileError(f"must be host:slots, got {shown(word)}")
        host = host_word(word)
        slots = 1 if host.slots is None else count(host.slots, "slots")
    except HostfileError as error:
        raise HostfileError(f"{_NAME}: {place}: {error}") from None
    return Host(host.name, slots, user=host.user)
