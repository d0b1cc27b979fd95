"""The words of hostfiles: host names, addresses, users and numbers.

Errors raised here say what is wrong with the word; who reads the file adds where it stands.
"""

import ipaddress
import re
from dataclasses import dataclass

from hvkit.errors import HostfileError

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
