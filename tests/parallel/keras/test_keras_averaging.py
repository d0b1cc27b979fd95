"""Keras: strategies that average gradients in every step."""

import functools
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import LOOPS, distributed, eager_tape, local, mlp, regression, unbuilt, weights
from ranks import error_of, largest_difference, same_on_all_ranks

import hvkit
from hvkit import main_rank
from hvkit.frameworks.keras.sharded import OptimizerShards
from hvkit.frameworks.keras.trials import why_not_by_variable


@functools.cache
def trained(strategy, loop="function", **options):
    before = hvkit.traffic().get("gradients", (0, 0))[0]
    model, optimizer = distributed(
        mlp(hvkit.rank()), keras.optimizers.SGD(0.05), strategy=strategy, **options
    )
    LOOPS[loop](model, optimizer, local(regression(steps=20)))
    return weights(model), hvkit.traffic()["gradients"].bytes - before


@MORE
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_one_rank_that_averages_for_all_gives_the_weights_of_a_ring(loop):
    ring, _ = trained(hvkit.Synchronous(), loop)
    found, sent = trained(hvkit.Centralized(), loop)
    assert largest_difference(found, ring) < 1e-6
    assert same_on_all_ranks(found)
    size = sum(w.nbytes for w in found)
    assert sent == 20 * size * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)
    rounded, _ = trained(hvkit.Centralized(), loop, compression="bf16")
    assert 0 < largest_difference(rounded, found) < 0.01


MAKE = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "accumulated": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
}


def large(seed=0):
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, "tanh") for width in (40, 30, 20, 10)]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])


def both(make, loop, steps=10, model=large, **options):
    """Models and optimizers, trained with the state whole and with the state sharded."""
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ShardedOptimizer()):
        each, optimizer = distributed(model(), make(), strategy=strategy, **options)
        loop(each, optimizer, local(regression(steps)))
        found += [each, optimizer]
    return found


@pytest.mark.parametrize(("name", "loop"), cases(each_once(list(MAKE), list(LOOPS))))
def test_a_sharded_optimizer_gives_the_same_weights_bit_for_bit(name, loop):
    whole, _, model, _ = both(MAKE[name], LOOPS[loop])
    assert all(map(np.array_equal, weights(model), weights(whole)))


def state_bytes(optimizer):
    return sum(v.numpy().nbytes for v in optimizer.variables if len(v.shape))


@MORE
@pytest.mark.parametrize("built", [False, True])
def test_a_sharded_optimizer_keeps_a_part_of_the_state(built):
    def make():
        optimizer = keras.optimizers.Adam(0.01)
        if built:
            optimizer.build(model.trainable_variables)
            LOOPS["eager"](model, optimizer, regression(steps=1))
        return optimizer

    model = large()
    start = weights(model)
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ShardedOptimizer()):
        model = large()
        model.set_weights(start)
        model, optimizer = hvkit.distribute(model, make(), strategy=strategy)
        LOOPS["function"](model, optimizer, local(regression(steps=5)))
        found.append((weights(model), state_bytes(optimizer)))
    (expected, everything), (same, mine) = found
    assert all(map(np.array_equal, same, expected))
    largest = max(w.nbytes for w in same)
    assert 0 < mine <= everything / hvkit.size() + 2 * largest
    assert sum(hvkit.allgather(mine)) == everything


@MORE
def test_ranks_differ_if_the_parts_are_not_sent(monkeypatch):
    monkeypatch.setattr(OptimizerShards, "_send", lambda *_: None)
    model = both(MAKE["adamw"], LOOPS["function"], steps=1)[2]
    assert not same_on_all_ranks(weights(model))


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize(("name", "loop"), cases([("scaled", "eager"), ("adamw", "function")]))
def test_the_state_is_saved_whole(name, loop, tmp_path):
    folder = hvkit.broadcast(tmp_path)
    loop = LOOPS[loop]
    whole, reference, model, optimizer = both(MAKE[name], loop)
    with hvkit.settled(optimizer):
        if hvkit.rank() == 0:
            found = [v.numpy() for v in optimizer.variables]
            assert all(map(np.array_equal, found, [v.numpy() for v in reference.variables]))
            model.optimizer = optimizer
            model.save(folder / "whole.keras")
    error, text = error_of(lambda: optimizer.save_own_variables({}))
    if name != "scaled":  # that one only holds the other
        assert error is ValueError
        assert "hvkit.settled(optimizer)" in text
    hvkit.Checkpoint(folder / "a", model=model, optimizer=optimizer).save(epoch=0, step=10)

    again, resumed = hvkit.distribute(large(1), MAKE[name](), strategy=hvkit.ShardedOptimizer())
    hvkit.Checkpoint(folder / "a", model=again, optimizer=resumed).restore()
    assert state_bytes(resumed) == state_bytes(optimizer)
    data = local(regression(steps=14))[10:]
    loop(again, resumed, data)
    loop(whole, reference, data)
    assert all(map(np.array_equal, weights(again), weights(whole)))


@MORE
def test_fit_with_a_sharded_optimizer_in_half_precision():
    def make_model():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(16, "tanh", dtype="bfloat16") for _ in range(3)]
        return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])

    whole, _, model, _ = both(MAKE["momentum"], LOOPS["fit"], model=make_model)
    assert all(map(np.array_equal, weights(model), weights(whole)))


@MORE
def test_one_rank_may_own_everything():
    def make_model():
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense(4, use_bias=False)
        return keras.Sequential([keras.Input((8,)), dense])

    whole, _, model, _ = both(MAKE["momentum"], LOOPS["function"], model=make_model)
    assert all(map(np.array_equal, weights(model), weights(whole)))


def test_state_that_is_not_of_single_weights_is_refused():
    model, optimizer = hvkit.distribute(
        large(), keras.optimizers.Adafactor(0.01), strategy=hvkit.ShardedOptimizer()
    )
    error, text = error_of(lambda: optimizer.build(model.trainable_variables))
    assert error is ValueError
    assert "Adafactor keeps" in text


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras is older than this optimizer"
)
def test_an_optimizer_that_changes_all_weights_is_refused():
    optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)
    error, text = error_of(
        lambda: hvkit.distribute(large(), optimizer, strategy=hvkit.ShardedOptimizer())
    )
    assert error is ValueError
    assert "ScheduleFreeAdamW changes all weights" in text


class NormOfAll(keras.optimizers.SGD):
    """One step of a length, for all weights together."""

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        norm = tf.linalg.global_norm(grads)
        super()._backend_update_step([g / norm for g in grads], trainable_variables, learning_rate)


class Counting(keras.optimizers.SGD):
    def build(self, variables):
        super().build(variables)
        self.total = self.add_variable((), name="total")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        self.total.assign_add(keras.ops.sum(gradient))


class Unnamed(keras.optimizers.SGD):
    """It cannot be made again from its settings."""

    def __init__(self, needed):
        super().__init__(0.1)


class OwnAdam(keras.optimizers.Adam):
    """A user's class, which updates each weight on its own."""


def test_what_an_optimizer_does_decides_whether_ranks_can_divide_it():
    random_state = random.getstate()
    found = {
        type(each): why_not_by_variable(each)
        for each in (NormOfAll(0.1), Counting(0.1), Unnamed(1), OwnAdam(0.1))
    }
    assert random.getstate() == random_state
    assert "depends on others" in found[NormOfAll]
    assert "'total' from all weights together" in found[Counting]
    assert "failed with TypeError" in found[Unnamed]
    assert found[OwnAdam] == ""
    error, text = error_of(
        lambda: hvkit.distribute(large(), NormOfAll(0.1), strategy=hvkit.ShardedOptimizer())
    )
    assert error is ValueError
    assert "NormOfAll does not update each weight on its own" in text


def test_averages_of_the_weights_are_refused():
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    error, text = error_of(
        lambda: hvkit.distribute(mlp(), optimizer, strategy=hvkit.ShardedOptimizer())
    )
    assert error is ValueError
    assert "use_ema=True" in text


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["eager", "function"]))
def test_decoupled_momentum_that_sends_everything_is_the_mean(loop):
    everything = hvkit.DeMo(top_k=16, chunk=4, decay=0.0, sign=False)
    expected, _ = trained(hvkit.Synchronous(), loop)
    found, _ = trained(everything, loop)
    assert largest_difference(found, expected) < 1e-5
    assert same_on_all_ranks(found)


@MORE
def test_decoupled_momentum_of_embeddings():
    def model():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((3,), dtype="int32"), layers.Embedding(5, 4), layers.Flatten()]
        )

    everything = hvkit.DeMo(top_k=16, chunk=4, decay=0.0, sign=False)
    found = []
    for strategy in (hvkit.Synchronous(), everything):
        each, optimizer = hvkit.distribute(model(), keras.optimizers.SGD(0.1), strategy=strategy)
        x = np.arange(6).reshape(2, 3)
        data = [((x + hvkit.rank()) % 5, np.ones((2, 12), np.float32))] * 3
        LOOPS["function"](each, optimizer, data)
        found.append(weights(each))
    assert largest_difference(*found) < 1e-5


@MORE
@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: keras.optimizers.SGD(0.01), 0),
        (lambda: keras.optimizers.SGD(0.01, momentum=0.9), 1),
        (lambda: keras.optimizers.AdamW(0.01), 1),
    ],
)
def test_a_second_momentum_is_logged(make, count, monkeypatch, capsys):
    monkeypatch.setattr(main_rank, "_logged", set())
    hvkit.distribute(mlp(), make(), strategy=hvkit.DeMo())
    logged = capsys.readouterr().err
    assert logged.count("has a momentum of its own") == (count if hvkit.rank() == 0 else 0)


@pytest.mark.two_ranks
def test_late_weights_are_those_of_rank_0_to_the_last_bit_under_mixed_precision():
    """A layer's call sees weights in 16 bits: what is copied must not be that."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        expected, model = unbuilt(), unbuilt(hvkit.rank())
    finally:
        keras.config.set_dtype_policy("float32")
    expected.build((None, 8))
    hvkit.distribute(model, optimizer := keras.optimizers.SGD(0.0))
    eager_tape(model, optimizer, local(regression(steps=1)))
    for mine, rank_0 in zip(weights(model), weights(expected), strict=True):
        assert np.array_equal(mine, rank_0)
