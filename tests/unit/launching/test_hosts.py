"""The list of hosts of -H, and hosts that are named several times."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvkit.errors import HostfileError
from hvkit.launching.hosts import Host, hosts_option, parse_hostfile, read_hosts_option


def read_file(text):
    return parse_hostfile(text, "f")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("h1:2,h2:3", (Host("h1", 2), Host("h2", 3))),
        ("h1:2, h2:3", (Host("h1", 2), Host("h2", 3))),
        ("h1", (Host("h1", 1),)),
        ("root@h1:2", (Host("h1", 2, user="root"),)),
    ],
)
def test_a_valid_list(text, hosts):
    assert read_hosts_option(text) == hosts


NAMES = ("h1", "a-b.C_d", "10.0.0.1", "1a", "1.a", "x" * 63)


@settings(max_examples=30)
@given(st.permutations(NAMES), st.lists(st.integers(1, 65_535), min_size=6, max_size=6))
def test_a_written_list_is_read_as_the_same_hosts(names, slots):
    users = ("root", None) * 3
    hosts = tuple(map(Host, names, slots, users))
    assert read_hosts_option(hosts_option(hosts)) == hosts


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
        ("h[1-2]:2", "host 1: 'h[1-2]' is not a host name: use letters, digits, - and _ in parts"),
    ],
)
def test_an_invalid_list_is_an_error_that_names_the_host(text, message):
    with pytest.raises(HostfileError, match=f"^-H: {re.escape(message)}"):
        read_hosts_option(text)


@pytest.mark.parametrize(
    ("read", "text", "named"),
    [
        (read_hosts_option, "h1:2,h2:2,h1:1", "-H: host 3: h1 is named again after host 1"),
        (
            read_file,
            "a slots=1\n# b\nb slots=1\nA slots=2\n",
            "f: line 4: A is named again after line 1",
        ),
        (read_file, "node1\nnode1\n", "f: line 2: node1 is named again after line 1"),
        (read_file, "a:1\na\n", "f: line 2: a is named again after line 1"),
    ],
)
def test_a_host_that_is_named_twice_is_an_error_with_both_places(read, text, named):
    with pytest.raises(HostfileError, match=f"^{re.escape(named)}"):
        read(text)
