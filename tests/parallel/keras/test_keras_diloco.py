"""Keras: DiLoCo, also with agreements that run beside training."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import (
    LOOPS,
    alike,
    in_rounds,
    local,
    mlp,
    mse,
    normalised,
    regression,
    sgd,
    update,
    weights,
)
from ranks import diloco_by_hand, identical, largest_difference, shared_folder, wait_for

import hvkit
from hvkit.frameworks.keras.tensorflow.local_weights import Exchanges


@MORE
@pytest.mark.parametrize(
    ("loop", "overlap"),
    [("eager", 0), ("function", 1), ("fit", 3), ("function", 0)],
)
def test_three_rounds_of_diloco_equal_a_numpy_script(loop, overlap):
    data = regression(steps=12)
    start = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, use_bias=False)])
    model.set_weights([start])
    strategy = hvkit.DiLoCo(4, outer_lr=0.6, outer_momentum=0.8, overlap=overlap)
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.05), model)
    LOOPS[loop](model, optimizer, local(data))

    own, anchor, _ = diloco_by_hand(start, data, gradient, 0.05, strategy)
    if loop != "fit":  # which has ended the round
        assert largest_difference(weights(model), [own[hvkit.rank()]]) < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(weights(model), [anchor]) < 1e-6


def gradient(weights, inputs, targets):
    return 2 / targets.size * inputs.T @ (inputs @ weights - targets)


@pytest.mark.parametrize("loop", cases(["eager", "function"]))
def test_an_agreement_runs_beside_training(loop, tmp_path_factory):
    """Rank 0 is two steps ahead when the others end their round."""
    ahead = shared_folder(tmp_path_factory) / "ahead"
    model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=3), model=normalised())
    data = local(regression(steps=8))
    LOOPS[loop](model, optimizer, data[:1])
    if hvkit.rank() == 0:
        LOOPS[loop](model, optimizer, data[1:6])
        ahead.touch()
    else:
        LOOPS[loop](model, optimizer, data[1:3])
        wait_for(ahead)
        LOOPS[loop](model, optimizer, data[3:6])
    LOOPS[loop](model, optimizer, data[6:])
    with hvkit.settled(model):
        assert alike(model)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("loop", "compression"),
    each_once(["function", "eager"], ["int8", hvkit.PowerSGD(4)]),
)
def test_settled_beside_an_agreement_leaves_no_trace(loop, compression):
    data = local(regression(steps=12))
    found = []
    for looks in (False, True):
        model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=2), compression=compression)
        for first, last in ((0, 4), (4, 5), (5, 8), (8, 12)):
            LOOPS[loop](model, optimizer, data[first:last])
            if looks:
                with hvkit.settled(model):
                    assert alike(model)
        found.append(weights(model))
    assert identical(*found)


@pytest.mark.two_ranks
def test_layers_that_are_frozen_beside_an_agreement_get_what_is_due():
    model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=2))
    data = local(regression(steps=10))
    LOOPS["eager"](model, optimizer, data[:4])
    model.layers[0].trainable = False
    LOOPS["eager"](model, optimizer, data[4:])
    first = [w.numpy() for w in model.layers[0].weights]
    assert largest_difference(first, hvkit.broadcast(first)) < 1e-6


def test_agreements_that_begin_together_have_the_same_names_on_all_ranks(monkeypatch):
    """Two optimizers end a round in the same step, in threads of any order."""
    expected = trained_by_two_optimizers()
    begun = itertools.count()
    run = Exchanges._run_in_thread

    def late(self):
        if next(begun) == 0 and hvkit.rank() == 1:
            time.sleep(0.5)
        run(self)

    monkeypatch.setattr(Exchanges, "_run_in_thread", late)
    assert identical(trained_by_two_optimizers(), expected)


def trained_by_two_optimizers():
    """The agreed weights of two layers of one shape, each with its optimizer."""
    layers = [keras.layers.Dense(8, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.set_weights([np.eye(8), 2 * np.eye(8)])
    both = [keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.05)]
    hvkit.distribute(model, both, strategy=hvkit.DiLoCo(4, overlap=2))
    for x, y in local(regression(steps=6)):
        with tf.GradientTape(persistent=True) as tape:
            loss = mse(y, model(x)[:, :4])
        for optimizer, layer in zip(both, layers, strict=True):
            variables = layer.trainable_variables
            optimizer.apply(tape.gradient(loss, variables), variables)
    with hvkit.settled(model):
        return weights(model)


@pytest.mark.two_ranks
def test_a_variable_beside_the_model_is_no_obstacle_to_a_checkpoint(tmp_path_factory):
    strategy = hvkit.DiLoCo(4, overlap=2)
    model, optimizer = hvkit.distribute(mlp(), sgd(), strategy=strategy)
    beside = keras.Variable(1.0)
    checkpoint = hvkit.Checkpoint(shared_folder(tmp_path_factory), model=model)
    for x, y in local(regression(steps=5)):
        variables = [*model.trainable_variables, beside]
        update(optimizer, variables, lambda x=x, y=y: mse(y, beside * model(x)))
    assert checkpoint.save(epoch=0, step=5).is_dir()
