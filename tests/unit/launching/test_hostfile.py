"""Hostfiles: single lines, the form and the bytes of whole files, and hosts with several lines."""

import re
from pathlib import Path

import pytest

from hvkit.errors import HostfileError
from hvkit.launching.hostfile import parse_hostfile, read_entries, read_hostfile
from hvkit.launching.hosts import Host, merged, repeated

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
def test_a_valid_line(line, host):
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
        ("node1 slots=4 slots=4", "slots is set twice: keep one"),
        ("node1 max_slots=4 max-slots=4", "max_slots is set twice: keep one"),
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
        ("node1 colour=4", "unknown keyword 'colour': use slots or max_slots"),
        ("node1 node2", "only slots=N and max_slots=N may follow the host, got 'node2'"),
        ("slots=4", "a line starts with a host, got 'slots=4'"),
        ("node1,node2", "'node1,node2': write each host on its own line, without commas"),
        ('"node1" slots=4', "'\"node1\"': write names and numbers without quotes"),
        (
            "node[1-4] slots=4",
            "'node[1-4]': hvkit does not expand ranges: write each host",
        ),
        (
            "[1-4] slots=4",
            "'[1-4]': brackets are for IPv6 addresses, as in [fd00::1] or [fd00::1]:4",
        ),
        (
            "+n0",
            "'+n0' names a host by its position in another list, which hvkit does not read: write "
            "the host's name",
        ),
        ("^node1", "'^node1' excludes a host from another list: delete its line"),
        ("// node1", "'//': a comment starts with #"),
        (":4", "':4' has no host name: write HOST or USER@HOST"),
        ("root@ slots=4", "'root@' has no host name: write HOST or USER@HOST"),
        (
            "@node1",
            "'@node1' has an invalid user before the @ (letters, digits, _ and - are valid): "
            "remove the user and set User for this host in ~/.ssh/config",
        ),
        (
            "first.last@node1",
            "'first.last@node1' has an invalid user before the @ (letters, digits, _ and - are "
            "valid): remove the user and set User for this host in ~/.ssh/config",
        ),
        (
            "-node1",
            "'-node1' is not a host name: use letters, digits, - and _ in parts of at most 63 "
            "characters between dots; a part must not start or end with -",
        ),
        (
            _LONG,
            f"'{'n' * 57}...' is not a host name: use letters, digits, - and _ in parts of at most "
            "63 characters between dots; a part must not start or end with -",
        ),
        (
            "10.0.0.256",
            "'10.0.0.256' is neither an IPv4 address (four numbers up to 255) nor a host name "
            "(its last part needs a letter)",
        ),
        (
            "fe80::1%eth0",
            "'fe80::1%eth0' is valid on one link of this host only: write an address without %, or "
            "the host's name",
        ),
        (
            "node1:4:2",
            "'node1:4:2' is not an IPv6 address; with slots, write it as [fd00::1]:4",
        ),
        ("node1:", "slots must be a positive integer, got ''"),
        ("node1:two", "slots must be a positive integer, got 'two'"),
        ("node1 :2", "only slots=N and max_slots=N may follow the host, got ':2'"),
        (
            "node1:2 slots=2",
            "'slots=2' is Open MPI's form, but the slots after the host's colon are MPICH's: use "
            "one form",
        ),
        (
            "node1:2 binding=rr",
            "'binding=rr' is not supported after host:slots: of MPICH's options for a host, "
            "hvkit reads user= only",
        ),
        (
            "node1:2 ifname=eth1",
            "'ifname=eth1' is not supported after host:slots: of MPICH's options for a host, "
            "hvkit reads user= only",
        ),
        ("root@node1:2 user=root", "'user=root': the user is set twice: keep one"),
    ],
)
def test_an_invalid_line_is_an_error_with_its_number_and_the_fix(line, message):
    text = f"node8\n# node7\n{line}\nnode9\n"
    with pytest.raises(HostfileError, match=f"^{re.escape(f'hostfiles/gpu: line 3: {message}')}$"):
        parse_hostfile(text, "hostfiles/gpu")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def _refused(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(HostfileError) as error:
        read_hostfile(file)
    return str(error.value).removeprefix(f"{file}: ")


def test_comments_blank_lines_and_line_ends_of_any_system_are_skipped(file):
    file.write_bytes(b"\xef\xbb\xbf# all\r\n\r\n   \nnode1 slots=2\r\n\t# more\n\nnode2 slots=2")
    assert read_hostfile(file) == (Host("node1", 2), Host("node2", 2))


def test_in_open_mpis_form_a_bare_name_leaves_the_slots_to_the_launcher(file):
    file.write_text("node1\nnode2 slots=2\n")
    assert read_hostfile(file) == (Host("node1"), Host("node2", 2))


def test_in_mpichs_form_a_bare_name_has_one_slot(file):
    file.write_text("node1\nnode2:2\nnode3\n")
    assert read_hostfile(file) == (Host("node1", 1), Host("node2", 2), Host("node3", 1))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"# nothing\n", b"\xef\xbb\xbf"])
def test_a_file_without_hosts_is_an_error(file, data):
    expected = "has no host: write a line for each, `node1 slots=2`"
    assert _refused(file, data) == expected


def test_bytes_that_are_not_text_are_an_error_with_their_line(file):
    assert _refused(file, b"node1\nno\0de2\n") == "line 2: is not text: it has a zero byte"
    assert _refused(file, b"node1\n\nh\xf6st\n") == (
        "line 3: is not UTF-8 text: it has the byte 0xf6"
    )


def test_a_file_far_larger_than_a_hostfile_is_not_read_to_its_end(file):
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(HostfileError, match="is not a hostfile: larger than 16 MiB"):
        read_hostfile(file)


def test_a_missing_file_and_a_folder_are_errors(tmp_path):
    with pytest.raises(HostfileError, match=re.escape("hosts: cannot be read: No such file")):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(HostfileError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)


def test_the_first_line_with_a_form_decides_for_the_file(file):
    fix = "use `node1 slots=4` or `node1:4` throughout"
    assert _refused(file, b"node0\nnode1 slots=2\nnode2\nnode3:2\n") == (
        f"line 4: is in MPICH's form but line 2 is in Open MPI's: {fix}"
    )
    assert _refused(file, b"node1:2\nnode2 max_slots=2\n") == (
        f"line 2: is in Open MPI's form but line 1 is in MPICH's: {fix}"
    )


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("node1\nnode1\nnode1\n", Host("node1", 3)),
        ("node1 slots=2\nNODE1 slots=3\n", Host("node1", 5)),
        ("node1 slots=2\nnode1\n", Host("node1", 3)),
        ("node1 slots=2 max_slots=5\nnode1 slots=2\n", Host("node1", 4, 5)),
        ("node1:2\nnode1\n", Host("node1", 3)),
        ("fd00::1 slots=1\nfd00:0::1 slots=1\n", Host("fd00::1", 2)),
    ],
)
def test_slots_of_a_host_that_is_named_again_are_added(file, text, host):
    file.write_text(text)
    assert read_hostfile(file) == (host,)


def test_hosts_keep_the_order_of_first_mention(file):
    file.write_text("b:1\na:1\nb:1\n")
    assert read_hostfile(file) == (Host("b", 2), Host("a", 1))


def test_hosts_with_several_lines_are_known_with_their_lines(file):
    file.write_text("a slots=1\n# b\nb slots=1\nA slots=2\na\n")
    assert repeated(read_entries(file)) == {"a": ("line 1", "line 4", "line 5")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "u@a slots=1\na slots=1\n",
            "f: line 2: a has the user None here but 'u' in line 1: use one of them",
        ),
        (
            "a slots=1 max_slots=3\na max_slots=2\n",
            "f: line 2: a has max_slots=2 here but 3 before: use one of them",
        ),
        (
            "a slots=2 max_slots=3\na slots=2\n",
            "f: line 2: the slots of a add up to 4, more than its max_slots=3: "
            "lower the slots, or raise max_slots",
        ),
    ],
)
def test_lines_that_contradict_each_other_are_an_error(text, message):
    entries = parse_hostfile(text, "f")
    with pytest.raises(HostfileError, match=f"^{re.escape(message)}$"):
        merged(entries, "f")
