"""Where the time of steps went, from the times that each rank has measured."""

import numpy as np
import pytest

from hvkit.monitor.measurements import Step, Totals, step_times


def steps(*rows, samples=8.0):
    """Steps of one rank: data, compute and blocked seconds."""
    return [Step(sum(row), row[0], row[2], samples) for row in rows]


def test_the_rank_that_comes_last_waits_for_nobody():
    found = step_times([steps((1, 2, 5)), steps((1, 6, 1))])
    assert found.parts == {"data": 1, "compute": 4, "waiting": 2, "allreduce": 1}
    assert sum(found.parts.values()) == 8
    assert found.last.tolist() == [0, 1]


def test_a_rank_that_is_late_is_named_with_what_made_it_late():
    ranks = [steps((1, 4, 5), (1, 4, 5)), steps((4, 4, 2), (4, 4, 2)), steps((1, 4, 5), (1, 4, 5))]
    totals = Totals(["a", "b", "b"])
    totals.add(step_times(ranks))
    last = totals.summary()["last"]
    assert last == {"rank": 1, "host": "b", "share": 1.0, "reason": "data"}
    assert totals.line() == "ranks busy 60%; rank 1 on b was last in 100% of steps: data"


def test_a_rank_that_begins_its_step_late_was_busy_between_steps():
    totals = Totals(["a", "b", "b"])
    totals.add(step_times([steps((1.1, 4, 5)), steps((1, 4.2, 5)), steps((1.1, 4.2, 1))]))
    assert totals.summary()["last"]["reason"] == "between steps"


def test_ranks_that_are_alike_are_not_named():
    totals = Totals(["a", "b"])
    totals.add(step_times([steps((1, 8, 1), (1, 8, 1.1)), steps((1, 8, 1.1), (1, 8, 1))]))
    assert totals.summary()["last"] is None
    assert totals.line() == "ranks busy 90%"


def test_one_rank_is_said_what_its_time_went_into():
    totals = Totals(["a"])
    totals.add(step_times([steps((1, 3, 0))]))
    assert totals.line() == "data 25%, compute 75%"
    parts = {"data": 0.25, "compute": 0.75, "waiting": 0, "allreduce": 0}
    assert totals.summary()["parts"] == parts


def test_steps_of_several_records_count_by_their_time():
    totals = Totals(["a", "b"])
    totals.add(step_times([steps((0, 1, 0)), steps((0, 1, 0))]))
    totals.add(step_times([steps((0, 1, 2)), steps((0, 1, 2))]))
    assert totals.summary()["busy"] == pytest.approx((1 + 1 / 3 * 3) / 4)


def test_ranks_with_different_numbers_of_steps_have_no_last_one():
    found = step_times([steps((1, 1, 1), (1, 1, 1)), steps((1, 1, 4))])
    assert not found.last.any()
    assert found.parts["waiting"] == 0
    assert found.samples_per_second == [pytest.approx(16 / 6), pytest.approx(8 / 6)]
    with pytest.raises(ValueError, match="no rank has taken a step"):
        step_times([[], []])


def test_parts_add_up_to_the_step():
    rng = np.random.default_rng(0)
    ranks = [steps(*rng.random((50, 3))) for _ in range(5)]
    mean = np.mean([step.duration for rank in ranks for step in rank])
    assert sum(step_times(ranks).parts.values()) == pytest.approx(mean)
