"""Copies of a checkpoint in the memory of other hosts: what these accept, and what rank 0 says."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hvkit.checkpoint import replicas, store
from hvkit.checkpoint.replicas import Replicas
from hvkit.watch import channel

NAME = store.name_of(7)


def files_of(**contents):
    """The files of a checkpoint, with their manifest."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in contents.items():
            (folder / file).write_bytes(data)
        facts = {file: store.facts_of(folder / file) for file in contents}
        store.Manifest(0, 7, 0, 2, 1, {}, {}, facts, {}).write(folder)
        return {**contents, store.MANIFEST: (folder / store.MANIFEST).read_bytes()}


FILES = files_of(a=b"abc", b=b"")
SOME = {"name": NAME, "files": {file: len(data) for file, data in FILES.items()}}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "hvkit-run-0123456789abcdef" / "a"


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of rank 0."""
    saved = tmp_path / NAME
    saved.mkdir()
    for name, data in FILES.items():
        (saved / name).write_bytes(data)
    return saved


def take(folder, order, *pieces, ends=False):
    """A holder takes what rank 0 sends before it ends, or while it waits for an answer."""
    near, far = multiprocessing.Pipe()
    channel.send(far, order)
    for piece in pieces:
        far.send_bytes(piece)
    if ends:
        far.close()
    with near:
        replicas.receive_checkpoint(near, folder)


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
    with pytest.raises(replicas.LinkError, match="no checkpoint"):
        take(folder, order, b"a")
    assert list(folder.parent.parent.iterdir()) == []


def test_one_that_breaks_off_leaves_the_one_before(folder):
    take(folder, SOME, b"ab", b"c", FILES[store.MANIFEST])
    assert (folder / NAME / "a").read_bytes() == b"abc"
    assert (folder / NAME / "b").read_bytes() == b""
    assert os.stat(folder.parent).st_mode & 0o777 == 0o700  # for its user alone
    with pytest.raises(replicas.LinkError, match="has closed the connection"):
        take(folder, {"name": store.name_of(8), "files": {"a": 3}}, b"ab", ends=True)
    assert [path.name for path in folder.glob("*step*")] == [NAME]


def test_more_bytes_than_were_promised_are_an_error(folder):
    with pytest.raises(replicas.LinkError, match="sent 1 bytes more of a than"):
        take(folder, {"name": NAME, "files": {"a": 1}}, b"ab")
    assert list(folder.glob("*step*")) == []


def test_hvkit_run_knows_of_a_folder_before_it_is_there(folder, monkeypatch):
    """It deletes those that it knows of, also if the run ends while the first copy arrives."""
    seen = []
    monkeypatch.setattr(
        replicas, "report", lambda **values: seen.append((values, folder.parent.exists()))
    )
    with pytest.raises(replicas.LinkError):
        take(folder, SOME, ends=True)
    assert seen == [({"replica": True}, False)]
    assert folder.is_dir()


class Ends:
    """Both ends of a connection, and what rank 0 has sent through it."""

    def __init__(self, folder):
        self.rank_0, holder = multiprocessing.Pipe()
        self.sent = []
        send_bytes = self.rank_0.send_bytes
        self.rank_0.send_bytes = lambda data: (self.sent.append(bytes(data)), send_bytes(data))
        self.holder = threading.Thread(
            target=replicas.receive_checkpoints, args=(holder, folder), daemon=True
        )
        self.holder.start()


def test_a_checkpoint_arrives_and_a_damaged_one_leaves_the_one_before(folder, saved):
    ends = Ends(folder)
    assert replicas.send_checkpoint(ends.rank_0, saved) == ""
    assert {path.name: path.read_bytes() for path in (folder / NAME).iterdir()} == FILES
    (saved / "a").write_bytes(b"abd")
    assert replicas.send_checkpoint(ends.rank_0, saved) == (
        "what rank 0 has sent is damaged: a is not what was written: its sha256 differs"
    )
    assert (folder / NAME / "a").read_bytes() == b"abc"
    ends.rank_0.close()
    ends.holder.join(10)
    assert not ends.holder.is_alive()


@pytest.mark.parametrize("of", ["hvkit.host.hardware.psutil.virtual_memory", "shutil.disk_usage"])
def test_a_host_without_room_is_sent_no_bytes_until_it_has_some(of, folder, saved, monkeypatch):
    ends = Ends(folder)
    with monkeypatch.context() as full:
        full.setattr(of, lambda *path: SimpleNamespace(available=3, free=3))
        assert replicas.send_checkpoint(ends.rank_0, saved) == (
            f"it has {sum(map(len, FILES.values()))} bytes, and 3 bytes of memory are free there, "
            "of which hvkit uses at most 90%"
        )
    assert [json.loads(each)["name"] for each in ends.sent] == [NAME]
    assert replicas.send_checkpoint(ends.rank_0, saved) == ""


def test_a_folder_of_others_takes_no_copy(folder, saved):
    folder.parent.mkdir(mode=0o755)
    ends = Ends(folder)
    problem = replicas.send_checkpoint(ends.rank_0, saved)
    assert problem == f"it is no folder that only you can enter ({folder.parent})"
    assert len(ends.sent) == 1


def test_a_checkpoint_that_cannot_be_written_is_read_to_its_end(folder, saved, monkeypatch):
    """The next order would otherwise begin in the middle of this one."""
    ends = Ends(folder)
    with monkeypatch.context() as full:
        no_space = Mock(side_effect=OSError(28, "No space left on device"))
        full.setattr(store, "new_folder", no_space)
        problem = replicas.send_checkpoint(ends.rank_0, saved)
    assert problem == f"No space left on device ({folder.parent})"
    assert replicas.send_checkpoint(ends.rank_0, saved) == ""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (BlockingIOError(11, "Resource temporarily unavailable"), "has not answered for 60 s"),
        (ConnectionResetError(104, "Connection reset by peer"), "has closed the connection"),
        (OSError(113, "No route to host"), "cannot be reached any more .No route to host."),
    ],
)
def test_errors_of_the_connection_are_not_those_of_the_memory(error, said, folder):
    connection = Mock()
    connection.recv_bytes.side_effect = [json.dumps(SOME).encode(), error]
    with pytest.raises(replicas.LinkError, match=said):
        replicas.receive_checkpoint(connection, folder)
    assert list(folder.glob("*step*")) == []


def test_an_answer_that_is_none(saved):
    near, far = multiprocessing.Pipe()
    channel.send(far, {"answer": 1})
    with pytest.raises(replicas.LinkError, match="sent something that is no answer"):
        replicas.send_checkpoint(near, saved)


def test_a_checkpoint_that_rank_0_cannot_read_is_an_error_of_files(saved):
    near, _ = multiprocessing.Pipe()
    shutil.rmtree(saved)
    with pytest.raises(FileNotFoundError):
        replicas.send_checkpoint(near, saved)


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Of rank 0, which waits for ranks 1 and 2 on two other hosts."""
    monkeypatch.setattr(replicas, "_CONNECTED", 0.01)
    copies = Replicas(tmp_path, 2)
    copies._hosts = {1: "node2", 2: "node3"}
    copies._listener = Mock()
    return copies


def holder(folder):
    """Rank 0's end of a connection to a holder."""
    near, far = multiprocessing.Pipe()
    threading.Thread(target=replicas.receive_checkpoints, args=(far, folder), daemon=True).start()
    return near


def kept(folder):
    return sorted(path.name for path in folder.glob("step-*"))


def test_a_holder_that_connects_late_gets_the_next_one(copies, saved, tmp_path, caplog):
    listener = copies._listener
    one, two = tmp_path / "run1" / "a", tmp_path / "run2" / "a"
    copies._admit(1, holder(one))
    for _ in range(2):
        copies.send(saved)
    assert (kept(one), kept(two)) == ([saved.name], [])
    assert [each.getMessage() for each in caplog.records] == [
        f"node3 keeps no copy of {saved}: rank 2 there has not connected yet; once it has, it gets "
        "the next"
    ]
    listener.close.assert_not_called()
    copies._admit(2, holder(two))
    listener.close.assert_called_once()
    copies.send(saved)
    assert kept(two) == [saved.name]
    assert len(caplog.records) == 1


def test_a_holder_that_has_gone_is_named_and_the_other_goes_on(copies, saved, tmp_path, caplog):
    listener = copies._listener
    near, far = multiprocessing.Pipe()
    far.close()
    copies._admit(1, near)
    copies.send(saved)
    assert caplog.records[0].getMessage() == (
        f"node2 keeps no copy of {saved}: rank 1 there has closed the connection; it gets no more "
        "copies until a restart"
    )
    copies._admit(2, holder(tmp_path / "run2" / "a"))
    copies.send(saved)
    assert kept(tmp_path / "run2" / "a") == [saved.name]
    listener.close.assert_called_once()
    assert len(caplog.records) == 2  # the other one was late


def test_nobody_listens_when_every_holder_has_gone(copies, saved):
    listener = copies._listener
    del copies._hosts[2]
    copies._links[1], far = multiprocessing.Pipe()
    far.close()
    copies.send(saved)
    listener.close.assert_called_once()


def test_a_checkpoint_that_rank_0_cannot_read_again(copies, saved, tmp_path, caplog):
    del copies._hosts[2]
    copies._admit(1, holder(tmp_path / "run1" / "a"))
    copies.send(tmp_path / "gone")
    assert [each.getMessage() for each in caplog.records] == [
        f"node2 keeps no copy of {tmp_path}/gone: rank 0 cannot read it again (No such file or "
        "directory); it gets no more copies until a restart"
    ]


def test_a_holder_tries_again_until_it_reaches_rank_0(tmp_path, monkeypatch):
    near, far = multiprocessing.Pipe()
    near.close()
    answers = iter([None, None, far])
    monkeypatch.setattr(replicas, "_AGAIN", 0.0)
    monkeypatch.setattr(replicas.channel, "connect", lambda *_: next(answers))
    replicas._receive_from_rank_0(None, tmp_path / "run" / "a")
    assert far.closed


LEAVES = """
import multiprocessing, sys, threading
from pathlib import Path
from hvkit.checkpoint.replicas import Replicas
from hvkit.watch import preemption
preemption._SAME = 0.0
preemption.PREEMPTION.handle_sigterm()
copies = Replicas(Path("saved"), 1)
copies._hosts = {1: "node2"}
copies._links[1], other = multiprocessing.Pipe()
if sys.argv[2] == "thread":
    sending = threading.Thread(target=copies.send, args=[Path(sys.argv[1])])
    sending.start()
    wait = sending.join
else:
    wait = lambda: copies.send(Path(sys.argv[1]))
threading.Thread(target=lambda: (other.recv_bytes(), print("sends", flush=True))).start()
wait()
"""


@pytest.mark.parametrize("where", ["thread", "main"])
def test_a_second_sigterm_ends_a_rank_that_still_sends(where, saved):
    with subprocess.Popen(
        [sys.executable, "-c", LEAVES, str(saved), where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "sends\n"
        os.kill(process.pid, signal.SIGTERM)
        assert "leaves as soon as all ranks have saved" in process.stderr.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) in (143, -signal.SIGTERM)
