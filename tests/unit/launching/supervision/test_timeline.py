"""The trace of a run: clocks of other hosts, and what is written."""

import json
import random

import pytest

from hvkit.errors import LaunchError
from hvkit.launching.supervision.timeline import HostClock, Timeline


def test_a_clock_is_known_within_half_of_the_quickest_round_trip():
    rng, clock = random.Random(1), HostClock()
    ahead, now, quickest = 5000.0, 10.0, 1.0
    for _ in range(20):
        there, back = rng.uniform(0.0001, 0.01), rng.uniform(0.0001, 0.01)
        number = clock.ask(now)
        clock.answered(number, now + there + ahead, now + there + back)
        quickest = min(quickest, there + back)
        now += 2
    assert clock.ahead == pytest.approx(ahead, abs=quickest / 2)


def test_a_clock_that_drifts_is_followed():
    clock = HostClock()
    for second in range(0, 1000, 2):
        clock.answered(clock.ask(second), second * 1.001, second + 0.001)
    assert 0.93 < clock.ahead < 1.0  # the last minute counts


def test_an_answer_to_an_older_question_does_not_count():
    clock = HostClock()
    first = clock.ask(1.0)
    clock.ask(3.0)
    clock.answered(first, 1.0, 5.0)
    assert clock.ahead is None


def test_a_request_during_an_answer_counts():
    clock = HostClock()

    class Meanwhile(float):
        """A time of the other clock in whose use another thread asks."""

        def __sub__(self, other):
            numbers.append(clock.ask(2.0))
            return float(self) - other

    numbers = [clock.ask(1.0)]
    clock.answered(1, Meanwhile(1.0), 1.5)
    clock.answered(2, 9.0, 2.25)
    assert clock.ahead == 9.0 - 2.125
    assert [*numbers, clock.ask(3.0)] == [1, 2, 3]


def test_an_answer_counts_once():
    clock = HostClock()
    number = clock.ask(1.0)
    clock.answered(number, 5.0, 3.0)
    clock.answered(number, 1.0, 1.5)
    assert clock.ahead == 3.0


def spans(*rows):
    return json.dumps({"spans": rows}).encode()


@pytest.fixture
def timeline(tmp_path):
    return Timeline(tmp_path / "trace.json")


def written(timeline, kind):
    """The events in the complete file of a kind: spans are X, names of ranks and threads M."""
    timeline.close()
    return [each for each in json.loads(timeline._path.read_text()) if each["ph"] == kind]


def test_ranks_of_hosts_with_other_clocks_are_aligned(timeline):
    begun = timeline._begun
    timeline.take(0, "a", 0.0, spans(["backward()", 3, 0, begun + 1, 500]))
    timeline.take(1, "b", -70.0, spans(["waiting", None, 1, begun + 1 - 70, 400]))
    drawn = written(timeline, "X")
    assert [each["ts"] for each in drawn] == [pytest.approx(1e6, abs=1)] * 2
    assert drawn[0]["args"] == {"step": 3}
    names = {each["args"].get("name") for each in written(timeline, "M")}
    assert {"rank 0 on a", "rank 1 on b", "script", "thread 1"} <= names


def test_spans_wait_for_the_first_answer_of_their_clock(timeline):
    timeline.take(0, "a", None, spans(["fit", None, 0, 1.0, 5]))
    timeline.take(0, "b", 0.0, spans(["restarted", None, 0, 2.0, 5]))  # another host's clock
    timeline.take(0, "a", 0.0, spans(["evaluate", None, 0, 2.0, 5]))
    assert [each["name"] for each in written(timeline, "X")] == ["restarted", "fit", "evaluate"]


def test_lines_that_are_no_spans_are_left_out(timeline):
    nested = b'{"spans":' + b"[" * 4000
    no_time = b'{"spans": [["a", null, 0, NaN, 5]]}'
    too_long = b'{"spans": [["a", null, 0, 1.0, ' + b"9" * 400 + b"]]}"
    other = (b"", b"[]", b'{"spans": 3}', b'{"spans": [["a"]]}', b"\xff")
    for line in (*other, nested, no_time, too_long):
        timeline.take(0, "a", 0.0, line)
    timeline.note("restart 1: <b>")
    assert written(timeline, "X") == []
    assert [each["name"] for each in written(timeline, "i")] == ["restart 1: <b>"]


def test_a_file_that_cannot_be_made_is_an_error_that_names_it(tmp_path):
    with pytest.raises(LaunchError, match=r"--timeline .*trace\.json cannot be written"):
        Timeline(tmp_path / "missing" / "trace.json")
