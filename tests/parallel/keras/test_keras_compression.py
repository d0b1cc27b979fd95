"""Gradients in fewer bits on the wire."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from keras_models import LOOPS, eager_tape, local, mlp, regression, weights
from ranks import largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks


@pytest.mark.parametrize(
    ("loop", "compression", "bound"),
    [("fit", "fp16", 0.01), ("eager", "bf16", 0.01), ("function", "int8", 0.03)],
)
def test_training_comes_close_to_uncompressed_training(loop, compression, bound):
    data = regression()
    reference = mlp()
    eager_tape(reference, keras.optimizers.SGD(0.1), data)
    model, optimizer = hvkit.distribute(
        mlp(hvkit.rank()), keras.optimizers.SGD(0.1), lr_scaling="none", compression=compression
    )
    LOOPS[loop](model, optimizer, local(data))
    assert 0 < largest_difference(weights(model), weights(reference)) < bound
    assert same_on_all_ranks(weights(model))


def updated(gradient, compression, dtype="float32"):
    """A variable that starts at zero, after a step of size 1 with these gradients."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype)
    model = keras.Sequential([keras.Input((len(gradient),)), layer])
    hvkit.distribute(
        model, optimizer := keras.optimizers.SGD(1.0), lr_scaling="none", compression=compression
    )
    optimizer.apply([tf.constant(gradient, dtype)[:, None]], model.trainable_variables)
    return -layer.kernel.numpy()[:, 0]


@MORE
@pytest.mark.parametrize(("compression", "digits"), [("fp16", 11), ("bf16", 8)])
@pytest.mark.parametrize("length", [1, 7, 1001])
def test_means_are_right_to_the_bits_of_the_format(compression, digits, length):
    everyone = np.random.default_rng(0).normal(size=(hvkit.size(), length)).astype(np.float32)
    mean = updated(everyone[hvkit.rank()], compression)
    # Half a unit in the last place for sending, and as much again for the means.
    bound = 2.0**-digits * (np.abs(everyone).mean(0) + np.abs(everyone.mean(0)))
    assert (np.abs(mean - everyone.mean(0)) <= bound).all()
    assert same_on_all_ranks([mean])


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_the_sum_does_not_overflow(compression):
    assert updated([60000.0] * 3, compression) == pytest.approx(60000, rel=2**-7)


def test_double_precision_travels_as_it_is():
    assert updated([1 + 1e-12], "fp16", "float64") == pytest.approx(1 + 1e-12, rel=1e-15)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_rows_of_sparse_gradients_are_compressed_too(compression):
    table = keras.layers.Embedding(50, 3, embeddings_initializer="zeros")
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table])
    hvkit.distribute(
        model, optimizer := keras.optimizers.SGD(1.0), lr_scaling="none", compression=compression
    )
    rows = tf.IndexedSlices(tf.ones((2, 3)), tf.constant([hvkit.rank(), 49]), (50, 3))
    optimizer.apply([rows], model.trainable_variables)
    moved = -table.embeddings.numpy()
    assert moved[0] == pytest.approx(np.full(3, 1 / hvkit.size()), rel=2**-7)
    assert moved[49] == pytest.approx(np.ones(3))


def test_mixed_precision_and_compression_go_together():
    with_policy = keras.dtype_policies.DTypePolicy("mixed_bfloat16")
    keras.utils.set_random_seed(hvkit.rank())
    layers = keras.layers
    model = keras.Sequential(
        [keras.Input((8,)), layers.Dense(16, "tanh", dtype=with_policy), layers.Dense(4)]
    )
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1), compression="bf16")
    LOOPS["fit"](model, optimizer, local(regression(steps=4)))
    assert same_on_all_ranks(weights(model))
