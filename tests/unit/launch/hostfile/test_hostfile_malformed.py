"""Right hostfiles with one thing made wrong: each is refused, at that line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MPICH_HOSTS, OPENMPI_HOSTS, distinct

from hvkit.errors import HostfileError
from hvkit.launch.hostfile import parse_hostfile
from hvkit.launch.launchers import write_mpich, write_openmpi

_NUMBERS = [
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
_KEYWORDS = [
    *("slot", "Slots", "SLOTS", "count", "cpu", "max", "maxslots", "max slots", "port", "user"),
    *("slots=2 slots", "max_slots=9 max-slots", "slots_max", "boards", "x", "slots:", "--slots"),
]
_NAMES = [
    *("-a", "a-", "a..b", ".a", "a.", "a$", "node[1-4]", "[1-4]", "+n0", "+e", "^a", "a,b", "a,"),
    *('"a"', "'a'", "hôst", "a" * 64, "a." * 127 + "a", "10.0.0.256", "10.0.0", "1", "a.1", "a/b"),
    *("fe80::1%eth0", "[node1]", "[fd00::1", "fd00::1]", "1::2::3", "a:b:c", "@a", "a@", "a@b@c"),
    *("x y@a", "first.last@a", "a\\b", "a!b", "a*", "(a)", "a|b", "a;b", "\u200ba", "//a", "a=b"),
]
_EXTRAS = ["node2", "2", "slots", "=", "=4", "/", "-x", "\u00a0", "x=", "max_slots", "slots=1=1"]
_SETTINGS = settings(max_examples=300)


def _refusal(lines: list[str]) -> str:
    with pytest.raises(HostfileError) as error:
        parse_hostfile("\n".join(lines), "f")
    return str(error.value)


@st.composite
def _openmpi_line(draw: st.DrawFn) -> str:
    """A line that is wrong in Open MPI's form, whatever stands around it."""
    kind = draw(st.sampled_from(["number", "keyword", "name", "extra", "max"]))
    slots = draw(st.integers(2, 65_535))
    if kind == "number":
        return f"node0 {draw(st.sampled_from(['slots', 'max_slots']))}={_drawn(draw, _NUMBERS)}"
    if kind == "keyword":
        return f"node0 {_drawn(draw, _KEYWORDS)}={slots}"
    if kind == "name":
        return f"{_drawn(draw, _NAMES)} slots={slots}"
    if kind == "extra":
        return f"node0 slots={slots} {_drawn(draw, _EXTRAS)}"
    return f"node0 slots={slots} max_slots={draw(st.integers(1, slots - 1))}"


@st.composite
def _mpich_line(draw: st.DrawFn) -> str:
    """A line that is wrong in MPICH's form, whatever stands around it."""
    kind = draw(st.sampled_from(["number", "name", "extra"]))
    slots = draw(st.integers(1, 65_535))
    if kind == "number":
        return f"node0:{_drawn(draw, _NUMBERS)}"
    if kind == "name":
        # With two colons one of them is an IPv6 address.
        return f"{draw(st.sampled_from(_NAMES).filter(lambda name: '::' not in name))}:{slots}"
    return f"node0:{slots} {_drawn(draw, [*_EXTRAS, 'binding=rr', 'ifname=eth0', 'slots=2'])}"


def _drawn(draw: st.DrawFn, choices: list[str]) -> str:
    return draw(st.sampled_from(choices))


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


@_SETTINGS
@given(data=st.data(), hosts=distinct(MPICH_HOSTS), swapped=st.booleans())
def test_a_line_of_the_other_form_is_refused_with_its_number(data, hosts, swapped):
    write, other = (write_mpich, write_openmpi) if swapped else (write_openmpi, write_mpich)
    lines = write(hosts).splitlines()
    place = data.draw(st.integers(1, len(lines)))
    lines.insert(place, other([data.draw(MPICH_HOSTS)]).strip())
    # A user of MPICH's that stands behind is told by the line itself.
    assert _refusal(lines).startswith(f"f: line {place + 1}: is in ")
