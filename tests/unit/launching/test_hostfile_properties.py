"""Any hosts: what hvkit writes it reads back, and one invalid line among valid ones is refused."""

import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.errors import HostfileError
from hvkit.launching.hostfile import parse_hostfile, read_hostfile
from hvkit.launching.hosts import Host, hosts_option, merged, read_hosts_option
from hvkit.launching.launchers import write_mpich, write_openmpi

_LABEL = st.from_regex(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,8}[A-Za-z0-9_])?", fullmatch=True)
_DOTTED = st.lists(_LABEL, min_size=1, max_size=3).map(".".join)
# A name whose last part is a number is read as an address.
_NAMES = _DOTTED.filter(lambda name: not name.rpartition(".")[2].isdecimal())
_ADDRESSES = st.ip_addresses(v=4).map(str)
_ADDRESSES_6 = st.ip_addresses(v=6).map(str)
_USERS = st.none() | st.from_regex(r"[a-z_][a-z0-9_-]{0,6}", fullmatch=True)
_SLOTS = st.integers(1, 65_535)


def distinct(hosts: st.SearchStrategy[Host]) -> st.SearchStrategy[tuple[Host, ...]]:
    """Some hosts with different names."""
    return st.lists(hosts, min_size=1, max_size=6, unique_by=lambda host: host.name.lower()).map(
        tuple
    )


def _with_max(host: Host) -> st.SearchStrategy[Host]:
    if host.slots is None:
        return st.just(host)
    most = st.none() | st.integers(host.slots, 65_535)
    return most.map(lambda number: replace(host, max_slots=number))


# The hosts that Open MPI's form, the list of -H and MPICH's form can express.
OPENMPI_HOSTS = st.builds(
    Host, _NAMES | _ADDRESSES | _ADDRESSES_6, st.none() | _SLOTS, st.none(), _USERS
).flatmap(_with_max)
OPTION_HOSTS = st.builds(Host, _NAMES | _ADDRESSES | _ADDRESSES_6, _SLOTS, st.none(), _USERS)
MPICH_HOSTS = st.builds(Host, _NAMES | _ADDRESSES, _SLOTS, st.none(), _USERS)


Hosts = tuple[Host, ...]

_NOISE = st.sampled_from(["", "   ", "\t", "# a comment", "#node9 slots=x", "\t# node9:0"])
_END = st.sampled_from(["", "\r", " ", "\t", " # why", "#why", " \r"])


@st.composite
def _dressed(draw: st.DrawFn, text: str) -> str:
    """The text with comments, blank lines and white space around its lines."""
    lines: list[str] = []
    for line in text.splitlines():
        lines += draw(st.lists(_NOISE, max_size=2))
        lines.append(draw(st.sampled_from(["", " ", "\t"])) + line + draw(_END))
    return draw(st.sampled_from(["", "\ufeff"])) + "\n".join(lines)


def _read(text: str) -> Hosts:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text.encode())
        return read_hostfile(Path(file.name))


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("hosts", "write"), [(OPENMPI_HOSTS, write_openmpi), (MPICH_HOSTS, write_mpich)]
)
@given(data=st.data())
def test_a_written_file_is_read_as_the_same_hosts(data, hosts, write: Callable[[Hosts], str]):
    expected = data.draw(distinct(hosts))
    assert _read(write(expected)) == expected
    assert _read(data.draw(_dressed(write(expected)))) == expected


@given(hosts=distinct(OPTION_HOSTS))
def test_a_written_list_is_read_as_the_same_hosts(hosts):
    assert merged(read_hosts_option(hosts_option(hosts)), "-H") == hosts


@given(hosts=distinct(OPTION_HOSTS), data=st.data())
def test_hosts_that_are_named_line_by_line_have_as_many_slots(hosts, data):
    named = data.draw(st.permutations([host.name for host in hosts for _ in range(3)]))
    read = merged(parse_hostfile("\n".join(named), "f"), "f")
    assert {host.name: host.slots for host in read} == {host.name: 3 for host in hosts}


@settings(max_examples=500)
@given(text=st.text(alphabet="ab1.:-_@[]=#,'\"%+^ \t\n\r\0\u00a0é²slotmax/*", max_size=60))
def test_any_text_is_read_or_refused_and_what_is_read_can_be_written(text):
    refusal = ""
    try:
        hosts = merged(parse_hostfile(text, "f"), "f")
    except HostfileError as error:
        refusal = str(error)
    if refusal:
        assert re.match(r"f: (line \d+: |has no host)", refusal)
    else:
        assert merged(parse_hostfile(write_openmpi(hosts), "f"), "f") == hosts


_BAD_NUMBERS = [
    *(
        "0",
        "00",
        "-1",
        "+2",
        "four",
        "1.5",
        "",
        "0x2",
        "2;",
        "'2'",
        '"2"',
        "1e3",
        "2,",
        "²",
        "\uff12",
    ),
    *("65536", "9" * 20, "9" * 5000, "2_0", "None", "2\u00a0", "2\r2", "\x00", "*", "auto"),
]
_BAD_KEYWORDS = [
    *("slot", "Slots", "_SLOTS", "count", "cpu", "max", "maxslots", "max slots", "port", "user"),
    *("slots=2 slots", "max_slots=9 max-slots", "slots_max", "boards", "x", "slots:", "--slots"),
]
_BAD_NAMES = [
    *("-a", "a-", "a..b", ".a", "a.", "a$", "node[1-4]", "[1-4]", "+n0", "+e", "^a", "a,b", "a,"),
    *('"a"', "'a'", "hôst", "a" * 64, "a." * 127 + "a", "10.0.0.256", "10.0.0", "1", "a.1", "a/b"),
    *("fe80::1%eth0", "[node1]", "[fd00::1", "fd00::1]", "1::2::3", "a:b:c", "@a", "a@", "a@b@c"),
    *("x y@a", "first.last@a", "a\\b", "a!b", "a*", "(a)", "a|b", "a;b", "\u200ba", "//a", "a=b"),
]
_BAD_EXTRAS = [
    "node2",
    "2",
    "slots",
    "=",
    "=4",
    "/",
    "-x",
    "\u00a0",
    "x=",
    "max_slots",
    "slots=1=1",
]
_SETTINGS = settings(max_examples=100)


def _refusal(lines: list[str]) -> str:
    with pytest.raises(HostfileError) as error:
        parse_hostfile("\n".join(lines), "f")
    return str(error.value)


@st.composite
def _openmpi_line(draw: st.DrawFn) -> str:
    """A line that is invalid in Open MPI's form among any other lines."""
    kind = draw(st.sampled_from(["number", "keyword", "name", "extra", "max"]))
    slots = draw(st.integers(2, 65_535))
    if kind == "number":
        return f"node0 {draw(st.sampled_from(['slots', 'max_slots']))}={_drawn(draw, _BAD_NUMBERS)}"
    if kind == "keyword":
        return f"node0 {_drawn(draw, _BAD_KEYWORDS)}={slots}"
    if kind == "name":
        return f"{_drawn(draw, _BAD_NAMES)} slots={slots}"
    if kind == "extra":
        return f"node0 slots={slots} {_drawn(draw, _BAD_EXTRAS)}"
    return f"node0 slots={slots} max_slots={draw(st.integers(1, slots - 1))}"


@st.composite
def _mpich_line(draw: st.DrawFn) -> str:
    """A line that is invalid in MPICH's form among any other lines."""
    kind = draw(st.sampled_from(["number", "name", "extra"]))
    slots = draw(st.integers(1, 65_535))
    if kind == "number":
        return f"node0:{_drawn(draw, _BAD_NUMBERS)}"
    if kind == "name":
        # With two colons in a row it would be a valid IPv6 address.
        return f"{draw(st.sampled_from(_BAD_NAMES).filter(lambda name: '::' not in name))}:{slots}"
    return f"node0:{slots} {_drawn(draw, [*_BAD_EXTRAS, 'binding=rr', 'ifname=eth0', 'slots=2'])}"


def _drawn(draw: st.DrawFn, choices: list[str]) -> str:
    return draw(st.sampled_from(choices))


@pytest.mark.every_combination
@pytest.mark.parametrize(
    ("hosts", "write", "wrong"),
    [
        pytest.param(OPENMPI_HOSTS, write_openmpi, _openmpi_line(), id="openmpi"),
        pytest.param(MPICH_HOSTS, write_mpich, _mpich_line(), id="mpich"),
    ],
)
@_SETTINGS
@given(data=st.data())
def test_a_wrong_line_among_right_ones_is_refused_with_its_number(data, hosts, write, wrong):
    lines = write(data.draw(distinct(hosts))).splitlines()
    place = data.draw(st.integers(0, len(lines)))
    lines.insert(place, data.draw(wrong))
    assert _refusal(lines).startswith(f"f: line {place + 1}: ")


@pytest.mark.every_combination
@_SETTINGS
@given(data=st.data(), hosts=distinct(MPICH_HOSTS), swapped=st.booleans())
def test_a_line_of_the_other_form_is_refused_with_its_number(data, hosts, swapped):
    write, other = (write_mpich, write_openmpi) if swapped else (write_openmpi, write_mpich)
    lines = write(hosts).splitlines()
    place = data.draw(st.integers(1, len(lines)))
    lines.insert(place, other([data.draw(MPICH_HOSTS)]).strip())

    assert _refusal(lines).startswith(f"f: line {place + 1}: is in ")
