"""Rank 0's end of the copies: which hosts get them, and what it says of those that do not."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest

from hvkit.checkpoint import replicas, store
from hvkit.checkpoint.replicas import Replicas


@pytest.fixture
def saved(tmp_path):
    saved = tmp_path / store.name_of(7)
    saved.mkdir()
    (saved / "a").write_bytes(b"abc")
    facts = {"a": store.facts_of(saved / "a")}
    store.Manifest(0, 7, 0, 2, 1, {}, {}, facts, {}).write(saved)
    return saved


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
    threading.Thread(target=replicas.keep, args=(far, folder), daemon=True).start()
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
    replicas._hold(None, tmp_path / "run" / "a")
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
