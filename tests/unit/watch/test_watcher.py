"""Watchers, with this process as the other rank."""

import os
import queue
import threading
import time
from multiprocessing import Pipe

import pytest

from hvkit.watch import channel, watcher
from hvkit.watch.calls import Status
from hvkit.watch.diagnosis import Limits
from hvkit.watch.preemption import Preemption, StepAgreement
from hvkit.watch.watcher import Hub, Reporter

LIMITS = Limits(60, 1800)
WAITS = Status("hvkit.average", "average", 3, "", True, 6.0, "train.py:41")
FAILED = "failed with ValueError: x"


@pytest.fixture
def causes(monkeypatch):
    """What this process reports to ``hvkit run`` as the cause of the end."""
    causes = []
    monkeypatch.setattr(watcher, "report", lambda **values: causes.append(values.get("cause")))
    return causes


@pytest.fixture
def admitted():
    """What rank 0 listens with, and a queue of the ranks that it lets in, with connections."""
    listener = channel.RankListener(one_host=True)
    found = queue.SimpleQueue()
    threading.Thread(target=listener.serve, args=(lambda *who: found.put(who),)).start()
    yield listener, found
    listener.close()


@pytest.fixture
def tick():
    """Seconds between two looks of rank 0."""
    return 0.2


@pytest.fixture
def hub(monkeypatch, tick):
    """Rank 0 of two, and what it does to Horovod and prints."""
    shut_down, printed = [], []
    monkeypatch.setattr(watcher, "_TICK", tick)
    hub = Hub(2, LIMITS, lambda: shut_down.append(True), one_host=True)
    monkeypatch.setattr(os, "write", lambda to, text: printed.append(text.decode()))
    hub.start()
    yield hub, shut_down, printed
    hub._over.set()
    hub.stop()


@pytest.fixture
def decisions(monkeypatch):
    """This process's preemption, and a queue of what the watcher decides for it."""
    preemption, decisions = Preemption(), queue.SimpleQueue()
    preemption.several_ranks()
    monkeypatch.setattr(watcher, "PREEMPTION", preemption)
    monkeypatch.setattr(preemption, "leave_at", decisions.put)
    monkeypatch.setattr(preemption, "give_up", lambda: decisions.put("gives up"))
    return preemption, decisions


def answer(connection, status, seconds):
    """Reply to every question for so long; the other messages, and the number of questions."""
    others, questions, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end and not others:
        if connection.poll(0.02):
            message = channel.receive_message(connection)
            if message == channel.StatusRequest():
                questions += 1
                channel.send_message(connection, status)
            else:
                others.append(message)
    return others, questions


def test_a_wait_that_lasts_is_looked_at_once_a_tick_however_fast_the_answers(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    others, questions = answer(channel.connect(rank_0.endpoint, 1), WAITS, seconds=0.8)
    assert (others, shut_down, printed) == ([], [], [])
    assert 1 <= questions <= 5


def test_calls_that_do_not_match_are_printed_sent_to_all_and_end_horovod(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    elsewhere = Status("backward()", "backward", 3, "", True, 6.0, "train.py:33")
    other = channel.connect(rank_0.endpoint, 1)
    (end,), _ = answer(other, elsewhere, seconds=60)
    assert "rank 0 waits in hvkit.average (train.py:41); rank 1 waits in" in end.diagnosis
    assert rank_0._over.wait(60)
    assert shut_down == [True]
    assert printed == [f"hvkit: RankLostError: {end.diagnosis}\n"]
    assert rank_0.reason() == end.diagnosis


@pytest.mark.parametrize("tick", [60.0])  # longer than an error waits for its reason
def test_a_rank_that_leaves_as_soon_as_it_has_begun_explains_the_end_of_a_wait(hub):
    rank_0, *_ = hub
    other = channel.connect(rank_0.endpoint, 1)
    channel.send_message(other, channel.RankEnded(1, FAILED))
    assert rank_0.reason().endswith(f"; rank 1 {FAILED}")


@pytest.mark.parametrize("tick", [60.0])  # the watcher's thread sleeps
@pytest.mark.parametrize("in_thread", [False, True])
def test_rank_0_says_how_it_ends_also_within_its_first_second(hub, in_thread):
    rank_0, *_ = hub
    other = channel.connect(rank_0.endpoint, 1)
    while not (rank_0._peers if in_thread else rank_0._connected):
        time.sleep(0.001)
    if in_thread:
        rank_0.thread_failed(FAILED)
    else:
        rank_0.failed(FAILED, ends=False)
        rank_0.stop()
    assert channel.receive_message(other) == channel.RankEnded(0, FAILED)


def test_a_rank_that_dies_without_a_word_is_said_to_have(hub):
    rank_0, *_ = hub
    channel.connect(rank_0.endpoint, 1).close()
    assert rank_0.reason().endswith("; rank 1 died without reporting an error")


def test_a_rank_that_has_ended_does_not_blame_another_that_ends_because_of_it(admitted, causes):
    listener, found = admitted
    rank_1 = Reporter(1, LIMITS, lambda: None)
    watching = threading.Thread(target=rank_1._watch, args=(listener.endpoint,))
    watching.start()
    _, connection = found.get(timeout=10)
    rank_1.stop()
    assert channel.receive_message(connection) == channel.RankEnded(1, watcher.END_OF_SCRIPT)
    connection.close()
    watching.join(10)
    assert not watching.is_alive()
    assert causes == []


def test_rank_0_that_has_ended_passes_no_other_end_on(causes):
    rank_0 = Hub(3, LIMITS, lambda: None, one_host=True)
    ends = {rank: Pipe() for rank in (1, 2)}
    rank_0._peers = {rank: own for rank, (own, _) in ends.items()}
    rank_0.stop()
    rank_0._end_of(1, "failed with HorovodInternalError")
    _, other = ends[2]
    assert channel.receive_message(other) == channel.RankEnded(0, watcher.END_OF_SCRIPT)
    assert not other.poll()
    assert causes == []


@pytest.fixture
def leaving(admitted, decisions, monkeypatch):
    """The connection to a rank 1 that got SIGTERM, and what it decides."""
    monkeypatch.setattr(watcher, "_TICK", 0.02)
    monkeypatch.setattr(watcher, "_HOLDS_WITHIN", 0.1)
    listener, found = admitted
    rank_1 = Reporter(1, LIMITS, lambda: None)
    rank_1.start(listener.endpoint)
    rank, connection = found.get(timeout=10)
    assert rank == 1
    yield connection, decisions
    rank_1.stop()


def got_sigterm(connection):
    while connection.poll(10):
        if channel.receive_message(connection) == channel.GotSigterm():
            return True
    return False


def test_a_rank_that_should_leave_goes_if_rank_0s_host_is_lost(leaving, monkeypatch):
    connection, (preemption, decisions) = leaving
    monkeypatch.setattr(channel, "is_acknowledged", lambda _: False)
    preemption.requested = True
    assert got_sigterm(connection)
    assert decisions.get(timeout=10) == "gives up"


def test_a_rank_that_should_leave_waits_for_a_rank_0_that_is_busy(leaving):
    connection, (preemption, decisions) = leaving
    preemption.requested = True
    assert got_sigterm(connection)
    with pytest.raises(queue.Empty):
        decisions.get(timeout=0.5)
    channel.send_message(connection, channel.HoldStep())
    channel.send_message(connection, channel.LeaveAt(7))
    assert decisions.get(timeout=10) == 7


@pytest.mark.parametrize(("lost", "decision"), [(True, "gives up"), (False, None)])
def test_rank_0_waits_for_a_busy_rank_but_not_for_a_lost_host(
    hub, decisions, monkeypatch, lost, decision
):
    preemption, decided = decisions
    monkeypatch.setattr(StepAgreement, "PATIENCE", 0.1)
    monkeypatch.setattr(channel, "is_acknowledged", lambda _: not lost)
    other = channel.connect(hub[0].endpoint, 1)
    preemption.requested = True
    assert decided.get(timeout=30) == decision
    last = channel.HostLost() if lost else channel.LeaveAt(None)
    assert [channel.receive_message(other) for _ in range(2)] == [channel.HoldStep(), last]
