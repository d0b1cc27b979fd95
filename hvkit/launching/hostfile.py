"""Hostfiles in Open MPI's form (``node1 slots=4``) or MPICH's (``node1:4``), read strictly.

Ambiguous input is rejected, naming file and line, with ``hvkit.errors.HostfileError``.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

from hvkit.errors import HostfileError
from hvkit.launching.hosts import Host, count, distinct, host_word, shown

Form = Literal["Open MPI's", "MPICH's"]
_OPEN_MPI: Form = "Open MPI's"
_MPICH: Form = "MPICH's"

# A file larger than any cluster needs is some other file.
_MOST_BYTES = 16 * 2**20

# The white space of Open MPI's reader. Python's own has more, such as the no-break space.
_SPACE = " \t\v\f"
_EQUALS = re.compile(rf"[{_SPACE}]*=[{_SPACE}]*")
_KEYWORDS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, in their order; errors name file and line."""
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise HostfileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise HostfileError(f"{path}: is not a hostfile: larger than {_MOST_BYTES >> 20} MiB")
    return parse_hostfile(_decoded(data, str(path)), str(path))


def parse_hostfile(text: str, name: str) -> tuple[Host, ...]:
    """The hosts in a hostfile's text; ``name`` is the file's, for errors.

    The first line that is not a bare name decides on the form of the file: ``node1 slots=4`` is
    Open MPI's, ``node1:4`` is MPICH's. In a file of MPICH's form a bare name has one slot.
    """
    hosts: dict[str, Host] = {}
    first: tuple[str, Form] | None = None
    for number, line in enumerate(text.split("\n"), start=1):
        position = f"line {number}"
        try:
            found = _read_line(line.removesuffix("\r"))
        except HostfileError as error:
            raise HostfileError(f"{name}: {position}: {error}") from None
        if found is None:
            continue
        hosts[position], form = found
        if form is None:
            continue
        first = first or (position, form)
        if form != first[1]:
            raise HostfileError(
                f"{name}: {position}: is in {form} form but {first[0]} is in {first[1]}: "
                "use `node1 slots=4` or `node1:4` throughout"
            )
    if not hosts:
        raise HostfileError(f"{name}: has no host: write a line for each, `node1 slots=2`")
    if first is not None and first[1] == _MPICH:
        hosts = {at: replace(host, slots=host.slots or 1) for at, host in hosts.items()}
    return distinct(hosts, name)


def _read_line(text: str) -> tuple[Host, Form | None] | None:
    """The host of a line, and the form of the line; ``None`` if it is blank or a comment.

    A bare name has no form: both have it.
    """
    content = text.partition("#")[0].strip(_SPACE)
    if not content:
        return None
    first, *words = re.split(rf"[{_SPACE}]+", _EQUALS.sub("=", content))
    if "=" in first:
        raise HostfileError(f"a line starts with a host, got {shown(first)}")
    name, user, slots = host_word(first)
    if slots is not None:
        return _in_mpichs_form(name, user, slots, words), _MPICH
    return Host(name, _open_mpis_slots(words), user), _OPEN_MPI if words else None


def _in_mpichs_form(name: str, user: str | None, slots: str, words: list[str]) -> Host:
    for word in words:
        keyword, equals, value = word.partition("=")
        if keyword in _KEYWORDS:
            raise HostfileError(
                f"{shown(word)} is Open MPI's form, but the slots after the host's colon are "
                "MPICH's: use one form"
            )
        if keyword != "user" or not equals:
            raise HostfileError(
                f"{shown(word)} is not supported after host:slots: of MPICH's options for a host, "
                "hvkit reads user= only"
            )
        if user is not None:
            raise HostfileError(f"{shown(word)}: the user is set twice: keep one")
        _, user, _ = host_word(f"{value}@{name}")
    return Host(name, count(slots, "slots"), user)


def _open_mpis_slots(words: list[str]) -> int | None:
    numbers: dict[str, int] = {}
    for word in words:
        keyword, equals, value = word.partition("=")
        if keyword not in _KEYWORDS or not equals:
            raise HostfileError(
                f"only slots=N and max_slots=N may follow the host, got {shown(word)}: a user goes "
                "before it, user@host, and a port into ~/.ssh/config"
            )
        kept = _KEYWORDS[keyword]
        if kept in numbers:
            raise HostfileError(f"{kept} is set twice: keep one")
        numbers[kept] = count(value, kept)
    most = numbers.get("max_slots")
    # As in Open MPI, max_slots without slots sets the slots, too.
    slots = numbers.get("slots", most)
    if slots is not None and most is not None and most < slots:
        raise HostfileError(f"max_slots must not be less than slots, got {most} for {slots} slots")
    return slots


def _decoded(data: bytes, name: str) -> str:
    at, problem = data.find(b"\0"), "is not text: it has a zero byte"
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if at < 0:
            at = error.start
            problem = f"is not UTF-8 text: it has the byte 0x{data[at]:02x}"
    if at >= 0:
        number = data.count(b"\n", 0, at) + 1
        raise HostfileError(f"{name}: line {number}: {problem}")
    return text
