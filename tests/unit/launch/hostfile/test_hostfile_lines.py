"""What single lines of a hostfile mean, and what is said about those that mean nothing."""

import re

import pytest

from hvkit.errors import HostfileError
from hvkit.launch.hostfile import parse_hostfile
from hvkit.launch.hosts import Host, merged

_LONG = "n" * 64


def _hosts(text: str) -> tuple[Host, ...]:
    return merged(parse_hostfile(text, "f"), "f")


@pytest.mark.parametrize(
    ("line", "host"),
    [
        ("node1", Host("node1")),
        ("node1 slots=4", Host("node1", 4)),
        ("node1\tslots=4", Host("node1", 4)),
        ("  node1   slots=4  ", Host("node1", 4)),
        ("node1 slots = 4", Host("node1", 4)),
        ("node1 slots= 4", Host("node1", 4)),
        ("node1 slots=04", Host("node1", 4)),
        ("node1 slots=4 max_slots=8", Host("node1", 4, 8)),
        ("node1 slots=4 max-slots=8", Host("node1", 4, 8)),
        ("node1 max_slots=8 slots=4", Host("node1", 4, 8)),
        ("node1 max_slots=8", Host("node1", 8, 8)),
        ("node1 slots=4 # the fast one", Host("node1", 4)),
        ("node1 slots=4# the fast one", Host("node1", 4)),
        ("root@node1 slots=4", Host("node1", 4, user="root")),
        ("container_1 slots=4", Host("container_1", 4)),
        ("node1.example.com slots=4", Host("node1.example.com", 4)),
        ("10.1.2.3 slots=4", Host("10.1.2.3", 4)),
        ("fd00::1 slots=4", Host("fd00::1", 4)),
        ("[fd00::1] slots=4", Host("fd00::1", 4)),
        ("FD00:0:0:0::1", Host("fd00::1")),
        ("root@fd00::1 slots=4", Host("fd00::1", 4, user="root")),
        ("node1:4", Host("node1", 4)),
        ("node1:4 # the fast one", Host("node1", 4)),
        ("10.1.2.3:4", Host("10.1.2.3", 4)),
        ("[fd00::1]:4", Host("fd00::1", 4)),
        ("root@node1:4", Host("node1", 4, user="root")),
        ("node1:4 user=root", Host("node1", 4, user="root")),
    ],
)
def test_a_line_means(line, host):
    assert _hosts(line) == (host,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("node1 slots=four", "slots must be a positive integer, got 'four'"),
        ("node1 slots=0", "slots must be a positive integer, got '0'"),
        ("node1 slots=-1", "slots must be a positive integer, got '-1'"),
        ("node1 slots=+2", "slots must be a positive integer, got '+2'"),
        ("node1 slots=2.5", "slots must be a positive integer, got '2.5'"),
        ("node1 slots=²", "slots must be a positive integer, got '²'"),
        ("node1 slots=٤", "slots must be a positive integer, got '٤'"),
        ("node1 slots=", "slots must be a positive integer, got ''"),
        ("node1 slots", "slots must be a positive integer, got none: write slots=N"),
        ("node1 slots=65536", "slots must be at most 65535, got '65536'"),
        (
            f"node1 slots={'9' * 5000}",
            f"slots must be at most 65535, got '{'9' * 57}...'",
        ),
        ("node1 max_slots=x slots=2", "max_slots must be a positive integer, got 'x'"),
        (
            "node1 slots=4 max_slots=2",
            "max_slots must not be less than slots, got 2 for 4 slots",
        ),
        ("node1 slots=4 slots=4", "slots is set twice"),
        ("node1 max_slots=4 max-slots=4", "max_slots is set twice"),
        ("node1 slot=4", "unknown keyword 'slot': did you mean slots?"),
        ("node1 SLOTS=4", "unknown keyword 'SLOTS': did you mean slots?"),
        ("node1 max_slot=4", "unknown keyword 'max_slot': did you mean max_slots?"),
        ("node1 count=4", "unknown keyword 'count': write slots=N"),
        ("node1 slots_max=4", "unknown keyword 'slots_max': write max_slots=N"),
        ("node1 username=root", "unknown keyword 'username': write user@host"),
        (
            "node1 port=2222",
            "unknown keyword 'port': set Port for this host in ~/.ssh/config",
        ),
        ("node1 colour=4", "unknown keyword 'colour': slots and max_slots are known"),
        ("node1 node2", "a host and then slots=N and max_slots=N are read, got 'node2'"),
        ("slots=4", "a line starts with a host, got 'slots=4'"),
        ("node1,node2", "'node1,node2': write each host on a line of its own, without commas"),
        ('"node1" slots=4', "'\"node1\"': write names and numbers without quotes"),
        (
            "node[1-4] slots=4",
            "'node[1-4]': ranges are not expanded here, write a line for each host",
        ),
        (
            "[1-4] slots=4",
            "'[1-4]': brackets are for IPv6 addresses, as in [fd00::1] or [fd00::1]:4",
        ),
        (
            "+n0",
            "'+n0' means a host by its place in another list, which hvkit does not read: write "
            "the host's name",
        ),
        ("^node1", "'^node1' takes a host out of another list: leave its line out"),
        ("// node1", "'//': a comment starts with #"),
        (":4", "':4' names no host"),
        ("root@ slots=4", "'root@' names no host"),
        (
            "@node1",
            "'@node1' has no valid user before the @ (letters, digits, _ and -): leave the user "
            "out and set User for this host in ~/.ssh/config",
        ),
        (
            "first.last@node1",
            "'first.last@node1' has no valid user before the @ (letters, digits, _ and -): leave "
            "the user out and set User for this host in ~/.ssh/config",
        ),
        (
            "-node1",
            "'-node1' is not a host name: letters, digits, - and _ in parts of at most 63 between "
            "dots, no - at a part's start or end",
        ),
        (
            _LONG,
            f"'{'n' * 57}...' is not a host name: letters, digits, - and _ in parts of at most 63 "
            "between dots, no - at a part's start or end",
        ),
        (
            "10.0.0.256",
            "'10.0.0.256' is neither an IPv4 address (four numbers up to 255) nor a host name "
            "(the last part of which has a letter)",
        ),
        (
            "fe80::1%eth0",
            "'fe80::1%eth0' holds on one link of this host only: write an address without %, or "
            "the host's name",
        ),
        (
            "node1:4:2",
            "'node1:4:2' is not an IPv6 address; with slots it is written [fd00::1]:4",
        ),
        ("node1:", "slots must be a positive integer, got ''"),
        ("node1:two", "slots must be a positive integer, got 'two'"),
        ("node1 :2", "a host and then slots=N and max_slots=N are read, got ':2'"),
        (
            "node1:2 slots=2",
            "'slots=2' is Open MPI's form, but the host has its slots after a colon as in "
            "MPICH's: write one of them",
        ),
        (
            "node1:2 binding=rr",
            "'binding=rr' is not read after host:slots: of MPICH's options for one host hvkit "
            "knows user= only",
        ),
        (
            "node1:2 ifname=eth1",
            "'ifname=eth1' is not read after host:slots: of MPICH's options for one host hvkit "
            "knows user= only",
        ),
        ("root@node1:2 user=root", "'user=root': the user is named twice"),
    ],
)
def test_a_wrong_line_is_an_error_that_names_it_and_the_fix(line, message):
    text = f"node8\n# node7\n{line}\nnode9\n"
    with pytest.raises(HostfileError, match=f"^{re.escape(f'hostfiles/gpu: line 3: {message}')}$"):
        parse_hostfile(text, "hostfiles/gpu")
