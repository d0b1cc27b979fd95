"""What is said of ranks that wait, and when a run must end."""

import pytest

from hvkit.errors import ranks_text
from hvkit.watch.calls import Status
from hvkit.watch.diagnosis import MISMATCH_AFTER, diagnose
from hvkit.watch.rank_errors import SAME_CALLS

LONG = MISMATCH_AFTER + 1


def waits(call, *, key=None, serial=5, before="", seconds=LONG, where="train.py:33", ranks=()):
    return Status(call, key or call, serial, before, True, seconds, where, ranks=ranks)


def busy(where="data.py:88", call=""):
    return Status(call, call, 4, "", False, 100.0, where)


def judge(*ranks, ended=None, report=60.0, end=1800.0):
    return diagnose(dict(enumerate(ranks)), ended or {}, report, end)


def test_ranks_in_calls_that_do_not_match_end_the_run_with_both_lines():
    found = judge(
        waits("hvkit.average", where="train.py:41"), waits("backward() of step 11", key="backward")
    )
    assert found.ends
    assert found.text == (
        "rank 0 waits in hvkit.average (train.py:41); rank 1 waits in backward() of step 11 "
        "(train.py:33): every rank has to make the same calls in the same order"
    )


def test_many_ranks_in_one_place_are_named_together():
    found = judge(*[waits("hvkit.barrier")] * 3, waits("fit"), waits("hvkit.barrier"))
    assert "ranks 0-2, 4 wait in hvkit.barrier (train.py:33); rank 3 waits in fit" in found.text


def test_ranks_that_have_only_just_come_to_different_calls_are_left_alone():
    assert judge(waits("hvkit.average"), waits("fit", seconds=1.0)) is None


def test_a_rank_that_has_received_and_gone_on_to_the_next_call_waits_rightly():
    slow, ahead = waits("backward", serial=5), waits("hvkit.average", serial=6, before="backward")
    assert judge(slow, ahead) is None
    assert judge(slow, waits("hvkit.average", serial=6, before="hvkit.barrier")).ends
    assert judge(slow, waits("hvkit.average", serial=7, before="backward")).ends
    assert judge(waits("backward", serial=5, seconds=61.0), ahead).ends


def test_a_rank_that_has_gone_on_without_another_is_no_slow_network():
    ahead = waits("Checkpoint.end_step", serial=6, before="backward", seconds=60.0)
    assert judge(waits("backward", serial=5, seconds=58.0), ahead) is None  # two seconds later:
    found = judge(waits("backward", serial=5, seconds=60.0), ahead)
    assert (found.ends, found.text.split(": ")[1]) == (True, SAME_CALLS)
    found = judge(waits("backward", serial=5, seconds=29.0), ahead, report=30.0, end=30.0)
    assert found.ends
    assert f": {SAME_CALLS}; the limit is 30 s" in found.text


def test_a_rank_that_has_ended_will_not_come():
    found = diagnose({0: waits("Checkpoint.save")}, {1: "failed with ValueError: x"}, 60, 1800)
    assert found.ends
    assert "rank 0 waits in Checkpoint.save (train.py:33); rank 1 failed with" in found.text


def test_a_rank_that_does_other_things_is_reported_once_the_time_is_over():
    call = waits("backward() of step 12", seconds=59.0)
    assert judge(call, busy()) is None
    found = judge(waits("backward() of step 12", seconds=60.0), busy())
    assert not found.ends
    assert found.text == (
        "rank 1 has not reached backward() of step 12 (train.py:33) for 60 s; it is at data.py:88"
    )


def test_only_the_long_limit_ends_the_run_for_it():
    found = judge(waits("fit", seconds=1800.0), busy())
    assert found.ends
    assert "rank 1 has not reached fit" in found.text
    assert "the limit is 1800 s (--stall, HVKIT_STALL_LIMIT_SECONDS)" in found.text


def test_a_rank_that_works_inside_the_same_call_is_named_with_it():
    found = judge(waits("Checkpoint.save", seconds=70.0), busy(call="Checkpoint.save"))
    assert not found.ends
    assert "it is in Checkpoint.save, at data.py:88" in found.text


def test_a_rank_that_cannot_be_reached_is_said_not_to_answer():
    assert judge(waits("fit", seconds=70.0), Status()).text.endswith("it is not answering")


def test_ranks_that_wait_in_one_call_are_reported_but_not_ended():
    slow = [waits("backward() of step 2", seconds=70.0)] * 2
    assert "a slow network" in judge(*slow).text
    assert not judge(*slow).ends
    assert judge(*[waits("backward() of step 2", seconds=1800.0)] * 2).ends


def test_nothing_is_said_while_nobody_waits():
    assert judge(busy(), busy()) is None
    assert diagnose({0: busy()}, {1: "has ended its script"}, 60, 1800) is None


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
    found = judge(done, done, trains, busy())
    assert not found.ends
    assert found.text == (
        "rank 2 has not reached hvkit.barrier (train.py:50) for 70 s; it is in backward(), at "
        "train.py:33; rank 3 has not reached hvkit.barrier (train.py:50) for 70 s; it is at "
        "data.py:88"
    )


def test_ranks_of_a_group_that_wait_for_each_other_in_different_calls_end_the_run():
    stuck = [backward(2, 3), waits("hvkit.average", where="train.py:41")]
    for others in ([busy(), busy()], [backward(0, 1), backward(0, 1)]):
        found = judge(*others, *stuck)
        assert found.ends
        assert found.text == (
            "rank 2 waits in backward() (train.py:33); rank 3 waits in hvkit.average "
            f"(train.py:41): {SAME_CALLS}"
        )


def test_ranks_that_wait_in_a_circle_of_groups_end_the_run():
    found = judge(backward(0, 1), waits("fit", ranks=(1, 2)), waits("predict", ranks=(0, 2)))
    assert found.ends
    assert "rank 0 waits in backward()" in found.text
    assert judge(backward(0, 1), waits("fit", ranks=(1, 2)), busy()) is None


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
    [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")],
)
def test_ranks_are_listed_as_ranges(numbers, text):
    assert ranks_text(numbers) == text
