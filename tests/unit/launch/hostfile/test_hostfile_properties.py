"""What is written is read back; what is spoilt is refused, with the line."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import MPICH_HOSTS, OPENMPI_HOSTS, OPTION_HOSTS, distinct

from hvkit.errors import HostfileError
from hvkit.launch.hostfile import parse_hostfile, read_hostfile
from hvkit.launch.hosts import Host, hosts_option, merged, read_hosts_option
from hvkit.launch.launchers import write_mpich, write_openmpi

Hosts = tuple[Host, ...]

_NOISE = st.sampled_from(["", "   ", "\t", "# a comment", "#node9 slots=x", "\t# node9:0"])
_END = st.sampled_from(["", "\r", " ", "\t", " # why", "#why", " \r"])


@st.composite
def _dressed(draw: st.DrawFn, text: str) -> str:
    """The text with what has no meaning in between."""
    lines: list[str] = []
    for line in text.splitlines():
        lines += draw(st.lists(_NOISE, max_size=2))
        lines.append(draw(st.sampled_from(["", " ", "\t"])) + line + draw(_END))
    return draw(st.sampled_from(["", "\ufeff"])) + "\n".join(lines)


def _read(text: str) -> Hosts:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(text.encode())
        return read_hostfile(Path(file.name))


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
        assert re.match(r"f: (line \d+: |names no host)", refusal)
    else:
        assert merged(parse_hostfile(write_openmpi(hosts), "f"), "f") == hosts
