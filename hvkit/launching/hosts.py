"""Hosts and their slots: host names and addresses, and the list of ``-H``.

``hvkit.launching.hostfile`` reads whole files with the functions of this module. Ambiguous input is
rejected. Errors about a word do not say where it stands; the reader of the file or list adds that.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that may run there."""

    name: str  # or its IPv4 or IPv6 address, without brackets
    # None leaves that to the launcher, as a bare name in a hostfile does: Open MPI then counts the
    # host's cores.
    slots: int | None = None
    user: str | None = None  # for ssh; None for the user of this process


def read_hosts_option(text: str) -> tuple[Host, ...]:
    """The hosts of ``-H node1:2,node2:2``, the list that mpirun and horovodrun take.

    A host without ``:slots`` has one slot. IPv6 addresses need brackets: ``[fd00::1]:2``.
    """
    words = {f"host {number}": word for number, word in enumerate(text.split(","), start=1)}
    return distinct({at: _host_of_option(word.strip(" "), at) for at, word in words.items()}, "-H")


def hosts_option(hosts: Sequence[Host]) -> str:
    """``hosts`` as a list for ``-H``; raises ``UsageError`` for one without slots."""
    words = []
    for host in hosts:
        if host.slots is None:
            raise UsageError(
                f"{host.name} has no number of slots: add slots=N to it in the hostfile"
            )
        name = f"[{host.name}]" if ":" in host.name else host.name
        words.append(f"{f'{host.user}@' if host.user else ''}{name}:{host.slots}")
    return ",".join(words)


def distinct(hosts: Mapping[str, Host], source: str) -> tuple[Host, ...]:
    """The hosts, by their positions in a file or list; raises if one is named twice.

    Open MPI accepts such a host only if at most one of its lines has ``slots=``.
    """
    seen: dict[str, str] = {}
    for position, host in hosts.items():
        first = seen.setdefault(host.name.lower(), position)  # names are not case-sensitive
        if first != position:
            raise HostfileError(
                f"{source}: {position}: {host.name} is named again after {first}: name it once, "
                "with all its slots"
            )
    return tuple(hosts.values())


def host_word(word: str) -> tuple[str, str | None, str | None]:
    """Host, user and slots of ``[user@]host[:slots]``; the slots are not checked yet.

    The host is a name, an IPv4 or an IPv6 address; without brackets in what is returned.
    """
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
    """The valid host name or address; an IPv6 address in its shortest form."""
    labels = name.split(".")
    if ":" in name or labels[-1].isdecimal():
        return _address(name)
    if len(name) > _LONGEST_NAME or not all(map(_LABEL.fullmatch, labels)):
        raise HostfileError(
            f"{shown(name)} is not a host name: use letters, digits, - and _ in parts of at most "
            "63 characters between dots; a part must not start or end with -"
        )
    return name


def count(text: str, keyword: str) -> int:
    """The positive integer in ``text``, which sets ``keyword``."""
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


def _address(name: str) -> str:
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        is_not = "is not an IPv6 address; with slots, write it as [fd00::1]:4"
        if ":" not in name:
            is_not = (
                "is neither an IPv4 address (four numbers up to 255) nor a host name (its last "
                "part needs a letter)"
            )
        raise HostfileError(f"{shown(name)} {is_not}") from None
    if "%" in name:
        raise HostfileError(
            f"{shown(name)} is valid on one link of this host only: write an address without %, or "
            "the host's name"
        )
    return str(address)
