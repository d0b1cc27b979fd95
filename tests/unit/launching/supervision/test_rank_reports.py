"""Ranks whose reports come one after another are shown at one moment."""

import asyncio
import json

import pytest

from hvkit.launching.supervision.rank_output import Style
from hvkit.launching.supervision.run_status import RankReports, at_one_moment
from hvkit.launching.supervision.supervisor import Supervisor, _Rank
from hvkit.watch import heartbeat
from hvkit.watch.calls import Status


def steps(ranks, now):
    return [each.get("step") for each in at_one_moment(ranks, now)]


def test_all_ranks_are_shown_at_the_newest_second_that_all_have_reported():
    first, second = RankReports(), RankReports()
    for now in range(100, 104):
        first.take({"step": now}, now + 0.001, now + 0.002, 0.0)
        # The other's report of this second is on its way.
        assert steps([first, second], now + 0.01)[1:] == [now - 1 if now > 100 else None]
        if now > 100:
            assert steps([first, second], now + 0.01) == [now - 1, now - 1]
        second.take({"step": now}, now, now + 0.4, 0.0)
        assert steps([first, second], now + 0.5) == [now, now]


@pytest.mark.parametrize("ahead", [-3600.3, 0.2, 7e5])
def test_a_host_with_another_clock_reports_seconds_of_this_one(ahead):
    here, there = RankReports(), RankReports()
    for now in range(100, 104):
        here.take({"step": now}, now, now + 0.01, 0.0)
        there.take({"step": now + 50}, now + ahead, now + (0.01 if now == 101 else 0.3), 0.0)
    here.take({"step": 104}, 104, 104.01, 0.0)
    assert steps([here, there], 104.1) == [103, 153]


def test_a_rank_that_is_silent_delays_no_other():
    silent, other = RankReports(), RankReports()
    for now in range(100, 110):
        other.take({"step": now}, now, now, 0.0)
        if now < 103:
            silent.take({"step": now}, now, now, 0.0)
    assert steps([silent, other], 109.5) == [102, 109]


def test_reports_of_one_second_have_one_time_however_late_they_came():
    first, second = RankReports(), RankReports()
    for now in (100, 101):
        first.take({}, now, now + 0.01, 7.01 + now)
        second.take(
            {}, now, now + (0.01 if now == 100 else 0.4), 7.4 + now - (0.39 if now == 100 else 0)
        )
    assert [each["at"] for each in at_one_moment([first, second], 101.5)] == pytest.approx(
        [108] * 2
    )


def test_a_rank_that_has_not_reported_is_shown_without_a_step():
    other = RankReports()
    other.take({"step": 3}, 100, 100, 0.0)
    assert steps([RankReports(), other], 100.5) == [None, 3]
    assert steps([RankReports()], 100.5) == [None]


def test_the_state_of_a_run_shows_running_ranks_at_one_moment_and_ended_ones_at_their_end(
    monkeypatch,
):
    """Reports as ranks make them, of the same seconds, that come one after another."""
    sent = []
    monkeypatch.setattr(heartbeat, "report", lambda **values: sent.append(values))

    def report(supervisor, rank, now, step):
        monkeypatch.setattr(heartbeat.time, "time", lambda: now)
        monkeypatch.setattr(heartbeat.calls, "last_step", lambda: step)
        heartbeat.report_now(Status())
        supervisor._take_report(supervisor._ranks[rank], json.dumps(sent.pop()).encode())

    async def states():
        supervisor = Supervisor(2, b"k" * 32, Style(), None, lambda: None)
        for rank in range(2):
            supervisor._ranks[rank] = _Rank(rank, "a", None, None, None)
            supervisor._connected.add(rank)
        report(supervisor, 0, 100.0, 10)
        report(supervisor, 1, 100.0, 10)
        report(supervisor, 0, 101.0, 90)
        yield [each["step"] for each in supervisor.state()["ranks"]]
        report(supervisor, 1, 101.0, 91)
        yield [each["step"] for each in supervisor.state()["ranks"]]
        report(supervisor, 0, 101.3, 120)  # its end
        supervisor._connected.discard(0)
        yield [each["step"] for each in supervisor.state()["ranks"]]
        supervisor.writer.close()

    async def collected():
        return [each async for each in states()]

    assert asyncio.run(collected()) == [[10, 10], [90, 91], [120, 91]]


@pytest.mark.parametrize(("now", "left"), [(1e9 + 0.25, 0.75), (1e9, 1.0), (1e9 + 0.999, 0.001)])
def test_ranks_report_at_the_full_seconds_of_the_clock(now, left):
    assert heartbeat._until_next(now) == pytest.approx(left, abs=1e-6)
