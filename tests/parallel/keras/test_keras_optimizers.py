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
from hvkit.frameworks.keras.tensorflow.averager import GradientAverager

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


def of_several(rate):
    optimizers = keras.optimizers
    chosen = optimizers.OptimizerMap(optimizers.SGD(rate))
    chosen[".*bias"] = optimizers.Adam(rate)
    return optimizers.MultiOptimizer(chosen)


def adam_with(**options):
    return lambda rate: keras.optimizers.Adam(rate, **options)


OPTIMIZERS = {name: getattr(keras.optimizers, name) for name in BUILT_IN} | {
    "clipnorm": adam_with(clipnorm=0.1),
    "global_clipnorm": adam_with(global_clipnorm=0.1),
    "clipvalue": adam_with(clipvalue=0.01),
    "weight_decay": adam_with(weight_decay=0.01),
    "ema": adam_with(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3),
    "loss_scale_factor": adam_with(loss_scale_factor=8.0),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # of a newer Keras
    OPTIMIZERS["several"] = of_several


@MORE
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_their_options_equal_one_process(name):
    """The model has a dense layer as well as embeddings, so gradients of both kinds."""
    # Keras does not divide sparse gradients by the factor; a loop has to scale the loss by hand.
    alone = name in ("loss_scale_factor", "several")
    model, data = (mlp, regression(steps=5)) if alone else (embedded, texts(5))
    loop = fit if name in ("ema", "loss_scale_factor") else eager_tape
    equals_one_process(model, lambda factor: OPTIMIZERS[name](0.003 * factor), loop, data)


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
    n, rank = hvkit.size(), hvkit.rank()
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
        gradients = tf.constant(rng.normal(size=(n, 2, 3, 3)), tf.float32)
        has = np.float32([[v in which[min(r, 1)] for v in "ab"] for r in range(n)])
        mine = [g if there else None for g, there in zip(gradients[rank], has[rank], strict=True)]
        means = [
            tf.reduce_mean(gradients[:, v] * has[:, v, None, None], 0) if has[:, v].any() else None
            for v in range(2)
        ]
        optimizer.apply(mine, model.trainable_variables)
        one_process.apply(means, reference.trainable_variables)
        assert same_on_all_ranks(weights(model))
        assert largest_difference(weights(model), weights(reference)) < 1e-5
