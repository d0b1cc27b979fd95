"""When a run that failed is started again."""

from dataclasses import replace

import pytest

from hvkit.launching.restarts import Restarts
from hvkit.launching.supervision.supervised_run import Outcome
from hvkit.launching.supervision.tracebacks import Raised

FAILED = Outcome(1, "rank 1 on node2 ended with exit status 1", restartable=True)


def test_without_restarts_the_first_failure_ends_the_run():
    assert not Restarts(0).again(FAILED)


def test_a_script_that_always_fails_stops_soon():
    restarts = Restarts(3)
    assert [restarts.again(FAILED) for _ in range(5)] == [True, True, True, False, False]
    assert restarts.made == 3


WRONG = Raised("SyntaxError", (("train.py", 3),))


@pytest.mark.parametrize("wrong", [WRONG, Raised("ValueError", (("train.py", 3),), refused=True)])
def test_the_same_exception_of_the_same_line_before_any_step_ends_the_run(wrong):
    restarts = Restarts(9)
    assert restarts.again(replace(FAILED, raised=wrong))
    assert not restarts.again(replace(FAILED, raised=wrong))
    assert restarts.end == (
        f"gives up: {wrong.kind} at train.py:3 again, before any step: "
        "another restart would not help"
    )


@pytest.mark.parametrize("kind", ["ConnectionRefusedError", "RuntimeError", "ValueError"])
def test_an_exception_that_may_pass_does_not_end_the_run(kind):
    restarts = Restarts(5)
    passing = replace(FAILED, raised=Raised(kind, (("train.py", 3), ("/lib/socket.py", 836))))
    assert [restarts.again(passing) for _ in range(6)] == [True] * 5 + [False]


@pytest.mark.parametrize(
    "other",
    [
        None,
        Raised("OSError", (("train.py", 3),)),
        Raised("SyntaxError", (("train.py", 4),)),
    ],
)
def test_another_exception_between_two_of_a_line_allows_more_restarts(other):
    restarts = Restarts(9)
    assert all(restarts.again(replace(FAILED, raised=each)) for each in [WRONG, other] * 3)


def test_a_run_that_gets_further_goes_on():
    restarts = Restarts(2)
    assert all(restarts.again(replace(FAILED, saved=step)) for step in range(0, 100, 10))
    assert restarts.again(replace(FAILED, saved=90))
    assert not restarts.again(replace(FAILED, saved=90))


def test_progress_counts_from_the_newest_checkpoint():
    restarts = Restarts(1)
    assert restarts.again(replace(FAILED, saved=50))
    # Resumed from an older one, because the newest was damaged.
    assert not restarts.again(replace(FAILED, saved=40))


def test_a_run_that_has_gone_back_goes_on_while_it_gets_further():
    restarts = Restarts(3)
    for step in (4200, *range(3000, 5000, 100)):
        assert restarts.again(replace(FAILED, saved=step))


def test_a_run_that_goes_back_again_and_again_stops():
    restarts = Restarts(3)
    again = [restarts.again(replace(FAILED, saved=step)) for step in [50, 40] * 4]
    assert again[:5] == [True] * 5
    assert not all(again)


@pytest.mark.parametrize("status", [0, 143])
def test_what_another_try_cannot_change_is_final(status):
    assert not Restarts(3).again(Outcome(status))


def test_leaving_after_sigterm_is_no_failure():
    restarts = Restarts(1)
    left = replace(FAILED, status=143, preempted=True)
    assert all(restarts.again(replace(left, saved=step)) for step in range(10))
    assert restarts.pause == 1
    assert restarts.budget == "restart 10 (not counted)"
    assert restarts.again(FAILED)
    assert restarts.budget == "restart 11 (1 of at most 1 without a newer checkpoint)"
    assert not restarts.again(FAILED)


def test_a_run_that_leaves_without_a_newer_checkpoint_stops_soon():
    restarts = Restarts(1)
    left = replace(FAILED, status=143, preempted=True, saved=7)
    assert [restarts.again(left) for _ in range(3)] == [True, True, False]


def test_pauses_grow_while_there_is_no_progress():
    restarts = Restarts(20)
    pauses = [restarts.again(FAILED) and restarts.pause for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert restarts.again(replace(FAILED, saved=1))
    assert restarts.pause == 1


def test_pauses_stay_short_however_many_restarts_there_were():
    restarts = Restarts(3000)
    assert all(restarts.again(FAILED) for _ in range(2000))
    assert restarts.pause == 60
