"""Keras: strategies that average gradients in every step."""

import random

import keras
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import (
    LOOPS,
    distributed,
    embedded,
    equals_one_process,
    local,
    mlp,
    regression,
    texts,
    values,
    weights,
)
from ranks import error_of, identical

import hvkit
from hvkit import main_rank
from hvkit.frameworks.keras.divided_state import why_not_by_variable

WHOLE_MOMENTUM = hvkit.DeMo(top_k=16, chunk=4, decay=0.0, sign=False)


@MORE
@pytest.mark.parametrize(
    ("strategy", "loop", "make"),
    [
        (hvkit.Centralized(), "function", mlp),
        (WHOLE_MOMENTUM, "eager", mlp),
        (WHOLE_MOMENTUM, "function", embedded),
        (hvkit.Centralized(), "eager", mlp),
    ],
)
def test_one_rank_that_averages_and_momentum_that_is_sent_whole_equal_one_process(
    strategy, loop, make
):
    def sgd(factor):
        return keras.optimizers.SGD(0.02 * factor)

    before = hvkit.traffic().get("gradients", (0, 0))[0]
    data = texts(8) if make is embedded else regression(steps=8)
    model = equals_one_process(make, sgd, LOOPS[loop], data, strategy=strategy)
    sent = hvkit.traffic()["gradients"].bytes - before
    if isinstance(strategy, hvkit.Centralized):
        size = sum(w.nbytes for w in weights(model))
        assert sent == 8 * size * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)


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


def in_half_precision():
    """Of three layers, so that one rank may own nothing but small ones."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, "tanh", dtype="bfloat16") for _ in range(3)]
    return keras.Sequential([keras.Input((8,)), *layers, keras.layers.Dense(4)])


def with_one_weight():
    """So that one rank owns everything."""
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])


def both(make, loop, model=large):
    """Models and optimizers, trained with the state whole and with the state sharded."""
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ShardedOptimizer()):
        each, optimizer = distributed(model(), make(), strategy=strategy)
        loop(each, optimizer, local(regression(steps=6)))
        found += [each, optimizer]
    return found


@pytest.mark.parametrize(
    ("name", "loop", "model"),
    cases(each_once(list(MAKE), list(LOOPS), [large, in_half_precision, with_one_weight, large])),
)
def test_a_sharded_optimizer_gives_the_same_weights_bit_for_bit(name, loop, model):
    whole, _, model, _ = both(MAKE[name], LOOPS[loop], model)
    assert identical(weights(model), weights(whole))


def state_bytes(optimizer):
    return sum(v.numpy().nbytes for v in optimizer.variables if len(v.shape))


@MORE
@pytest.mark.parametrize("trained", [False, True])
def test_a_sharded_optimizer_keeps_a_part_of_the_state(trained):
    """Also of what an optimizer has that one rank has trained before."""
    model, optimizer = large(), keras.optimizers.Adam(0.01)
    everything = 2 * sum(w.nbytes for w in weights(model))
    if trained:
        LOOPS["eager"](model, optimizer, regression(steps=1))
    hvkit.distribute(model, optimizer, strategy=hvkit.ShardedOptimizer())
    LOOPS["eager"](model, optimizer, local(regression(steps=2)))
    mine, largest = state_bytes(optimizer), max(w.nbytes for w in weights(model))
    assert 0 < mine <= everything / hvkit.size() + 2 * largest
    assert sum(hvkit.allgather(mine)) == everything


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize(("name", "loop"), [("scaled", "eager"), ("adamw", "function")])
def test_the_state_is_saved_whole(name, loop, tmp_path):
    folder = hvkit.broadcast(tmp_path)
    loop = LOOPS[loop]
    whole, reference, model, optimizer = both(MAKE[name], loop)
    with hvkit.settled(optimizer):
        if hvkit.rank() == 0:
            found = values(optimizer.variables)
            assert identical(found, values(reference.variables))
            model.optimizer = optimizer
            model.save(folder / "whole.keras")
    error, text = error_of(lambda: optimizer.save_own_variables({}))
    if name != "scaled":  # that one only holds the other
        assert error is ValueError
        assert "hvkit.settled(optimizer)" in text
    hvkit.Checkpoint(folder / "a", model=model, optimizer=optimizer).save(epoch=0, step=6)

    again, resumed = hvkit.distribute(large(1), MAKE[name](), strategy=hvkit.ShardedOptimizer())
    hvkit.Checkpoint(folder / "a", model=again, optimizer=resumed).restore()
    assert state_bytes(resumed) == state_bytes(optimizer)
    data = local(regression(steps=10))[6:]
    loop(again, resumed, data)
    loop(whole, reference, data)
    assert identical(weights(again), weights(whole))


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


REFUSED = [
    (NormOfAll, {}, "NormOfAll does not update each weight on its own"),
    (keras.optimizers.SGD, {"use_ema": True}, "use_ema=True"),
    (keras.optimizers.Adafactor, {}, "Adafactor keeps"),
]
if hasattr(keras.optimizers, "ScheduleFreeAdamW"):  # of a newer Keras
    free = keras.optimizers.ScheduleFreeAdamW
    REFUSED.append((free, {}, "it changes all weights when it is built"))


@pytest.mark.parametrize(("kind", "options", "expected"), REFUSED)
def test_optimizers_that_ranks_cannot_divide_are_refused(kind, options, expected):
    def run():
        optimizer = kind(0.1, **options)
        model, _ = hvkit.distribute(large(), optimizer, strategy=hvkit.ShardedOptimizer())
        optimizer.build(model.trainable_variables)

    error, text = error_of(run)
    assert error is ValueError
    assert expected in text


def test_ranks_divide_an_optimizer_only_if_a_trial_shows_that_they_can():
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


@MORE
@pytest.mark.parametrize(("momentum", "count"), [(0.0, 0), (0.9, 1)])
def test_a_second_momentum_is_logged(momentum, count, monkeypatch, capsys):
    monkeypatch.setattr(main_rank, "_logged", set())
    optimizer = keras.optimizers.SGD(0.01, momentum=momentum)
    hvkit.distribute(mlp(), optimizer, strategy=hvkit.DeMo())
    logged = capsys.readouterr().err
    assert logged.count("has a momentum of its own") == (count if hvkit.rank() == 0 else 0)
