"""Whole hostfiles: their bytes, their one form, and hosts that are named again."""

import re
from pathlib import Path

import pytest

from hvkit.errors import HostfileError
from hvkit.launch.hostfile import parse_hostfile, read_entries, read_hostfile
from hvkit.launch.hosts import Host, merged, repeated


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "hosts"


def _refused(file: Path, data: bytes) -> str:
    file.write_bytes(data)
    with pytest.raises(HostfileError) as error:
        read_hostfile(file)
    return str(error.value).removeprefix(f"{file}: ")


def test_comments_blank_lines_and_line_ends_of_any_system_are_read_over(file):
    file.write_bytes(b"\xef\xbb\xbf# all\r\n\r\n   \nnode1 slots=2\r\n\t# more\n\nnode2 slots=2")
    assert read_hostfile(file) == (Host("node1", 2), Host("node2", 2))


def test_a_bare_name_leaves_the_slots_to_the_launcher_as_open_mpi_does(file):
    file.write_text("node1\nnode2 slots=2\n")
    assert read_hostfile(file) == (Host("node1"), Host("node2", 2))


def test_a_bare_name_is_one_slot_as_mpich_has_it(file):
    file.write_text("node1\nnode2:2\nnode3\n")
    assert read_hostfile(file) == (Host("node1", 1), Host("node2", 2), Host("node3", 1))


@pytest.mark.parametrize("data", [b"", b"\n\n", b"# nothing\n", b"\xef\xbb\xbf"])
def test_a_file_without_hosts_is_an_error(file, data):
    expected = "names no host: write a line for each, `node1 slots=2`"
    assert _refused(file, data) == expected


def test_bytes_that_are_no_text_are_an_error_with_their_line(file):
    assert _refused(file, b"node1\nno\0de2\n") == "line 2: is not text: it has a zero byte"
    assert _refused(file, b"node1\n\nh\xf6st\n") == (
        "line 3: is not UTF-8 text: it has the byte 0xf6"
    )


def test_a_file_far_larger_than_a_hostfile_is_not_read_on(file):
    with file.open("wb") as sparse:
        sparse.truncate(2**40)
    with pytest.raises(HostfileError, match="is not a hostfile: larger than 16 MiB"):
        read_hostfile(file)


def test_a_file_that_is_not_there_or_none_is_an_error(tmp_path):
    with pytest.raises(HostfileError, match=re.escape("hosts: cannot be read: No such file")):
        read_hostfile(tmp_path / "hosts")
    with pytest.raises(HostfileError, match="cannot be read: Is a directory"):
        read_hostfile(tmp_path)


def test_the_first_line_that_tells_decides_on_the_form_of_all(file):
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


def test_who_asks_learns_which_hosts_are_named_again_and_where(file):
    file.write_text("a slots=1\n# b\nb slots=1\nA slots=2\na\n")
    assert repeated(read_entries(file)) == {"a": ("line 1", "line 4", "line 5")}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "u@a slots=1\na slots=1\n",
            "f: line 2: a has the user None here and 'u' in line 1: name one",
        ),
        (
            "a slots=1 max_slots=3\na max_slots=2\n",
            "f: line 2: a has max_slots=2 here and 3 before: name one",
        ),
        (
            "a slots=2 max_slots=3\na slots=2\n",
            "f: line 2: the slots of a add up to 4, more than its max_slots=3",
        ),
    ],
)
def test_lines_that_contradict_each_other_are_an_error(text, message):
    entries = parse_hostfile(text, "f")
    with pytest.raises(HostfileError, match=f"^{re.escape(message)}$"):
        merged(entries, "f")
