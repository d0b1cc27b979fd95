"""Watchers, with this process as the other rank."""

import functools
import os
import queue
import threading
import time
from multiprocessing import Pipe

import pytest
from cases import MORE, cases

from hvkit.watch import channel, watcher
from hvkit.watch.calls import Status
from hvkit.watch.diagnosis import Limits
from hvkit.watch.preemption import Preemption, StepAgreement
from hvkit.watch.watcher import Hub, Reporter

WAITS = Status("hvkit.average", "average", 3, "", True, 6.0, "train.py:41")


@pytest.fixture
def hub(monkeypatch):
    """Rank 0 of two, and what it does to Horovod and prints."""
    shut_down, printed = [], []
    hub = Hub(2, Limits(60, 1800), lambda: shut_down.append(True), one_host=True)
    monkeypatch.setattr(os, "write", lambda to, text: printed.append(text.decode()))
    hub.start()
    yield hub, shut_down, printed
    hub._over.set()
    hub.stop()


def answer(connection, status, seconds):
    """Reply to every question for so long; the other messages, and the number of questions."""
    others, questions, end = [], 0, time.monotonic() + seconds
    while time.monotonic() < end and not others:
        if connection.poll(0.1):
            message = channel.receive_message(connection)
            if message == channel.StatusRequest():
                questions += 1
                channel.send_message(connection, status)
            else:
                others.append(message)
    return others, questions


@MORE
def test_a_wait_that_lasts_is_looked_at_once_a_second_however_fast_the_answers(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    other = channel.connect(rank_0.endpoint, 1)
    others, questions = answer(other, WAITS, seconds=4)
    assert not others
    assert 1 <= questions <= 5
    assert not shut_down
    assert not printed


def test_calls_that_do_not_match_are_printed_sent_to_all_and_end_horovod(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    other = channel.connect(rank_0.endpoint, 1)
    elsewhere = Status("backward()", "backward", 3, "", True, 6.0, "train.py:33")
    (end,), _ = answer(other, elsewhere, seconds=60)
    assert "rank 0 waits in hvkit.average (train.py:41); rank 1 waits in" in end.diagnosis
    assert rank_0._over.wait(60)
    assert shut_down == [True]
    assert printed == [f"hvkit: RankLostError: {end.diagnosis}\n"]
    assert rank_0.reason() == end.diagnosis


def test_a_rank_that_leaves_explains_why_the_wait_of_this_one_ended(hub):
    rank_0, *_ = hub
    other = channel.connect(rank_0.endpoint, 1)
    channel.send_message(other, channel.RankEnded(1, "failed with ValueError: x"))
    assert rank_0.reason().endswith("; rank 1 failed with ValueError: x")


def test_a_rank_that_ends_as_soon_as_it_has_begun_says_so_at_once(request, monkeypatch):
    monkeypatch.setattr(watcher, "_TICK", 60.0)  # longer than an error waits for its reason
    rank_0, *_ = request.getfixturevalue("hub")
    other = channel.connect(rank_0.endpoint, 1)
    channel.send_message(other, channel.RankEnded(1, "failed with ValueError: x"))
    assert rank_0.reason().endswith("; rank 1 failed with ValueError: x")


def test_rank_0_says_how_it_ends_also_within_its_first_second(hub):
    rank_0, *_ = hub
    other = channel.connect(rank_0.endpoint, 1)
    while not rank_0._connected:  # the connection is there, and the watcher's thread sleeps
        time.sleep(0.001)
    rank_0.failed("failed with ValueError: x", ends=False)
    rank_0.stop()
    assert channel.receive_message(other) == channel.RankEnded(0, "failed with ValueError: x")


def test_a_thread_of_hvkit_that_fails_on_rank_0_is_the_reason_on_the_others(hub):
    rank_0, *_ = hub
    other = channel.connect(rank_0.endpoint, 1)
    while not rank_0._peers:
        time.sleep(0.001)
    rank_0.thread_failed("failed in its thread hvkit-watch with ValueError: x")
    how = "failed in its thread hvkit-watch with ValueError: x"
    assert channel.receive_message(other) == channel.RankEnded(0, how)


def test_a_rank_that_dies_without_a_word_is_said_to_have(hub):
    rank_0, *_ = hub
    channel.connect(rank_0.endpoint, 1).close()
    assert rank_0.reason().endswith("; rank 1 died without reporting an error")


def test_a_rank_that_has_ended_does_not_blame_another_that_ends_because_of_it(monkeypatch):
    causes = []
    monkeypatch.setattr(watcher, "report", lambda **values: causes.append(values))
    listener = channel.RankListener(one_host=True)
    admitted = queue.SimpleQueue()
    threading.Thread(target=listener.serve, args=(lambda *who: admitted.put(who),)).start()
    rank_1 = Reporter(1, Limits(60, 1800), lambda: None)
    watching = threading.Thread(target=rank_1._run, args=(listener.endpoint,))
    watching.start()
    _, connection = admitted.get(timeout=10)
    rank_1.stop()
    assert channel.receive_message(connection) == channel.RankEnded(1, watcher.END_OF_SCRIPT)
    connection.close()
    listener.close()
    watching.join(10)
    assert not watching.is_alive()
    assert causes == []


def test_rank_0_that_has_ended_passes_no_other_end_on(monkeypatch):
    causes = []
    monkeypatch.setattr(watcher, "report", lambda **values: causes.append(values))
    rank_0 = Hub(3, Limits(60, 1800), lambda: None, one_host=True)
    ends = {rank: Pipe() for rank in (1, 2)}
    rank_0._peers = {rank: own for rank, (own, _) in ends.items()}
    rank_0.stop()
    rank_0._end_of(1, "failed with HorovodInternalError")
    _, other = ends[2]
    assert channel.receive_message(other) == channel.RankEnded(0, watcher.END_OF_SCRIPT)
    assert not other.poll()
    assert causes == []


@pytest.fixture
def reporter(monkeypatch):
    """Rank 1's preemption, and the connection to it of a rank 0."""
    listener = channel.RankListener(one_host=True)
    admitted = queue.SimpleQueue()
    threading.Thread(target=listener.serve, args=(lambda *who: admitted.put(who),)).start()
    preemption = Preemption()
    preemption.several_ranks()
    monkeypatch.setattr(watcher, "PREEMPTION", preemption)
    monkeypatch.setattr(watcher, "_HOLDS_WITHIN", 1.5)
    decisions = queue.SimpleQueue()
    monkeypatch.setattr(preemption, "leave_at", decisions.put)
    monkeypatch.setattr(preemption, "give_up", lambda: decisions.put("gives up"))
    rank_1 = Reporter(1, Limits(60, 1800), lambda: None)
    rank_1.start(listener.endpoint)
    rank, connection = admitted.get(timeout=10)
    assert rank == 1
    yield preemption, connection, decisions
    rank_1.stop()
    listener.close()


def requests_to_leave(connection):
    while connection.poll(10):
        if channel.receive_message(connection) == channel.GotSigterm():
            return True
    return False


def test_a_rank_that_should_leave_goes_if_rank_0s_host_is_lost(reporter, monkeypatch):
    preemption, connection, decisions = reporter
    monkeypatch.setattr(channel, "is_acknowledged", lambda _: False)
    preemption.requested = True
    assert requests_to_leave(connection)
    assert decisions.get(timeout=10) == "gives up"


def test_a_rank_that_should_leave_waits_for_a_rank_0_that_is_busy(reporter):
    preemption, connection, decisions = reporter
    preemption.requested = True
    assert requests_to_leave(connection)
    with pytest.raises(queue.Empty):
        decisions.get(timeout=4)
    channel.send_message(connection, channel.HoldStep())
    channel.send_message(connection, channel.LeaveAt(7))
    assert decisions.get(timeout=10) == 7


@pytest.mark.parametrize(("lost", "decision"), cases([(True, "gives up"), (False, None)]))
def test_rank_0_waits_for_a_busy_rank_but_not_for_a_lost_host(hub, monkeypatch, lost, decision):
    preemption, decisions = Preemption(), queue.SimpleQueue()
    preemption.several_ranks()
    monkeypatch.setattr(watcher, "PREEMPTION", preemption)
    monkeypatch.setattr(StepAgreement, "PATIENCE", 0.5)
    monkeypatch.setattr(preemption, "leave_at", decisions.put)
    monkeypatch.setattr(preemption, "give_up", lambda: decisions.put("gives up"))
    monkeypatch.setattr(channel, "is_acknowledged", lambda _: not lost)
    other = channel.connect(hub[0].endpoint, 1)
    preemption.requested = True
    assert decisions.get(timeout=30) == decision
    messages = [channel.receive_message(other) for _ in range(2)]
    last = channel.HostLost() if lost else channel.LeaveAt(None)
    assert messages == [channel.HoldStep(), last]


def test_what_a_busy_process_has_not_read_is_acknowledged():
    listener = channel.RankListener(one_host=True)
    admitted = queue.SimpleQueue()
    serve = functools.partial(listener.serve, lambda *who: admitted.put(who))
    threading.Thread(target=serve).start()
    connection = channel.connect(listener.endpoint, 1)
    _, other = admitted.get(timeout=10)
    channel.send_message(connection, channel.GotSigterm())
    for _ in range(100):
        if channel.is_acknowledged(connection):
            break
        time.sleep(0.1)
    assert channel.is_acknowledged(connection)
    listener.close()
    other.close()
