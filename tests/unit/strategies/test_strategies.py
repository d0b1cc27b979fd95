"""The mathematics of strategies, on NumPy arrays with a row for each rank."""

import dataclasses

import numpy as np
import pytest

import hvkit
from hvkit.communication.exchanges import Neighbours, RunningExchanges
from hvkit.strategies.strategy import Strategy

LOCAL = hvkit.LocalSGD(4)


class Ranks:
    """The vectors of all ranks, in rows."""

    rank = 0

    def __init__(self, size=3):
        self.size = size

    def carry_out(self, flow):
        """Return what a strategy returns, after all that it exchanges."""

        def start(exchange, name):
            rows = exchange.vector
            if isinstance(exchange, Neighbours):
                return lambda: [np.roll(rows, offset, axis=0) for offset in exchange.offsets]
            return lambda: np.broadcast_to(rows.mean(0), rows.shape)

        return RunningExchanges(start, flow, "agreement").result()

    def agree(self, strategy, weights, state):
        return self.carry_out(strategy.agree(weights, state, self))

    def settle(self, strategy, weights, state):
        return self.carry_out(strategy.settle(weights, state, self))


@pytest.fixture
def weights():
    return np.random.default_rng(0).normal(size=(3, 5))


@pytest.fixture
def start():
    return np.broadcast_to(np.linspace(-1, 1, 5), (3, 5))


def test_local_sgd_takes_the_mean_of_the_weights(weights, start):
    agreed, state = Ranks().agree(LOCAL, weights, LOCAL.begin(start))
    assert np.allclose(agreed, weights.mean(0))
    assert np.array_equal(state["anchor"], agreed)


ALL = LOCAL, hvkit.DiLoCo(4), hvkit.Gossip(), hvkit.ElasticAveraging(4)


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_an_agreement_changes_neither_weights_nor_state_and_equal_weights_stay(
    strategy, weights, start
):
    state = strategy.begin(start)
    before = weights.copy(), {name: value.copy() for name, value in state.items()}
    Ranks().agree(strategy, weights, state)
    assert np.array_equal(weights, before[0])
    assert all(np.array_equal(state[name], value) for name, value in before[1].items())
    unchanged, _ = Ranks().agree(strategy, start, state)
    assert np.array_equal(unchanged, start)


def test_diloco_is_sgd_with_nesterov_momentum_on_the_change_of_a_round(weights, start):
    torch = pytest.importorskip("torch")
    strategy = hvkit.DiLoCo(4, outer_lr=0.6, outer_momentum=0.8)
    outer = torch.nn.Parameter(torch.tensor(start[0]))
    sgd = torch.optim.SGD([outer], lr=0.6, momentum=0.8, nesterov=True)
    anchor, state = start, strategy.begin(start)
    for _ in range(3):
        local = anchor + weights
        outer.grad = torch.tensor((anchor - local).mean(0))
        sgd.step()
        anchor, state = Ranks().agree(strategy, local, state)
        assert np.allclose(anchor, outer.detach().numpy())


def mixing(topology, size):
    """The matrix W of x <- W x."""
    neighbours = {
        "ring": lambda w: {w - 1, w + 1},
        "exponential": lambda w: {w - 2**p for p in range(size) if 2**p < size},
        "complete": lambda w: set(range(size)) - {w},
    }
    matrix = np.zeros((size, size))
    for w in range(size):
        members = [w, *{n % size for n in neighbours[topology](w)}]
        matrix[w, members] = 1 / len(members)
    return matrix


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("topology", ["ring", "exponential", "complete"])
def test_gossip_multiplies_by_a_matrix_that_keeps_the_mean(topology, size):
    start = np.random.default_rng(0).normal(size=(size, 5))
    strategy, ranks, w = hvkit.Gossip(topology=topology), Ranks(size), mixing(topology, size)
    assert np.allclose(w.sum(0), 1)
    weights, state = start, strategy.begin(start)
    for t in range(1, 6):
        weights, state = ranks.agree(strategy, weights, state)
        assert np.allclose(weights, np.linalg.matrix_power(w, t) @ start, rtol=0, atol=1e-12)
    assert np.allclose(ranks.settle(strategy, weights, state), start.mean(0))


def test_elastic_averaging_pulls_ranks_and_centre_together(weights, start):
    strategy, ranks = hvkit.ElasticAveraging(4, pull=0.6), Ranks()
    centre, state = start, strategy.begin(start)
    for _ in range(3):
        local = weights + start
        weights, state = ranks.agree(strategy, local, state)
        assert np.allclose(weights, local - 0.2 * (local - centre))
        centre = centre + 0.2 * (local - centre).sum(0)
        assert np.allclose(state["centre"], centre)
    expected = centre + 0.2 * (weights - centre).sum(0)
    assert np.allclose(ranks.settle(strategy, weights, state), expected)


def test_diloco_beside_training_settles_on_the_mean(weights, start):
    strategy = hvkit.DiLoCo(4, overlap=2)
    settled = Ranks().settle(strategy, weights, strategy.begin(start))
    assert np.allclose(settled, weights.mean(0))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: hvkit.LocalSGD(0), ValueError, "every must be at least 1, got 0"),
        (lambda: hvkit.LocalSGD(2.0), TypeError, "every must be an int, got 2.0 of type float"),
        (lambda: hvkit.LocalSGD(True), TypeError, "every must be an int, got True"),
        (lambda: hvkit.DiLoCo(-1), ValueError, "every must be at least 1, got -1"),
        (lambda: hvkit.DiLoCo(5, outer_lr=-1), ValueError, "outer_lr must be at least 0"),
        (lambda: hvkit.DiLoCo(5, outer_lr=float("nan")), ValueError, "and finite, got nan"),
        (lambda: hvkit.DiLoCo(5, outer_lr="fast"), TypeError, "outer_lr must be a number"),
        (lambda: hvkit.DiLoCo(5, outer_momentum=1), ValueError, "and below 1, got 1"),
        (lambda: hvkit.DiLoCo(5, overlap=5), ValueError, "below every, which is 5, got 5"),
        (lambda: hvkit.DiLoCo(5, overlap=-1), ValueError, "overlap must be at least 0, got -1"),
        (lambda: hvkit.ElasticAveraging(5, pull=2), ValueError, "pull must be above 0 and at most"),
        (lambda: hvkit.Gossip(topology="star"), ValueError, "ring, exponential, complete; got 'st"),
        (lambda: hvkit.Gossip(0), ValueError, "every must be at least 1, got 0"),
    ],
)
def test_strategies_check_themselves(make, error, text):
    with pytest.raises(error, match=text):
        make()


def distribute(**options):
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 2)
    return hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1), **options)


@pytest.mark.parametrize(
    ("strategy", "compression", "text"),
    [
        (hvkit.Gossip(), "int8", "leave compression out"),
        (hvkit.ElasticAveraging(4), hvkit.TopK(0.1), 'would count twice: use "int8"'),
        (hvkit.Centralized(), hvkit.TopK(0.1), 'use "fp16"'),
        (hvkit.Centralized(), hvkit.PowerSGD(2), 'use "fp16"'),
        (hvkit.LocalSGD, None, r"got the class LocalSGD: make one, hvkit.LocalSGD\(...\)"),
        ("diloco", None, "got 'diloco' of type str"),
        (None, None, "got None of type NoneType"),
    ],
)
def test_distribute_refuses_what_is_no_strategy_and_compressions_that_one_cannot_use(
    strategy, compression, text
):
    options = {"compression": compression} if compression else {}
    with pytest.raises((TypeError, ValueError), match=text):
        distribute(strategy=strategy, **options)


@pytest.mark.parametrize("make", [hvkit.Synchronous, lambda: hvkit.LocalSGD(3)])
def test_strategies_are_values(make):
    assert isinstance(make(), Strategy)
    assert make() == make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().every = 5


def test_one_process_sends_nothing():
    torch = pytest.importorskip("torch")
    before = hvkit.traffic()
    model, optimizer = distribute(strategy=hvkit.DiLoCo(2))
    with hvkit.settled(model):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    assert hvkit.traffic() == before
