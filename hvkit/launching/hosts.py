"""Hosts and their slots: hostfiles, the list of ``-H``, host names and addresses.

Hostfiles have Open MPI's form (``node1 slots=4``) or MPICH's (``node1:4``). Ambiguous input is
rejected with ``hvkit.errors.HostfileError``, which names file and line, or the position in the
list.
"""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvkit.errors import HostfileError


@dataclass(frozen=True)
class Host:
    """A host and the number of ranks that may run there."""

    name: str  # or its IPv4 address
    # None leaves that to the launcher, as a bare name in a hostfile does: Open MPI then counts the
    # host's cores.
    slots: int | None = None
    user: str | None = None  # for ssh; None for the user of this process


_OPEN_MPI, _MPICH = "Open MPI's", "MPICH's"

# A file larger than any cluster needs is some other file.
_MOST_BYTES = 16 * 2**20

# The white space of Open MPI's reader. Python's own has more, such as the no-break space.
_SPACE = " \t\v\f"
_EQUALS = re.compile(rf"[{_SPACE}]*=[{_SPACE}]*")
_KEYWORDS = {"slots": "slots", "max_slots": "max_slots", "max-slots": "max_slots"}

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


def read_hostfile(path: Path, *, add_up: bool = False) -> tuple[Host, ...]:
    """The hosts of a file, in their order; errors name file and line.

    ``add_up`` adds up the slots of a host with several lines, otherwise an error.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise HostfileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise HostfileError(f"{path}: is not a hostfile: larger than {_MOST_BYTES >> 20} MiB")
    return parse_hostfile(_decoded(data, str(path)), str(path), add_up=add_up)


def parse_hostfile(text: str, name: str, *, add_up: bool = False) -> tuple[Host, ...]:
    """The hosts in a hostfile's text; ``name`` is the file's, for errors.

    A line ``node1 slots=4`` has Open MPI's form, and ``node1:4`` has MPICH's; a file has one form.
    In a file of MPICH's form, a bare name has one slot.
    """
    hosts: dict[str, Host] = {}
    forms: dict[str, str] = {}  # with the first line of each
    for number, line in enumerate(text.split("\n"), start=1):
        position = f"line {number}"
        if content := line.removesuffix("\r").partition("#")[0].strip(_SPACE):
            try:
                hosts[position], form = _read_line(content)
            except HostfileError as error:
                raise HostfileError(f"{name}: {position}: {error}") from None
            if form:
                forms.setdefault(form, position)
    if len(forms) > 1:
        (form, first), (other, second) = forms.items()
        raise HostfileError(
            f"{name}: {second}: is in {other} form but {first} is in {form}: "
            "use `node1 slots=4` or `node1:4` throughout"
        )
    if not hosts:
        raise HostfileError(f"{name}: has no host: write a line for each, `node1 slots=2`")
    if _MPICH in forms:
        hosts = {at: replace(host, slots=host.slots or 1) for at, host in hosts.items()}
    return (_added_up if add_up else _distinct)(hosts, name)


def _read_line(content: str) -> tuple[Host, str | None]:
    """The host of a line, and the form of the line; ``None`` for a bare name, which both have."""
    first, *words = re.split(rf"[{_SPACE}]+", _EQUALS.sub("=", content))
    if "=" in first:
        raise HostfileError(f"a line starts with a host, got {shown(first)}")
    name, user, slots = _host_word(first)
    if slots is None:
        return Host(name, _open_mpis_slots(words), user), _OPEN_MPI if words else None
    if words:
        raise HostfileError(
            f"nothing may follow host:slots, got {shown(words[0])}: slots=N is Open MPI's form, "
            "and a user goes before the host, user@host:slots"
        )
    return Host(name, count(slots, "slots"), user), _MPICH


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


def read_hosts_option(text: str) -> tuple[Host, ...]:
    """The hosts of ``-H node1:2,node2:2``, the list that mpirun and horovodrun take.

    A host without ``:slots`` has one slot.
    """
    words = {f"host {number}": word for number, word in enumerate(text.split(","), start=1)}
    return _distinct({at: _host_of_option(word.strip(" "), at) for at, word in words.items()}, "-H")


def _host_of_option(word: str, position: str) -> Host:
    try:
        if not word:
            raise HostfileError("is empty: write host:slots between the commas")
        if "=" in word or " " in word:
            raise HostfileError(f"must be host:slots, got {shown(word)}")
        name, user, slots = _host_word(word)
        return Host(name, 1 if slots is None else count(slots, "slots"), user=user)
    except HostfileError as error:
        raise HostfileError(f"-H: {position}: {error}") from None


def hosts_option(hosts: Sequence[Host]) -> str:
    """Hosts with slots as a list for ``-H``."""
    return ",".join(f"{f'{h.user}@' if h.user else ''}{h.name}:{h.slots}" for h in hosts)


def _distinct(hosts: Mapping[str, Host], source: str) -> tuple[Host, ...]:
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


def _added_up(hosts: Mapping[str, Host], source: str) -> tuple[Host, ...]:
    """Each host once, with the sum of its slots; a bare name that is repeated counts as one."""
    found: dict[str, Host] = {}
    for position, host in hosts.items():
        first = found.setdefault(host.name.lower(), host)  # names are not case-sensitive
        if first is host:
            continue
        if host.user != first.user:
            raise HostfileError(
                f"{source}: {position}: {host.name} has the user {host.user!r} here but "
                f"{first.user!r} before: use one of them"
            )
        found[host.name.lower()] = replace(first, slots=(first.slots or 1) + (host.slots or 1))
    return tuple(found.values())


def _host_word(word: str) -> tuple[str, str | None, str | None]:
    """Host, user and slots of ``[user@]host[:slots]``; the slots are not checked yet."""
    user, at, name_and_slots = word.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise HostfileError(
            f"{shown(word)} has an invalid user before the @ (letters, digits, _ and - are valid): "
            "remove the user and set User for this host in ~/.ssh/config"
        )
    if name_and_slots.count(":") > 1 and ("[" in name_and_slots or "::" in name_and_slots):
        raise HostfileError(
            f"{shown(word)}: mpirun and horovodrun accept no IPv6 addresses: use the host's name, "
            "and add it to DNS or /etc/hosts"
        )
    name, colon, slots = name_and_slots.partition(":")
    if not name:
        raise HostfileError(f"{shown(word)} has no host name: write HOST or USER@HOST")
    return host_name(name), user or None, slots if colon else None


def host_name(name: str) -> str:
    """The valid host name or IPv4 address."""
    labels = name.split(".")
    if labels[-1].isdecimal():
        try:
            return str(ipaddress.IPv4Address(name))
        except ValueError:
            raise HostfileError(
                f"{shown(name)} is neither an IPv4 address (four numbers up to 255) nor a host "
                "name (its last part needs a letter)"
            ) from None
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
