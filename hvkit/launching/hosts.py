"""Hosts and their slots: host names and addresses, the list of ``-H``, and hosts named twice.

``hvkit.launching.hostfile`` reads whole files with the functions of this module. Ambiguous input is
rejected. Errors about a word do not say where it stands; the reader of the file or list adds that.
"""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvkit.errors import HostfileError, UsageError

# A label as in RFC 1123, and with underscores: names of containers have them, and resolvers and
# launchers accept them.
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_LONGEST_NAME = 253
# The users that Open MPI reads right. It cuts a user with a dot off and takes the start for the
# host.
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*")
# Open MPI counts in 32 bits and overflows silently. No host has this many slots.
_MOST_SLOTS = 65_535
_LONGEST_SHOWN = 60
# The syntax of other launchers, schedulers and shells, with the fix for each.
_OTHER_SYNTAX = (
    (
        r"^\+",
        " names a host by its position in another list, which hvkit does not read: write the "
        "host's name",
    ),
    (r"^\^", " excludes a host from another list: delete its line"),
    (r"^//|^/\*", ": a comment starts with #"),
    (r"""['"]""", ": write names and numbers without quotes"),
    (r",", ": write each host on its own line, without commas"),
    (r"[^@]\[", ": hvkit does not expand ranges: write each host"),
)


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that may run there.

    Attributes:
        name: its name or its IPv4 or IPv6 address, without brackets.
        slots: the ranks that it takes; ``None`` leaves that to the launcher, as a bare name in a
            hostfile does (Open MPI then counts the host's cores).
        max_slots: the most ranks that an oversubscribed host takes; ``None`` for no limit.
        user: the user for ssh; ``None`` for the user of this process.
    """

    name: str
    slots: int | None = None
    max_slots: int | None = None
    user: str | None = None


@dataclass(frozen=True)
class Entry:
    """One mention of a host.

    Attributes:
        position: ``line 3`` of a file, or ``host 2`` of a list.
        host: the host as this position describes it.
    """

    position: str
    host: Host


def read_hosts_option(text: str) -> tuple[Entry, ...]:
    """The hosts of ``-H node1:2,node2:2``, the list that mpirun and horovodrun take.

    A host without ``:slots`` has one slot. IPv6 addresses need brackets: ``[fd00::1]:2``.

    Raises:
        HostfileError: a host of the list is invalid; the message names its position.
    """
    return tuple(
        Entry(f"host {number}", _host_of_option(word.strip(" "), f"host {number}"))
        for number, word in enumerate(text.split(","), start=1)
    )


def hosts_option(hosts: Sequence[Host]) -> str:
    """``hosts`` as a list for ``-H``; IPv6 addresses in brackets, without ``max_slots``.

    Raises:
        UsageError: a host has no number of slots.
    """
    return ",".join(f"{_in_option(host)}:{slots_of(host)}" for host in hosts)


def slots_of(host: Host) -> int:
    """The host's slots, for a form that needs them.

    Raises:
        UsageError: the host has none.
    """
    if host.slots is None:
        raise UsageError(f"{host.name} has no number of slots: add slots=N to it in the hostfile")
    return host.slots


def repeated(entries: Sequence[Entry]) -> dict[str, tuple[str, ...]]:
    """The hosts with more than one entry, each with the positions of its entries.

    Open MPI accepts such a host only if at most one of its lines has ``slots=``.
    """
    return {
        group[0].host.name: tuple(entry.position for entry in group)
        for group in _by_host(entries)
        if len(group) > 1
    }


def merged(entries: Sequence[Entry], name: str) -> tuple[Host, ...]:
    """Each host once, in the order of first mention, with the sum of its slots.

    A bare name counts as one slot if its host has other entries; if not, it keeps ``slots=None``.

    Args:
        entries: the hosts as the file or list names them.
        name: of the file or list, for errors.

    Raises:
        HostfileError: entries of one host disagree about the user or ``max_slots``, or their slots
            add up to more than ``max_slots``.
    """
    return tuple(_merge(group, name) for group in _by_host(entries))


def host_word(word: str) -> tuple[str, str | None, str | None]:
    """Host, user and slots of ``[user@]host[:slots]``; the slots are not checked yet.

    The host is a name, an IPv4 or an IPv6 address; without brackets in what is returned.

    Raises:
        HostfileError: the word has another form.
    """
    for pattern, problem in _OTHER_SYNTAX:
        if re.search(pattern, word):
            raise HostfileError(f"{shown(word)}{problem}")
    user, at, name_and_slots = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise HostfileError(
            f"{shown(word)} has an invalid user before the @ (letters, digits, _ and - are valid): "
            "remove the user and set User for this host in ~/.ssh/config"
        )
    name, slots = _host_and_slots(name_and_slots, word)
    if not name:
        raise HostfileError(f"{shown(word)} has no host name: write HOST or USER@HOST")
    return host_name(name), user or None, slots


def host_name(name: str) -> str:
    """The valid host name or address; an IPv6 address in its shortest form.

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
            f"{shown(name)} is not a host name: use letters, digits, - and _ in parts of at most "
            "63 characters between dots; a part must not start or end with -"
        )
    return name


def count(text: str, keyword: str) -> int:
    """The positive integer in ``text``, which sets ``keyword``.

    Raises:
        HostfileError: it is no positive integer, or larger than the slots of any host.
    """
    digits = text.lstrip("0")
    if not (text.isascii() and text.isdecimal() and digits):
        raise HostfileError(f"{keyword} must be a positive integer, got {shown(text)}")
    if len(digits) > len(str(_MOST_SLOTS)) or int(digits) > _MOST_SLOTS:
        raise HostfileError(f"{keyword} must be at most {_MOST_SLOTS}, got {shown(text)}")
    return int(digits)


def shown(text: str) -> str:
    """The text in quotes for an error message, shortened if it is long."""
    return repr(text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "...")


def _host_of_option(word: str, position: str) -> Host:
    try:
        if not word:
            raise HostfileError("is empty: write host:slots between the commas")
        if "=" in word or " " in word:
            raise HostfileError(f"must be host:slots, got {shown(word)}")
        name, user, slots = host_word(word)
        return Host(name, 1 if slots is None else count(slots, "slots"), user=user)
    except HostfileError as error:
        raise HostfileError(f"-H: {position}: {error}") from None


def _in_option(host: Host) -> str:
    name = f"[{host.name}]" if ":" in host.name else host.name
    return f"{host.user}@{name}" if host.user else name


def _by_host(entries: Sequence[Entry]) -> list[list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        # Host names are not case-sensitive.
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
                f"{name}: {entry.position}: {first.host.name} has the user {entry.host.user!r} "
                f"here but {first.host.user!r} in {first.position}: use one of them"
            )
        if entry.host.max_slots is not None:
            if most not in (None, entry.host.max_slots):
                raise HostfileError(
                    f"{name}: {entry.position}: {first.host.name} has max_slots="
                    f"{entry.host.max_slots} here but {most} before: use one of them"
                )
            most = entry.host.max_slots
    if most is not None and slots > most:
        raise HostfileError(
            f"{name}: {group[-1].position}: the slots of {first.host.name} add up to {slots}, more "
            f"than its max_slots={most}: lower the slots, or raise max_slots"
        )
    return replace(first.host, slots=slots, max_slots=most)


def _host_and_slots(name_and_slots: str, word: str) -> tuple[str, str | None]:
    """The host and the text of the slots in the part after the user."""
    if name_and_slots.startswith("["):
        inside, bracket, rest = name_and_slots[1:].partition("]")
        if not bracket or ":" not in inside or (rest and not rest.startswith(":")):
            raise HostfileError(
                f"{shown(word)}: brackets are for IPv6 addresses, as in [fd00::1] or [fd00::1]:4"
            )
        return inside, rest[1:] if rest else None
    if name_and_slots.count(":") == 1:
        name, _, slots = name_and_slots.partition(":")
        return name, slots
    return name_and_slots, None


def _ipv4(name: str) -> str:
    try:
        return str(ipaddress.IPv4Address(name))
    except ValueError:
        raise HostfileError(
            f"{shown(name)} is neither an IPv4 address (four numbers up to 255) nor a host name "
            "(its last part needs a letter)"
        ) from None


def _ipv6(name: str) -> str:
    if "%" in name:
        raise HostfileError(
            f"{shown(name)} is valid on one link of this host only: write an address without %, or "
            "the host's name"
        )
    try:
        return str(ipaddress.IPv6Address(name))
    except ValueError:
        raise HostfileError(
            f"{shown(name)} is not an IPv6 address; with slots, write it as [fd00::1]:4"
        ) from None
