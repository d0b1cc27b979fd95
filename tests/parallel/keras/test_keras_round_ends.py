"""Keras: what ranks compare when they end a round, and what errors say."""

import copy
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, each_once
from keras_models import (
    LOOPS,
    alike,
    in_rounds,
    local,
    mlp,
    regression,
    scaled_step,
    sgd,
    update,
    weights,
)
from ranks import error_of, largest_difference

import hvkit
from hvkit.communication.exchanges import Mean
from hvkit.frameworks.keras.tensorflow import local_updates, wire
from hvkit.frameworks.keras.tensorflow.local_weights import Exchanges

pytestmark = [MORE, pytest.mark.two_ranks]

STRATEGIES = [
    hvkit.LocalSGD(2),
    hvkit.DiLoCo(2, overlap=1),
    hvkit.ElasticAveraging(2),
    hvkit.Gossip(2),
    hvkit.ParameterServer(0),
]


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "OptimizerMap"), reason="Keras is older than this optimizer"
)
@pytest.mark.parametrize(("strategy", "loop"), each_once(STRATEGIES, ["eager", "function"]))
def test_an_optimizer_that_holds_others_trains(strategy, loop):
    model = mlp()
    rates = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.05))
    rates[".*bias"] = keras.optimizers.SGD(0.01)
    optimizer = keras.optimizers.MultiOptimizer(rates)
    optimizer.build(model.trainable_variables)
    hvkit.distribute(model, optimizer, strategy=strategy)
    begun = weights(model)
    LOOPS[loop](model, optimizer, local(regression(steps=4)))
    assert largest_difference(weights(model), begun) > 1e-3
    with hvkit.settled(model):
        assert alike(model)


@pytest.mark.parametrize("loop", ["eager", "function"])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(4), hvkit.DiLoCo(4, overlap=2)])
def test_a_schedule_may_be_at_another_step_where_an_update_was_skipped(strategy, loop):
    """A loss scale skips the first update on rank 1, where the gradients overflow."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule))
    model, optimizer = in_rounds(strategy, optimizer)
    step = tf.function(scaled_step) if loop == "function" else scaled_step
    for number, batch in enumerate(local(regression(steps=8))):
        by = np.float32(np.inf if number == 0 and hvkit.rank() == 1 else 1)
        step(model, optimizer, *map(tf.constant, (*batch, by)))
    assert int(optimizer.inner_optimizer.iterations.value) == 8 - hvkit.rank()


def test_a_copy_of_an_optimizer_does_not_exchange(monkeypatch):
    _, optimizer = in_rounds(hvkit.LocalSGD(2))
    copied = keras.optimizers.LossScaleOptimizer(copy.deepcopy(optimizer))
    monkeypatch.setattr(local_updates.Updates, "around", None)  # is not called
    scaled_step(mlp(), copied, *local(regression(steps=1))[0])


@pytest.mark.parametrize("loop", ["fit", "eager", "function"])
def test_rates_that_differ_are_an_error_of_hvkit(loop):
    model, optimizer = in_rounds(hvkit.LocalSGD(2), sgd())
    optimizer.learning_rate = 0.01 * (1 + hvkit.rank())
    error, text = error_of(lambda: LOOPS[loop](model, optimizer, local(regression(steps=4))))
    assert "the learning rate of an optimizer is 0.00999" in text
    assert "0.0199" in text
    if loop == "function":  # the error is TensorFlow's, and holds the whole text
        assert "RanksDisagreeError: the learning rate" in text
    else:
        assert error is hvkit.RanksDisagreeError


def test_ranks_that_step_other_optimizers_first_are_an_error():
    layers = [keras.layers.Dense(8, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    both = [sgd(), sgd()]
    hvkit.distribute(model, both, strategy=hvkit.LocalSGD(1))
    for layer, optimizer in zip(layers, both, strict=True):
        optimizer.build(layer.trainable_variables)

    def step(number):
        variables = layers[number].trainable_variables
        update(both[number], variables, lambda: tf.reduce_mean(model(tf.ones((2, 8))) ** 2))

    error, text = error_of(lambda: step(hvkit.rank()))
    assert error is hvkit.RanksDisagreeError
    assert "variable" in text


def test_statistics_that_differ_before_training_are_no_error():
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]
    )
    optimizer = sgd()
    hvkit.distribute(model, optimizer, strategy=hvkit.LocalSGD(2))
    model.compile(optimizer, "mse")
    x, y = local(regression(steps=1))[0]
    model(x, training=True)
    for _ in range(3):
        model.evaluate(x, y, verbose=0)


def test_weights_that_differ_before_training_are_an_error_each_time():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    model.compile(optimizer, "mse")
    x, y = local(regression(steps=1))[0]
    model.layers[0].kernel.assign_add(tf.fill((8, 16), float(hvkit.rank())))
    for _ in range(2):
        error, text = error_of(lambda: model.evaluate(x, y, verbose=0))
        assert error is hvkit.RanksDisagreeError
        assert "weight 0, kernel, of rank 1" in text


@pytest.mark.parametrize("loop", ["eager", "function"])
def test_agreements_that_have_ended_leave_no_vectors_in_memory(loop):
    model, optimizer = in_rounds(hvkit.DiLoCo(2, overlap=1))
    LOOPS[loop](model, optimizer, local(regression(steps=5)))
    gc.collect()
    mine = [each for each in gc.get_objects() if isinstance(each, Exchanges)]
    assert mine == []


def test_graphs_of_collectives_that_were_used_long_ago_are_freed(monkeypatch):
    made, make = [], wire._function

    def noted(*args):
        made.append(weakref.ref(graph := make(*args)))
        return graph

    monkeypatch.setattr(wire, "_MOST", 2)
    monkeypatch.setattr(wire, "_function", noted)
    named = wire.NamedCollectives(wire.Wire("test"))
    for number in (0, 1, 2, 2, 3):
        mean = named.exchange(Mean(tf.fill([2], float(number + hvkit.rank()))), f"test.{number}")
        assert mean.numpy()[0] == number + (hvkit.size() - 1) / 2
    gc.collect()
    assert [each() is None for each in made] == [True, True, False, False]
