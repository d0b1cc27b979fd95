"""Rank 0's watcher, with this process as the other rank."""

import os
import time
from dataclasses import asdict

import pytest

from hvkit.watch import channel
from hvkit.watch.calls import Status
from hvkit.watch.verdict import Limits
from hvkit.watch.watcher import Hub

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
            message = channel.receive(connection)
            if "question" in message:
                questions += 1
                channel.send(connection, {"status": asdict(status)})
            else:
                others.append(message)
    return others, questions


def test_a_wait_that_lasts_is_looked_at_once_a_second_however_fast_the_answers(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    other = channel.connect(rank_0.meeting, 1)
    others, questions = answer(other, WAITS, seconds=4)
    assert not others
    assert 1 <= questions <= 5
    assert not shut_down
    assert not printed


def test_calls_that_do_not_match_are_printed_sent_to_all_and_end_horovod(hub, monkeypatch):
    rank_0, shut_down, printed = hub
    monkeypatch.setattr(rank_0, "_status", lambda **_: WAITS)
    other = channel.connect(rank_0.meeting, 1)
    elsewhere = Status("backward()", "backward", 3, "", True, 6.0, "train.py:33")
    (verdict,), _ = answer(other, elsewhere, seconds=60)
    assert "rank 0 waits in hvkit.average (train.py:41); rank 1 waits in" in verdict["verdict"]
    assert rank_0._over.wait(60)
    assert shut_down == [True]
    assert printed == [f"hvkit: RankLostError: {verdict['verdict']}\n"]
    assert rank_0.reason() == verdict["verdict"]


def test_a_rank_that_leaves_explains_why_the_wait_of_this_one_ended(hub):
    rank_0, *_ = hub
    other = channel.connect(rank_0.meeting, 1)
    channel.send(other, {"ended": "failed with ValueError: x", "rank": 1})
    assert rank_0.reason().endswith("; rank 1 failed with ValueError: x")


def test_a_rank_that_dies_without_a_word_is_said_to_have(hub):
    rank_0, *_ = hub
    channel.connect(rank_0.meeting, 1).close()
    assert rank_0.reason().endswith("; rank 1 died without reporting an error")
