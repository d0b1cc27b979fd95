"""The list of hosts of -H, and hosts that are named several times."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.errors import HostfileError, LaunchError
from hvkit.launching.hostfile import parse_hostfile
from hvkit.launching.hosts import Host, hosts_option, merged, read_hosts_option, repeated


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1:2,h2:3", (Host("h1", 2), Host("h2", 3))),
        ("h1:2, h2:3", (Host("h1", 2), Host("h2", 3))),
        ("h1", (Host("h1", 1),)),
        ("h1,h1,h2", (Host("h1", 2), Host("h2", 1))),
        ("root@h1:2", (Host("h1", 2, user="root"),)),
        ("[fd00::1]:2,fd00::2", (Host("fd00::1", 2), Host("fd00::2", 1))),
    ],
)
def test_a_valid_list(text, hosts):
    assert merged(read_hosts_option(text), "-H") == hosts


NAMES = ("h1", "a-b.C_d", "10.0.0.1", "fd00::1", "1a", "x" * 63)


@settings(max_examples=30)
@given(st.permutations(NAMES), st.lists(st.integers(1, 65_535), min_size=6, max_size=6))
def test_a_written_list_is_read_as_the_same_hosts(names, slots):
    users = ("root", None) * 3
    hosts = tuple(map(Host, names, slots, (None,) * 6, users))
    assert merged(read_hosts_option(hosts_option(hosts)), "-H") == hosts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "host 1: is empty: write host:slots between the commas"),
        ("h1:2,", "host 2: is empty: write host:slots between the commas"),
        ("h1:2,h2:x", "host 2: slots must be a positive integer, got 'x'"),
        ("h1:0", "host 1: slots must be a positive integer, got '0'"),
        ("h1:", "host 1: slots must be a positive integer, got ''"),
        ("h1 slots=2", "host 1: must be host:slots, got 'h1 slots=2'"),
        ("h1:2 h2:2", "host 1: must be host:slots, got 'h1:2 h2:2'"),
        ("h[1-2]:2", "host 1: 'h[1-2]:2': hvkit does not expand ranges: write each host"),
    ],
)
def test_an_invalid_list_is_an_error_that_names_the_host(text, message):
    with pytest.raises(HostfileError, match=f"^-H: {re.escape(message)}$"):
        read_hosts_option(text)


def test_a_host_without_slots_cannot_be_listed():
    with pytest.raises(LaunchError, match="h1 has no number of slots: add slots=N to it"):
        hosts_option([Host("h1")])


def test_hosts_with_several_entries_are_known_with_their_places():
    assert repeated(read_hosts_option("h1:2,h2:2,h1:1")) == {"h1": ("host 1", "host 3")}
    lines = parse_hostfile("a slots=1\n# b\nb slots=1\nA slots=2\na\n", "f")
    assert repeated(lines) == {"a": ("line 1", "line 4", "line 5")}


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1\nnode1\nnode1\n", [Host("node1", 3)]),
        ("node1 slots=2\nNODE1 slots=3\n", [Host("node1", 5)]),
        ("node1 slots=2\nnode1\n", [Host("node1", 3)]),
        ("node1 slots=2 max_slots=5\nnode1 slots=2\n", [Host("node1", 4, 5)]),
        ("node1:2\nnode1\n", [Host("node1", 3)]),
        ("fd00::1 slots=1\nfd00:0::1 slots=1\n", [Host("fd00::1", 2)]),
        ("b:1\na:1\nb:1\n", [Host("b", 2), Host("a", 1)]),
    ],
)
def test_slots_of_a_host_that_is_named_again_are_added_where_it_is_first(text, hosts):
    assert merged(parse_hostfile(text, "f"), "f") == tuple(hosts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "u@a slots=1\na slots=1\n",
            "a has the user None here but 'u' in line 1: use one of them",
        ),
        (
            "a slots=1 max_slots=3\na max_slots=2\n",
            "a has max_slots=2 here but 3 before: use one of them",
        ),
        (
            "a slots=2 max_slots=3\na slots=2\n",
            "the slots of a add up to 4, more than its max_slots=3: lower the slots, or raise",
        ),
    ],
)
def test_lines_that_contradict_each_other_are_an_error(text, message):
    with pytest.raises(HostfileError, match=f"^f: line 2: {re.escape(message)}"):
        merged(parse_hostfile(text, "f"), "f")
