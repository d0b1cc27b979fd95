"""Whole hostfiles: bytes, lines, and the one form that all lines have."""

from dataclasses import replace
from pathlib import Path

from hvkit.errors import HostfileError
from hvkit.launch.hostfile.entries import Entry, merged
from hvkit.launch.hostfile.line import Form, Line, read_line
from hvkit.launch.hosts import Host

# More than any cluster needs; what is larger is another file.
_MOST_BYTES = 16 * 2**20


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """The hosts of a file, each once, in the order of first mention; slots are added up.

    Raises:
        HostfileError: it cannot be read, or is not a hostfile; the message names file and line.
    """
    return merged(read_entries(path), str(path))


def read_entries(path: Path) -> tuple[Entry, ...]:
    """The hosts of a file as its lines name them.

    Raises:
        HostfileError: it cannot be read, or is not a hostfile.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise HostfileError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise HostfileError(f"{path}: is not a hostfile: larger than {_MOST_BYTES >> 20} MiB")
    return parse_hostfile(_decoded(data, str(path)), str(path))


def parse_hostfile(text: str, name: str) -> tuple[Entry, ...]:
    """The hosts of a hostfile's text as its lines name them.

    All lines have the form of the first that tells: ``node1 slots=4`` is Open MPI's, ``node1:4``
    is MPICH's. A bare name has both; among lines of MPICH it is one slot.

    Args:
        text: the file.
        name: of the file, for errors.

    Raises:
        HostfileError: a line is wrong, or none names a host.
    """
    lines: dict[int, Line] = {}
    for number, line_text in enumerate(text.split("\n"), start=1):
        try:
            line = read_line(line_text.removesuffix("\r"))
        except HostfileError as error:
            raise HostfileError(f"{name}: line {number}: {error}") from None
        if line is not None:
            lines[number] = line
    if not lines:
        raise HostfileError(f"{name}: names no host: write a line for each, `node1 slots=2`")
    form = _form(lines, name)
    return tuple(
        Entry(f"line {number}", _one_slot_if_bare(line.host) if form == "MPICH's" else line.host)
        for number, line in lines.items()
    )


def _form(lines: dict[int, Line], name: str) -> Form | None:
    telling = {number: line.form for number, line in lines.items() if line.form is not None}
    if not telling:
        return None
    first, form = next(iter(telling.items()))
    for number, other in telling.items():
        if other != form:
            raise HostfileError(
                f"{name}: line {number}: is in {other} form but line {first} is in {form}: use "
                "`node1 slots=4` or `node1:4` throughout"
            )
    return form


def _one_slot_if_bare(host: Host) -> Host:
    return replace(host, slots=1) if host.slots is None else host


def _decoded(data: bytes, name: str) -> str:
    if b"\0" in data:
        number = data[: data.index(b"\0")].count(b"\n") + 1
        raise HostfileError(f"{name}: line {number}: is not text: it has a zero byte")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = data[: error.start].count(b"\n") + 1
        raise HostfileError(
            f"{name}: line {number}: is not UTF-8 text: it has the byte 0x{data[error.start]:02x}"
        ) from None
