"""What is said of ranks that wait, and when a run must end."""

import pytest

from hvkit.errors import LaunchError, ranks_text
from hvkit.watch.calls import Status
from hvkit.watch.diagnosis import MISMATCH_AFTER, Limits, diagnose
from hvkit.watch.rank_errors import SAME_CALLS

LONG = MISMATCH_AFTER + 1


def waits(call, *, key=None, serial=5, before="", seconds=LONG, where="train.py:33", ranks=()):
    return Status(call, key or call, serial, before, True, seconds, where, ranks=ranks)


def busy(where="data.py:88", call=""):
    return Status(call, call, 4, "", False, 100.0, where)


def judge(*ranks, ended=None, report=60.0, end=1800.0):
    """Whether the run ends, and what is said; None for nothing."""
    found = diagnose(dict(enumerate(ranks)), ended or {}, report, end)
    return None if found is None else (found.ends, found.text)


def test_ranks_in_calls_that_do_not_match_end_the_run_with_their_lines():
    average = waits("hvkit.average", where="train.py:41")
    backward = waits("backward() of step 11", key="backward")
    assert judge(average, average, backward, average) == (
        True,
        "ranks 0-1, 3 wait in hvkit.average (train.py:41); rank 2 waits in backward() of step 11 "
        "(train.py:33): every rank has to make the same calls in the same order",
    )
    # One that has only just come to another call may go on.
    assert judge(waits("hvkit.average"), waits("fit", seconds=1.0)) is None


def test_a_rank_that_has_received_and_gone_on_to_the_next_call_waits_rightly():
    slow, ahead = waits("backward", serial=5), waits("hvkit.average", serial=6, before="backward")
    assert judge(slow, ahead) is None
    assert judge(slow, waits("hvkit.average", serial=6, before="hvkit.barrier"))[0]
    assert judge(slow, waits("hvkit.average", serial=7, before="backward"))[0]
    assert judge(waits("backward", serial=5, seconds=61.0), ahead)[0]


def test_a_rank_that_has_gone_on_without_another_is_no_slow_network():
    ahead = waits("Checkpoint.end_step", serial=6, before="backward", seconds=60.0)
    assert judge(waits("backward", serial=5, seconds=58.0), ahead) is None  # two seconds later:
    ends, text = judge(waits("backward", serial=5, seconds=60.0), ahead)
    assert (ends, text.split(": ")[1]) == (True, SAME_CALLS)
    ends, text = judge(waits("backward", serial=5, seconds=29.0), ahead, report=30.0, end=30.0)
    assert ends
    assert f": {SAME_CALLS}; the limit is 30 s" in text


def test_a_rank_that_has_ended_will_not_come():
    ended = {1: "failed with ValueError: x"}
    ends, text = judge(waits("Checkpoint.save"), ended=ended)
    assert ends
    assert "rank 0 waits in Checkpoint.save (train.py:33); rank 1 failed with" in text
    assert judge(busy(), ended=ended) is None  # nobody waits


NOT_REACHED = "rank 1 has not reached backward() (train.py:33) for {} s; it is {}"
LIMIT = "; the limit is 1800 s (--stall, HVKIT_STALL_LIMIT_SECONDS)"


@pytest.mark.parametrize(
    ("other", "doing"),
    [
        (busy(), "at data.py:88"),
        (busy(call="backward()"), "in backward(), at data.py:88"),
        (Status(), "not answering"),
    ],
)
def test_a_rank_that_does_other_things_is_reported_and_ends_the_run_at_the_limit(other, doing):
    assert judge(waits("backward()", seconds=59.0), other) is None
    found = judge(waits("backward()", seconds=60.0), other)
    assert found == (False, NOT_REACHED.format(60, doing))
    ends, text = judge(waits("backward()", seconds=1800.0), other)
    assert ends
    assert text.startswith(NOT_REACHED.format(1800, doing))
    assert text.endswith(LIMIT)


def test_ranks_that_wait_in_one_call_are_reported_and_end_the_run_at_the_limit():
    ends, text = judge(*[waits("backward() of step 2", seconds=70.0)] * 2)
    assert not ends
    assert "a slow network" in text
    assert judge(*[waits("backward() of step 2", seconds=1800.0)] * 2)[0]
    assert judge(busy(), busy()) is None


def backward(*ranks, seconds=LONG):
    """A rank that waits for the others of its group; groups have the same names of calls."""
    return waits("backward()", seconds=seconds, ranks=ranks)


def test_groups_may_wait_in_different_calls():
    first, second = backward(0, 1), waits("fit", ranks=(2, 3))
    assert judge(first, first, second, second) is None
    assert judge(backward(0, 1), busy(), busy(), backward(2, 3)) is None


def test_a_group_may_wait_for_all_ranks_while_another_trains():
    done, trains = waits("hvkit.barrier", where="train.py:50"), backward(2, 3)
    assert judge(done, done, trains, trains) is None
    assert judge(done, done, trains, busy()) is None
    done = waits("hvkit.barrier", where="train.py:50", seconds=70.0)
    assert judge(done, done, trains, busy()) == (
        False,
        "rank 2 has not reached hvkit.barrier (train.py:50) for 70 s; it is in backward(), at "
        "train.py:33; rank 3 has not reached hvkit.barrier (train.py:50) for 70 s; it is at "
        "data.py:88",
    )


@pytest.mark.parametrize("others", [[busy(), busy()], [backward(0, 1), backward(0, 1)]])
def test_ranks_of_a_group_that_wait_for_each_other_in_different_calls_end_the_run(others):
    stuck = [backward(2, 3), waits("hvkit.average", where="train.py:41")]
    text = "rank 2 waits in backward() (train.py:33); rank 3 waits in hvkit.average (train.py:41)"
    assert judge(*others, *stuck) == (True, f"{text}: {SAME_CALLS}")


def test_ranks_that_wait_in_a_circle_of_groups_end_the_run():
    some = backward(0, 1), waits("fit", ranks=(1, 2))
    ends, text = judge(*some, waits("predict", ranks=(0, 2)))
    assert ends
    assert "rank 0 waits in backward()" in text
    assert judge(*some, busy()) is None


def test_each_group_that_waits_for_long_is_reported_once():
    ranks = [backward(0, 1, seconds=90.0), busy(), backward(2, 3, seconds=70.0), busy("b.py:1")]
    reported = []
    for missing in ("rank 1 has not", "rank 3 has not"):
        found = diagnose(dict(enumerate(ranks)), {}, 60.0, 1800.0, reported)
        assert missing in found.text
        reported.append(found.about)
    assert diagnose(dict(enumerate(ranks)), {}, 60.0, 1800.0, reported).about in reported


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "rank 3"),
        ([0, 1], "ranks 0-1"),
        ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8"),
        (list(range(0, 512, 2)), "ranks 0, 2, 4, 6, 8, 10 and 250 more"),
    ],
)
def test_ranks_are_listed_as_ranges(numbers, text):
    assert ranks_text(numbers) == text


@pytest.mark.parametrize(("text", "end"), [("7.5", 1800), ("4000", 4000)])
def test_the_limits_come_from_the_environment(monkeypatch, text, end):
    monkeypatch.setenv("HVKIT_STALL_SECONDS", text)
    assert Limits.from_environment() == Limits(float(text), end)


@pytest.mark.parametrize("text", ["soon", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(text, monkeypatch):
    monkeypatch.setenv("HVKIT_STALL_LIMIT_SECONDS", text)
    with pytest.raises(LaunchError, match=f"HVKIT_STALL_LIMIT_SECONDS must be .* got '{text}'"):
        Limits.from_environment()
