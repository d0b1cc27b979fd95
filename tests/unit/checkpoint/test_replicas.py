"""What a host that keeps copies of checkpoints accepts."""

import multiprocessing
import os
import threading

import pytest

from hvkit.checkpoint import replicas, store

NAME = store.name_of(7)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hvkit-run-0123456789abcdef" / "a"


def take(folder, order, *pieces):
    near, far = multiprocessing.Pipe()
    for piece in pieces:
        far.send_bytes(piece)
    far.close()
    try:
        return replicas._take(near, folder, order)
    finally:
        near.close()


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"name": NAME},
        {"name": "../a", "files": {"a": 1}},
        {"name": f"{NAME}/..", "files": {"a": 1}},
        {"name": f"{NAME}.old", "files": {"a": 1}},
        {"name": ".lock", "files": {}},
        {"name": 7, "files": {}},
        {"name": NAME, "files": ["a"]},
        {"name": NAME, "files": {"../a": 1}},
        {"name": NAME, "files": {"/etc/a": 1}},
        {"name": NAME, "files": {"..": 1}},
        {"name": NAME, "files": {"": 1}},
        {"name": NAME, "files": {"a": -1}},
        {"name": NAME, "files": {"a": True}},
        {"name": NAME, "files": {"a": "1"}},
    ],
)
def test_an_order_that_is_none_is_refused_and_writes_nothing(order, folder):
    with pytest.raises(ValueError, match="no checkpoint"):
        take(folder, order, b"a")
    assert list(folder.parent.parent.iterdir()) == []


def test_one_that_breaks_off_leaves_the_one_before(folder):
    assert take(folder, {"name": NAME, "files": {"a": 3, "b": 0}}, b"ab", b"c") == ""
    assert (folder / NAME / "a").read_bytes() == b"abc"
    assert (folder / NAME / "b").read_bytes() == b""
    with pytest.raises(EOFError):
        take(folder, {"name": store.name_of(8), "files": {"a": 3}}, b"ab")
    assert [path.name for path in folder.glob("*step*")] == [NAME]


def test_more_bytes_than_were_promised_are_an_error(folder):
    with pytest.raises(ValueError, match="more than"):
        take(folder, {"name": NAME, "files": {"a": 1}}, b"ab")
    assert list(folder.glob("*step*")) == []


def test_what_cannot_be_written_is_read_to_its_end(folder):
    """The next order would otherwise begin in the middle of this one."""
    near, far = multiprocessing.Pipe()
    folder.parent.mkdir(mode=0o755)
    answers = []
    holder = threading.Thread(
        target=lambda: answers.append(
            replicas._take(near, folder, {"name": NAME, "files": {"a": 2}})
        )
    )
    holder.start()
    for piece in (b"a", b"b", b"next"):
        far.send_bytes(piece)
    holder.join(10)
    assert "not a folder of this user alone" in answers[0]
    assert near.recv_bytes() == b"next"


def test_the_folder_is_for_its_user_alone(folder):
    take(folder, {"name": NAME, "files": {"a": 1}}, b"a")
    assert os.stat(folder.parent).st_mode & 0o777 == 0o700
