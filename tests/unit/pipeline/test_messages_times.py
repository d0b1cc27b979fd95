"""The time in which a rank of a pipeline computes is no wait."""

import pytest

from hvkit.pipeline import messages
from hvkit.pipeline.messages import StageTimes
from hvkit.watch import calls
from hvkit.watch.spans import WAITING, observe


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Advances by hand."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    found = Clock()
    for module in (messages, calls):
        monkeypatch.setattr(module, "time", found)
    return found


@pytest.fixture
def seen():
    spans = []
    observe(spans.append)
    yield spans
    observe(spans.append, on=False)


def test_the_bubble_is_what_a_rank_does_not_compute_in_its_passes(clock):
    times = StageTimes()
    clock.now = 100.0
    for wait in (1.0, 3.0):
        with times.passing():
            with times.computing("forward", 0, 1):
                clock.now += 8
            clock.now += wait
        clock.now += 50  # the optimizer's step
    assert times.bubble == pytest.approx(4 / 20)


def test_it_begins_anew_within_a_pass(clock):
    times = StageTimes()
    with times.passing():
        clock.now += 7
        times.begin()
        with times.computing("forward", 0, 1):
            clock.now += 1
        clock.now += 1
    assert times.bubble == pytest.approx(0.5)
    assert StageTimes().bubble == 0


def test_a_timeline_shows_what_is_computed_inside_of_a_wait(clock, seen):
    times = StageTimes()
    with calls.waiting((0, 1)):
        clock.now += 1
        with times.computing("backward", 3, 1):
            assert not calls.status().waits
            clock.now += 2
            with calls.waiting((1, 2)):
                clock.now += 4
        assert calls.status().waits
        assert calls.status().ranks == (0, 1)
        clock.now += 8
    assert [(s.name, s.begun, s.ended) for s in seen] == [
        (WAITING, 0, 1),
        (WAITING, 3, 7),
        ("backward 3 of stage 1", 1, 7),
        (WAITING, 7, 15),
    ]
