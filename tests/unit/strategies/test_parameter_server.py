"""The rule of the parameter server, without messages."""

import numpy as np
import pytest
from server_log import logged

import hvkit
from hvkit.strategies.parameter_server import Attendance, ServedWeights, add

NOBODY = frozenset()


def served(staleness, size=3):
    return ServedWeights([np.zeros(4)], size, staleness)


def push(server, rank, value=1.0, away=NOBODY):
    server.push(rank, [np.full(4, value)])
    return server.release(away)


@pytest.mark.parametrize("bound", [1, 3])
def test_a_rank_goes_on_until_it_is_too_far_ahead_of_the_slowest(bound):
    server = served(bound)
    for _ in range(bound):
        assert push(server, 0) == [0]
        assert push(server, 1) == [1]
    assert push(server, 0) == []
    assert push(server, 1) == []
    assert server.lead(0, NOBODY) == bound + 1
    assert server.slowest(NOBODY) == [2]
    assert push(server, 2) == [0, 1, 2]


def test_staleness_0_adds_the_changes_of_a_step_together_in_rank_order(monkeypatch):
    log = logged(monkeypatch)
    server = served(0)
    assert push(server, 2, 0.1) == []
    assert push(server, 0, 1e9) == []
    assert np.array_equal(server.weights[0], np.zeros(4))
    assert push(server, 1, -1e9) == [0, 1, 2]
    assert [update.rank for update in log] == [0, 1, 2]
    # In another order the small one would be lost.
    assert np.allclose(server.weights[0], 0.1 / 3)


def test_other_bounds_add_a_change_as_it_comes():
    server = served(1)
    push(server, 2, 3.0)
    assert np.array_equal(server.weights[0], np.ones(4))


@pytest.mark.parametrize(("staleness", "away"), [(0, {1}), (2, {1}), (None, NOBODY)])
def test_a_rank_that_is_away_holds_up_nobody_and_without_a_bound_nobody_does(staleness, away):
    server = served(staleness, size=2)
    for _ in range(10):
        assert push(server, 0, away=away) == [0]


def test_a_rank_that_leaves_sets_the_waiting_ones_free():
    server = served(0)
    push(server, 0)
    push(server, 1)
    assert server.release({2}) == [0, 1]


def test_ranks_that_met_count_anew():
    server = served(1, size=2)
    for _ in range(5):
        push(server, 0, away={1})
    server.restart_clocks()
    assert push(server, 0) == [0]
    assert push(server, 0) == []


def test_the_log_replayed_gives_the_same_weights_bit_for_bit(monkeypatch):
    rng = np.random.default_rng(0)
    start = rng.normal(size=50).astype(np.float32)
    log = logged(monkeypatch)
    server = ServedWeights([start.copy()], 3, 2)
    for rank in (0, 1, 0, 0, 2, 1, 1, 2, 2, 0):
        server.push(rank, [rng.normal(size=50).astype(np.float32)])
        server.release(NOBODY)
    replayed = [start.copy()]
    for update in log:
        add(replayed, update.changes, 3)
    assert np.array_equal(replayed[0], server.weights[0])
    assert [update.clock for update in log if update.rank == 0] == [1, 2, 3, 4]
    assert [update.lead for update in log][:4] == [0, 0, 1, 2]


def test_a_rank_in_a_collective_is_away_until_all_have_come_to_it():
    attendance = Attendance(3)
    assert not attendance.enter(0)
    assert not attendance.enter(2)
    assert attendance.away == {0, 2}
    assert attendance.enter(1)
    assert attendance.away == set()
    # One rank is in the next collective before another has been counted out of this one.
    assert not attendance.enter(1)
    assert attendance.away == {1}


def test_a_rank_that_trains_is_in_no_collective_and_one_that_has_ended_stays_away():
    attendance = Attendance(2)
    attendance.enter(0)
    attendance.train(0)
    assert attendance.away == set()
    attendance.end(1)
    attendance.enter(0)
    assert attendance.away == {0, 1}
    assert not attendance.all_ended
    attendance.end(0)
    assert attendance.all_ended


@pytest.mark.parametrize(
    ("staleness", "error", "text"),
    [
        (-1, ValueError, "staleness must be at least 0, got -1"),
        (1.5, TypeError, "staleness must be an int, got 1.5"),
    ],
)
def test_staleness_is_checked(staleness, error, text):
    with pytest.raises(error, match=text):
        hvkit.ParameterServer(staleness)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"compression": "int8"}, "leave compression out"),
        ({"batch_norm": "sync"}, 'use batch_norm="average"'),
        ({"check_every": 5}, "leave check_every out"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, text):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=text):
        hvkit.distribute(model, optimizer, strategy=hvkit.ParameterServer(2), **options)
