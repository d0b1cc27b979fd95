"""The list of hosts of -H."""

import re

import pytest

from hvkit.errors import HostfileError, LaunchError
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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "-H: host 1: is empty: write host:slots between the commas"),
        ("h1:2,", "-H: host 2: is empty: write host:slots between the commas"),
        ("h1:2,h2:x", "-H: host 2: slots must be a positive integer, got 'x'"),
        ("h1:0", "-H: host 1: slots must be a positive integer, got '0'"),
        ("h1:", "-H: host 1: slots must be a positive integer, got ''"),
        ("h1 slots=2", "-H: host 1: must be host:slots, got 'h1 slots=2'"),
        ("h1:2 h2:2", "-H: host 1: must be host:slots, got 'h1:2 h2:2'"),
        (
            "h[1-2]:2",
            "-H: host 1: 'h[1-2]:2': hvkit does not expand ranges: write each host",
        ),
    ],
)
def test_an_invalid_list_is_an_error_that_names_the_host(text, message):
    with pytest.raises(HostfileError, match=f"^{re.escape(message)}$"):
        read_hosts_option(text)


def test_hosts_with_several_entries_are_known_with_their_places():
    assert repeated(read_hosts_option("h1:2,h2:2,h1:1")) == {"h1": ("host 1", "host 3")}


def test_a_host_without_slots_cannot_be_listed():
    with pytest.raises(LaunchError, match="h1 has no number of slots: add slots=N to it"):
        hosts_option([Host("h1")])
