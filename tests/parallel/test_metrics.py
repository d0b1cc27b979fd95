"""Means over ranks, and decisions that all ranks take together."""

import math

import numpy as np
import pytest
from ranks import error_of

import hvkit


def test_average_is_the_mean_of_numbers_and_dicts_in_double_precision():
    n = hvkit.size()
    tiny = 1e-12 * hvkit.rank()
    assert hvkit.average(1 + tiny) == pytest.approx(1 + 1e-12 * (n - 1) / 2, rel=1e-15)
    means = hvkit.average({"loss": np.float32(hvkit.rank()), "one": 1})
    assert means == {"loss": (n - 1) / 2, "one": 1.0}


def test_a_nan_on_one_rank_is_seen_by_all():
    assert math.isnan(hvkit.average(float("nan") if hvkit.rank() == 1 else 0.0))


def test_average_of_different_keys_or_of_no_numbers_is_an_error_everywhere():
    error, text = error_of(lambda: hvkit.average({f"loss {hvkit.rank()}": 1.0}))
    assert error is hvkit.RanksDisagreeError
    assert "['loss 0']" in text
    error, text = error_of(lambda: hvkit.average("high" if hvkit.rank() == 1 else 1.0))
    assert error is TypeError
    assert "takes numbers, got 'high'" in text


def test_weights_make_the_mean_that_one_process_has_over_all_samples():
    samples = np.random.default_rng(0).normal(size=7 * hvkit.size())
    edges = [0, *range(1, hvkit.size()), len(samples)]  # one sample each, the rest on the last
    mine = samples[edges[hvkit.rank()] : edges[hvkit.rank() + 1]]
    means = hvkit.average({"x": mine.mean(), "square": (mine**2).mean()}, weight=len(mine))
    assert means["x"] == pytest.approx(samples.mean(), rel=1e-12)
    assert means["square"] == pytest.approx((samples**2).mean(), rel=1e-12)
    assert len(set(hvkit.allgather(means["x"]))) == 1


def test_a_rank_without_samples_counts_for_nothing():
    empty = hvkit.rank() == 1
    assert hvkit.average(math.nan if empty else 3.0, weight=0 if empty else 5) == 3.0
    assert hvkit.average({} if empty else {"loss": 3.0}, weight=0 if empty else 5) == {"loss": 3.0}
    assert math.isnan(hvkit.average(1.0, weight=0))
    assert math.isnan(hvkit.average({} if empty else {"loss": 1.0}, weight=0)["loss"])


def test_a_nan_with_samples_stays_visible():
    assert math.isnan(hvkit.average(math.nan if hvkit.rank() == 1 else 0.0, weight=2))


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        (-1, ValueError, "finite number from 0, got -1"),
        (math.nan, ValueError, "finite number from 0, got nan"),
        ("many", TypeError, "must be a number, got 'many'"),
        (None, TypeError, "on every rank or on none: none on [1]"),
    ],
)
def test_a_wrong_weight_on_one_rank_is_an_error_everywhere(weight, kind, message):
    error, text = error_of(lambda: hvkit.average(1.0, weight if hvkit.rank() == 1 else 1))
    assert error is kind
    assert message in text


def test_any_rank_is_true_everywhere_if_it_is_true_somewhere():
    assert hvkit.any_rank(hvkit.rank() == 1)
    assert not hvkit.any_rank(False)
    with pytest.raises(TypeError, match="takes True or False"):
        hvkit.any_rank(np.ones(2) if hvkit.rank() == 1 else True)


def test_ranks_that_see_different_losses_stop_together():
    stop, stopped_after = hvkit.EarlyStopping(patience=2), None
    for epoch in range(10):
        # Rank 0 alone would go on for ever, the others would stop at once.
        loss = 10.0 - epoch if hvkit.rank() == 0 else 10.0 + epoch * (1 if epoch < 4 else 100)
        if stop(loss):
            stopped_after = epoch
            break
    assert stopped_after is not None
    assert len(set(hvkit.allgather(stopped_after))) == 1


def test_rank_0_ends_the_loop_of_all_ranks():
    steps = 0
    while not hvkit.broadcast(hvkit.rank() == 0 and steps == 3):
        steps += 1
    assert hvkit.allgather(steps) == [3] * hvkit.size()
