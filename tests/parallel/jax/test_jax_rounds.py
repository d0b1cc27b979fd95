"""Rounds of local weights in JAX, against the same rounds computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import cases
from flax import nnx

import hvkit
from hvkit.frameworks.jax import batches as batches_of_ranks

STEPS = 9


@pytest.fixture(autouse=True)
def _batches_of_one_kind(monkeypatch):
    monkeypatch.setattr(batches_of_ranks, "_local", None)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.relu(self.norm(self.first(x))))


def made(seed):
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.5), wrt=nnx.Param)


@nnx.jit
def step(model, optimizer, x, y):
    def loss(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    optimizer.update(model, nnx.grad(loss)(model))


def batches(rank):
    random = np.random.default_rng(rank)
    return [
        (random.normal(size=(6, 8)).astype(np.float32), random.integers(0, 4, 6))
        for _ in range(STEPS)
    ]


def weights(model, kind=nnx.Param):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(model, kind))]


def all_alike(model, kind=nnx.Param):
    everyone = hvkit.allgather(weights(model, kind))
    return all(
        np.array_equal(mine, first)
        for theirs in everyone
        for mine, first in zip(theirs, everyone[0], strict=True)
    )


def by_hand(every, outer):
    """What all ranks agree on after each round of plain averaging or of an outer step."""
    ranks = [made(0) for _ in range(hvkit.size())]
    # A copy: the state that NNX returns is the module's own.
    anchor = jax.tree.map(lambda leaf: leaf, nnx.state(ranks[0][0], nnx.Param))
    velocity = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), anchor)
    agreed = []
    for at in range(STEPS):
        for rank, (model, optimizer) in enumerate(ranks):
            step(model, optimizer, *batches(rank)[at])
        if (at + 1) % every:
            continue
        states = [nnx.state(model, nnx.Param) for model, _ in ranks]
        mean = jax.tree.map(lambda *each: sum(e.astype(float) for e in each) / len(each), *states)
        anchor, velocity = outer(anchor, mean, velocity)
        for model, _ in ranks:
            kept = nnx.state(model, nnx.Param)
            nnx.update(model, jax.tree.map(lambda old, new: new.astype(old.dtype), kept, anchor))
        agreed.append(weights(ranks[0][0]))
    return agreed


def average(anchor, mean, velocity):
    return mean, velocity


def nesterov(anchor, mean, velocity):
    """An outer step of DiLoCo with a rate of 0.7 and a momentum of 0.9."""
    change = jax.tree.map(lambda a, m: a.astype(float) - m, anchor, mean)
    velocity = jax.tree.map(lambda v, c: 0.9 * v + c, velocity, change)
    step = jax.tree.map(lambda c, v: c + 0.9 * v, change, velocity)
    return jax.tree.map(lambda a, n: a - 0.7 * n, anchor, step), velocity


@pytest.mark.parametrize(
    ("strategy", "outer"),
    cases(
        [
            (hvkit.LocalSGD(every=4), average),
            (hvkit.LocalSGD(every=1), average),
            (hvkit.DiLoCo(every=4, outer_lr=0.7, outer_momentum=0.9), nesterov),
        ]
    ),
)
def test_ranks_have_the_weights_computed_by_hand_after_each_round(strategy, outer):
    every = strategy.every
    model, optimizer = hvkit.distribute(*made(hvkit.rank()), strategy=strategy)
    assert all_alike(model)
    expected = by_hand(every, outer)
    for at, batch in enumerate(batches(hvkit.rank())):
        x, y = hvkit.batch(*batch)
        if at and at % every == 0:
            for mine, theirs in zip(weights(model), expected[at // every - 1], strict=True):
                np.testing.assert_allclose(mine, theirs, atol=2e-6)
        step(model, optimizer, x, y)
    assert not all_alike(model) or every == 1
    own = weights(model)
    with hvkit.settled(model):
        assert all_alike(model)
        assert all_alike(model, nnx.BatchStat)
    if every > 1:
        for mine, before in zip(weights(model), own, strict=True):
            np.testing.assert_array_equal(mine, before)


def test_a_run_resumes_in_the_middle_of_a_round_with_the_same_bits(tmp_path):
    folder = hvkit.broadcast(tmp_path)

    def training(seed):
        model, optimizer = hvkit.distribute(*made(seed), strategy=hvkit.LocalSGD(every=4))
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    def train(model, optimizer, steps):
        for batch in batches(hvkit.rank())[steps]:
            step(model, optimizer, *hvkit.batch(*batch))

    model, optimizer, checkpoint = training(0)
    train(model, optimizer, slice(6))
    checkpoint.save(epoch=0, step=6)
    train(model, optimizer, slice(6, None))
    del optimizer
    resumed, optimizer, checkpoint = training(9)
    assert checkpoint.restore().step == 6
    assert not all_alike(resumed)
    train(resumed, optimizer, slice(6, None))
    for mine, theirs in zip(weights(resumed), weights(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_evaluation_counts_no_step():
    model, optimizer = hvkit.distribute(*made(0), strategy=hvkit.LocalSGD(every=2))
    x, y = batches(hvkit.rank())[0]
    step(model, optimizer, *hvkit.batch(x, y))
    for _ in range(3):
        hvkit.batch(x, y)
    assert not all_alike(model)
    step(model, optimizer, x, y)
    hvkit.batch(x, y)
    assert all_alike(model)


def test_steps_without_any_batch_are_an_error_where_weights_are_read():
    model, optimizer = hvkit.distribute(*made(0), strategy=hvkit.LocalSGD(every=2))
    step(model, optimizer, *batches(hvkit.rank())[0])
    missing = pytest.raises(ValueError, match=r"called 1 times, and hvkit\.batch not before")
    with missing, hvkit.settled(model):
        pass


def test_weights_that_steps_replace_are_refused():
    with pytest.raises(TypeError, match=r"one nnx\.Module and its nnx\.Optimizer, got dict"):
        hvkit.distribute({"w": jnp.ones(2)}, optax.sgd(0.1), strategy=hvkit.LocalSGD(every=2))
    with pytest.raises(ValueError, match="leave overlap out"):
        hvkit.distribute(*made(0), strategy=hvkit.DiLoCo(every=4, overlap=1))


def test_a_script_trains_models_of_one_kind():
    hvkit.distribute(*made(0), strategy=hvkit.LocalSGD(every=2))
    with pytest.raises(ValueError, match="train them in two scripts"):
        hvkit.distribute(*made(0))
