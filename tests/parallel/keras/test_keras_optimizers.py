"""Every built-in optimizer, with Keras's own clipping, averaging, accumulation and loss scaling."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    eager_tape,
    embedded,
    equals_one_process,
    fit,
    local,
    mlp,
    regression,
    texts,
    weights,
)
from ranks import largest_difference, same_on_all_ranks

import hvkit

BUILT_IN = sorted(
    name
    for name, each in vars(keras.optimizers).items()
    if isinstance(each, type)
    and issubclass(each, keras.optimizers.Optimizer)
    and name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
)

pytestmark = pytest.mark.two_ranks


def test_the_list_of_built_in_optimizers_is_not_empty():
    assert {"SGD", "Adam", "AdamW", "RMSprop", "Lion"} <= set(BUILT_IN)


# Their model has a dense layer as well as embeddings, so gradients of both kinds.
@MORE
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_optimizer_equals_one_process(name):
    make = getattr(keras.optimizers, name)
    equals_one_process(
        embedded, lambda factor: make(learning_rate=0.003 * factor), eager_tape, texts(5)
    )


@MORE
@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_an_optimizer_of_optimizers_equals_one_process():
    optimizers = keras.optimizers

    def make(factor):
        chosen = optimizers.OptimizerMap(optimizers.SGD(0.01 * factor))
        chosen[".*bias"] = optimizers.Adam(0.01 * factor)
        return optimizers.MultiOptimizer(chosen)

    equals_one_process(mlp, make, fit)


OPTIONS = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "weight_decay": {"weight_decay": 0.01},
    "ema": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    "loss_scale_factor": {"loss_scale_factor": 8.0},
}


# A custom loop has to scale the loss by hand; fit does it.
@MORE
@pytest.mark.parametrize(
    ("option", "loop"),
    cases(
        [
            ("global_clipnorm", "eager"),
            ("clipnorm", "function"),
            ("clipvalue", "eager"),
            ("weight_decay", "eager"),
            ("ema", "fit"),
            ("loss_scale_factor", "fit"),
        ]
    ),
)
def test_options_of_optimizers_act_on_the_mean(option, loop):
    adam = keras.optimizers.Adam
    # Keras does not divide sparse gradients by the factor.
    model, data = (mlp, None) if option == "loss_scale_factor" else (embedded, texts(8))
    equals_one_process(
        model, lambda factor: adam(0.01 * factor, **OPTIONS[option]), LOOPS[loop], data
    )


@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_gradient_accumulation_equals_the_k_times_larger_batch(loop):
    k = 3
    data = regression(steps=4 * k)
    larger = [
        tuple(np.concatenate(parts) for parts in zip(*data[i : i + k], strict=True))
        for i in range(0, len(data), k)
    ]
    reference = mlp()
    eager_tape(reference, keras.optimizers.Adam(0.01), larger)
    model = mlp(hvkit.rank())
    model, optimizer = hvkit.distribute(
        model, keras.optimizers.Adam(0.01, gradient_accumulation_steps=k)
    )
    LOOPS[loop](model, optimizer, local(data))
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5


def test_gradient_accumulation_reduces_once_in_k_steps(monkeypatch):
    from hvkit.frameworks.keras.gradients.averager import GradientAverager

    calls = []
    average = GradientAverager.__call__
    monkeypatch.setattr(
        GradientAverager,
        "__call__",
        lambda self, *args: (calls.append(self), average(self, *args))[1],
    )
    model = mlp()
    hvkit.distribute(model, optimizer := keras.optimizers.SGD(0.1, gradient_accumulation_steps=3))
    eager_tape(model, optimizer, local(regression(steps=6)))
    assert len(calls) == 2


# Which of two variables have a gradient, step by step: on rank 0, on the other ranks.
PRESENT = {
    "another on each rank": [("a", "b"), ("a", "b")],
    "one on one rank alone": [("ab", "a"), ("ab", "a")],
    "before the update alone": [("ab", "ab"), ("a", "ab")],
    "none before the update": [("", "ab"), ("ab", "b")],
    "exchanged": [("a", "b"), ("b", "a")],
}


@MORE
@pytest.mark.parametrize("accumulated", [None, 2])
@pytest.mark.parametrize("present", PRESENT)
def test_eager_ranks_may_lack_gradients_of_some_variables(present, accumulated):
    """The result is that of one process with the mean, where absent gradients count as zero."""
    n = hvkit.size()
    rng = np.random.default_rng(0)

    def two_layers():
        layers = [keras.layers.Dense(3, use_bias=False) for _ in range(2)]
        return keras.Sequential([keras.Input((3,)), *layers])

    def momentum():
        return keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=accumulated)

    model, reference = two_layers(), two_layers()
    reference.set_weights(hvkit.broadcast(model.get_weights()))
    optimizer, one_process = momentum(), momentum()
    hvkit.distribute(model, optimizer, lr_scaling="none")
    for which in PRESENT[present] * 2:
        theirs = [
            [rng.normal(size=(3, 3)).astype(np.float32) if v in which[min(r, 1)] else None
             for v in "ab"]
            for r in range(n)
        ]  # fmt: skip
        means = [
            sum(g for g in of_one if g is not None) / n
            if any(g is not None for g in of_one)
            else None
            for of_one in zip(*theirs, strict=True)
        ]
        optimizer.apply(_tensors(theirs[hvkit.rank()]), model.trainable_variables)
        one_process.apply(_tensors(means), reference.trainable_variables)
        assert same_on_all_ranks(weights(model))
        assert largest_difference(weights(model), weights(reference)) < 1e-5


def _tensors(gradients):
    return [None if g is None else tf.constant(g) for g in gradients]
