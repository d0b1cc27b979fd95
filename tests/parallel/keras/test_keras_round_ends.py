"""Keras: what ranks compare when they end a round, and what errors say."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import LOOPS, alike, fit, in_rounds, local, mlp, mse, regression, sgd, weights
from ranks import error_of, largest_difference

import hvkit
from hvkit.communication.exchanges import Mean
from hvkit.frameworks.keras.collectives import named_collectives
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.weights.agreements import Agreement
from hvkit.sync import rounds
from hvkit.sync.distributed_objects import keepers_of

pytestmark = [MORE, pytest.mark.two_ranks]

STRATEGIES = [
    hvkit.LocalSGD(2),
    hvkit.DiLoCo(2, overlap=1),
    hvkit.ElasticAveraging(2),
    hvkit.Gossip(2),
    hvkit.ParameterServer(0),
]


@MORE
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "OptimizerMap"), reason="Keras is older than this optimizer"
)
@pytest.mark.parametrize("loop", ["eager", "function"])
@pytest.mark.parametrize("strategy", cases(STRATEGIES))
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


def trained_with_a_skipped_update(schedule, loop, strategy):
    """A loss scale skips the first update on rank 1, where the gradients overflow."""
    model, optimizer = mlp(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(schedule))
    hvkit.distribute(model, optimizer, strategy=strategy, lr_scaling="none")
    optimizer.build(model.trainable_variables)
    data = local(regression(steps=8))
    if hvkit.rank() == 1:
        data[0] = np.full_like(data[0][0], np.inf), data[0][1]

    def step(x, y):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(mse(y, model(x)))
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = tf.function(step) if loop == "function" else step
    for x, y in data:
        step(tf.constant(x), tf.constant(y))
    return model, optimizer


@MORE
@pytest.mark.parametrize("loop", ["eager", "function"])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(4), hvkit.DiLoCo(4, overlap=2)])
def test_a_schedule_may_be_at_another_step_where_an_update_was_skipped(strategy, loop):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    _, optimizer = trained_with_a_skipped_update(schedule, loop, strategy)
    assert int(optimizer.inner_optimizer.iterations.value) == 8 - hvkit.rank()


def with_rates_of_their_own(loop):
    model, optimizer = in_rounds(hvkit.LocalSGD(2), sgd())
    optimizer.learning_rate = 0.01 * (1 + hvkit.rank())
    LOOPS[loop](model, optimizer, local(regression(steps=4)))


@MORE
@pytest.mark.parametrize("loop", ["fit", "eager"])
def test_rates_that_differ_are_an_error_of_hvkit(loop):
    error, text = error_of(lambda: with_rates_of_their_own(loop))
    assert error is hvkit.RanksDisagreeError
    assert "the learning rate of an optimizer is 0.00999" in text
    assert "0.0199" in text


def test_an_error_in_a_graph_of_the_script_holds_the_whole_text():
    _, text = error_of(lambda: with_rates_of_their_own("function"))
    assert "RanksDisagreeError: the learning rate of an optimizer is 0.00999" in text


def test_ranks_that_step_other_optimizers_first_are_an_error():
    layers = [keras.layers.Dense(8, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    both = [sgd(), sgd()]
    hvkit.distribute(model, both, strategy=hvkit.LocalSGD(1))
    for layer, optimizer in zip(layers, both, strict=True):
        optimizer.build(layer.trainable_variables)

    def step(number):
        variables = layers[number].trainable_variables
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.ones((2, 8))) ** 2)
        both[number].apply(tape.gradient(loss, variables), variables)

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


@MORE
@pytest.mark.parametrize("loop", ["eager", "function"])
def test_agreements_that_have_ended_leave_no_vectors_in_memory(loop):
    model, optimizer = in_rounds(hvkit.DiLoCo(2, overlap=1))
    LOOPS[loop](model, optimizer, local(regression(steps=5)))
    gc.collect()
    mine = [each for each in gc.get_objects() if isinstance(each, Agreement)]
    assert mine == []


def test_messages_name_the_step_that_the_optimizer_takes(monkeypatch):
    model, optimizer = in_rounds(hvkit.DiLoCo(3, overlap=1))
    (keeper,) = keepers_of(model)
    steps, call = [], rounds.call

    def noted(name, step=None, *args, **options):
        if name == "optimizer.apply()":
            steps.append(step)
        return call(name, step, *args, **options)

    monkeypatch.setattr(rounds, "call", noted)
    data = local(regression(steps=8))
    LOOPS["eager"](model, optimizer, data[:2])
    model.layers[0].trainable = False  # ends the round
    LOOPS["eager"](model, optimizer, data[2:])
    assert keeper.shown is False
    # Overlap ends with the first step of a round; rounds end before the third step and then after
    # each three.
    assert steps == [1, 3, 3, 5, 6, 8]


@MORE
@pytest.mark.parametrize("loop", ["fit", "function"])
def test_a_round_is_named_by_its_optimizer(loop):
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    fit(model, optimizer, local(regression(steps=2)))
    (keeper,) = keepers_of(model)
    assert keeper._optimizer_label(0) == "optimizer 0"


def test_graphs_of_collectives_that_were_used_long_ago_are_freed(monkeypatch):
    made, make = [], named_collectives._function

    def noted(*args):
        made.append(weakref.ref(graph := make(*args)))
        return graph

    monkeypatch.setattr(named_collectives, "_MOST", 2)
    monkeypatch.setattr(named_collectives, "_function", noted)
    named = named_collectives.NamedCollectives(Wire("test"))
    for number in (0, 1, 2, 2, 3):
        mean = named.exchange(Mean(tf.fill([2], float(number + hvkit.rank()))), f"test.{number}")
        assert mean.numpy()[0] == number + (hvkit.size() - 1) / 2
    gc.collect()
    assert [each() is None for each in made] == [True, True, False, False]
