"""Early stopping; averages over ranks are tested where there are ranks."""

import json
import math

import pytest

import hvkit


def calls_until_stop(early_stopping, metrics):
    return next((i for i, metric in enumerate(metrics, 1) if early_stopping(metric)), None)


@pytest.mark.parametrize(
    ("options", "metrics", "calls"),
    [
        ({"patience": 1}, [3, 2, 2], 3),
        ({"patience": 2}, [3, 2, 2.5, 1, 1, 1], 6),
        ({"patience": 2}, [5, 4, 3, 2, 1], None),
        ({"patience": 1, "mode": "max"}, [1, 2, 1], 3),
        ({"patience": 1, "min_delta": 0.5}, [3, 2.6], 2),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 1.0, math.nan, 0.5], None),
    ],
)
def test_it_stops_after_patience_calls_without_improvement(options, metrics, calls):
    assert calls_until_stop(hvkit.EarlyStopping(**options), metrics) == calls


def test_it_goes_on_from_a_saved_state():
    first = hvkit.EarlyStopping(patience=3)
    for metric in (1.0, 2.0, 2.0):
        assert not first(metric)
    resumed = hvkit.EarlyStopping(patience=3)
    resumed.load_state_dict(first.state_dict())
    assert resumed(2.0)


def test_its_state_before_the_first_call_is_plain_json():
    state = json.loads(json.dumps(hvkit.EarlyStopping(patience=3).state_dict(), allow_nan=False))
    resumed = hvkit.EarlyStopping(patience=1)
    resumed.load_state_dict(state)
    assert not resumed(5.0)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"patience": 0}, ValueError, "at least 1, got 0"),
        ({"patience": 1.5}, TypeError, "int, got 1.5"),
        ({"patience": 1, "mode": "auto"}, ValueError, "one of min, max; got 'auto'"),
        ({"patience": 1, "min_delta": -1}, ValueError, "at least 0.*got -1"),
    ],
)
def test_wrong_arguments_are_refused(options, kind, message):
    with pytest.raises(kind, match=message):
        hvkit.EarlyStopping(**options)
