"""Images per second: which steps are timed, and how the rates are summed up."""

import re

import common
import numpy as np
import pytest

import hvkit

SMALL = (
    *("--synthetic", "--batch-size", "4", "--image-size", "8", "--classes", "5"),
    *("--untimed-steps", "2", "--rounds", "3", "--steps-per-round", "2"),
)


@pytest.fixture
def flags():
    return common.parse_cnn_flags("A recipe.", SMALL)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until ``clock.now`` is changed."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(common.throughput.time, "perf_counter", lambda: Clock.now)
    return Clock


def measure(flags, clock, seconds, wait=lambda: None):
    """Takes steps that last so many seconds each."""
    with common.Throughput(flags, wait) as throughput:
        for duration in seconds:
            clock.now += duration
            throughput.step()
        return throughput


def rounds(said):
    return [float(rate) for rate in re.findall(r"round ./3: (\S+) images/s on rank 0", said)]


def test_the_first_steps_are_not_timed(flags, clock, capsys):
    throughput = measure(flags, clock, [100, 100, 1, 1, 2, 2, 1, 1])
    assert throughput.steps == 8
    said = capsys.readouterr().out
    assert rounds(said) == [4.0, 2.0, 4.0]
    # 1.96 standard deviations of these.
    assert "images/s per rank: 3.3 +- 1.8\n" in said
    assert "images/s of 1 ranks together: 3.3 +- 1.8\n" in said


def test_the_device_is_waited_for_inside_the_time_of_a_round(flags, clock, capsys):
    def wait():
        clock.now += 3

    measure(flags, clock, [1] * 8, wait)
    assert rounds(capsys.readouterr().out) == [8 / 5] * 3


def test_the_ranks_add_up_round_by_round(flags, clock, monkeypatch, capsys):
    rates = [[4.0, 2.0, 4.0], [2.0, 4.0, 2.0]]
    monkeypatch.setattr(hvkit, "allgather", lambda mine: rates)
    measure(flags, clock, [1] * 8)
    said = capsys.readouterr().out
    assert "ranks together: 6.0 +- 0.0\n" in said
    assert "images/s per rank: 3.0 +- 2.0\n" in said


def test_every_rank_has_random_images_of_its_own(flags, monkeypatch):
    pixels, labels = common.random_batch(flags)
    assert (pixels.shape, pixels.dtype) == ((4, 8, 8, 3), np.float32)
    assert (labels.shape, labels.dtype) == ((4,), np.int64)
    assert labels.max() < 5
    monkeypatch.setattr(hvkit, "rank", lambda: 1)
    assert not np.array_equal(common.random_batch(flags)[0], pixels)
