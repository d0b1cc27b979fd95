"""When a run that failed is started again."""

from dataclasses import replace

import pytest

from hvkit.launching.start import Restarts
from hvkit.launching.supervision.supervised_run import Outcome
from hvkit.launching.supervision.tracebacks import Raised

FAILED = Outcome(1, "rank 1 on node2 ended with exit status 1", restartable=True)
WRONG = Raised("SyntaxError", (("train.py", 3),))


def decisions(restarts, *outcomes, **changes):
    return [restarts.again(replace(each, **changes)) for each in outcomes]


def after_steps(restarts, steps):
    """Whether there is a restart after each failure, with this newest checkpoint."""
    return [restarts.again(replace(FAILED, saved=step)) for step in steps]


def test_a_script_that_always_fails_stops_soon():
    assert not Restarts(0).again(FAILED)
    restarts = Restarts(3)
    assert decisions(restarts, *[FAILED] * 5) == [True, True, True, False, False]
    assert restarts.made == 3


@pytest.mark.parametrize("wrong", [WRONG, Raised("ValueError", WRONG.lines, refused=True)])
def test_the_same_exception_of_the_same_line_before_any_step_ends_the_run(wrong):
    restarts = Restarts(9)
    assert decisions(restarts, FAILED, FAILED, raised=wrong) == [True, False]
    assert restarts.end == (
        f"gives up: {wrong.name} at train.py:3 again, before any step: "
        "another restart would not help"
    )


@pytest.mark.parametrize("kind", ["ConnectionRefusedError", "RuntimeError", "ValueError"])
def test_an_exception_that_may_pass_does_not_end_the_run(kind):
    passing = Raised(kind, (("train.py", 3), ("/lib/socket.py", 836)))
    assert decisions(Restarts(5), *[FAILED] * 6, raised=passing) == [True] * 5 + [False]


@pytest.mark.parametrize(
    "other", [None, Raised("OSError", WRONG.lines), Raised("SyntaxError", (("train.py", 4),))]
)
def test_another_exception_between_two_of_a_line_allows_more_restarts(other):
    between = [replace(FAILED, raised=each) for each in [WRONG, other] * 3]
    assert all(decisions(Restarts(9), *between))


@pytest.mark.parametrize(
    ("most", "steps", "expected"),
    [
        # While it gets further, it goes on.
        (2, [*range(0, 100, 10), 90, 90], [True] * 11 + [False]),
        # Resumed from an older one, because the newest was damaged.
        (1, [50, 40], [True, False]),
        (3, [4200, *range(3000, 5000, 100)], [True] * 21),
        (3, [50, 40] * 4, [True] * 5 + [False] * 3),
    ],
)
def test_progress_counts_from_the_newest_checkpoint(most, steps, expected):
    assert after_steps(Restarts(most), steps) == expected


@pytest.mark.parametrize("status", [0, 143])
def test_success_and_leaving_without_a_checkpoint_are_final(status):
    assert not Restarts(3).again(Outcome(status))


def test_leaving_after_sigterm_is_no_failure_if_there_is_a_newer_checkpoint():
    restarts = Restarts(1)
    left = replace(FAILED, status=143, preempted=True)
    assert all(restarts.again(replace(left, saved=step)) for step in range(10))
    assert (restarts.pause, restarts.budget) == (1, "restart 10 (not counted)")
    assert restarts.again(FAILED)
    assert restarts.budget == "restart 11 (1 of at most 1 without a newer checkpoint)"
    assert not restarts.again(FAILED)
    assert decisions(Restarts(1), left, left, left, saved=7) == [True, True, False]


def test_pauses_grow_while_there_is_no_progress():
    restarts = Restarts(3000)
    pauses = [restarts.again(FAILED) and restarts.pause for _ in range(8)]
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert all(decisions(restarts, *[FAILED] * 2000))
    assert restarts.pause == 60
    assert restarts.again(replace(FAILED, saved=1))
    assert restarts.pause == 1
