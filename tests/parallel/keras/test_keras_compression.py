"""Gradients in fewer bits on the wire, and compressions that keep what they have not sent."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import LOOPS, alike, in_rounds, local, mlp, mse, regression, sgd, weights
from ranks import identical, largest_difference

import hvkit
from hvkit.sync.port import syncs_of

pytestmark = pytest.mark.two_ranks


def updated(gradient, compression, dtype="float32"):
    """A variable that starts at zero, after a step of size 1 with these gradients."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", dtype=dtype)
    model = keras.Sequential([keras.Input((len(gradient),)), layer])
    hvkit.distribute(
        model, optimizer := keras.optimizers.SGD(1.0), lr_scaling="none", compression=compression
    )
    optimizer.apply([tf.constant(gradient, dtype)[:, None]], model.trainable_variables)
    return -layer.kernel.numpy()[:, 0]


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


@MORE
@pytest.mark.parametrize("loop", ["function", "eager"])
def test_top_k_of_everything_is_the_default(loop):
    found = []
    for compression in ("none", hvkit.TopK(1)):
        model, optimizer = in_rounds(hvkit.Synchronous(), sgd(), compression=compression)
        LOOPS[loop](model, optimizer, local(regression(steps=5)))
        found.append(weights(model))
    if hvkit.size() == 2:
        assert identical(*found)
    assert largest_difference(*found) < 1e-5


@pytest.mark.parametrize(
    ("loop", "compression", "strategy"),
    cases(
        [
            ("function", hvkit.PowerSGD(1), hvkit.Synchronous()),
            ("function", hvkit.TopK(0.05), hvkit.LocalSGD(2)),
            ("eager", hvkit.TopK(0.05), hvkit.Synchronous()),
            ("eager", hvkit.PowerSGD(1), hvkit.DiLoCo(2, 0.9, 0.1)),
        ],
        first=2,
    ),
)
def test_ranks_are_alike_and_the_loss_falls(loop, compression, strategy):
    data = regression(steps=1) * 40
    model, optimizer = in_rounds(strategy, sgd(), mlp(hvkit.rank()), compression=compression)
    LOOPS[loop](model, optimizer, local(data))
    assert alike(model)
    x, y = data[0]
    assert mse(y, model(x)) < 0.8 * mse(y, mlp(0)(x))


@MORE
def test_the_residual_lets_smaller_gradients_through_later():
    """The same value is largest in every step."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), layer])
    optimizer = keras.optimizers.SGD(1.0)
    hvkit.distribute(model, optimizer, compression=hvkit.TopK(0.25))
    step = tf.function(
        lambda: optimizer.apply([tf.constant([[4.0], [1], [0], [0]])], model.trainable_variables)
    )
    for _ in range(8):
        step()
    assert layer.kernel.numpy()[1, 0] < 0


@MORE
def test_agreements_on_parts_of_a_model_each_keep_what_they_have_not_sent():
    layers = [keras.layers.Dense(n, use_bias=False) for n in (640, 640, 8)]
    model = keras.Sequential([keras.Input((512,)), *layers])
    optimizer = keras.optimizers.SGD(0.01)
    strategy = hvkit.DiLoCo(2, overlap=1)
    hvkit.distribute(model, optimizer, strategy=strategy, compression=hvkit.TopK(0.01))
    random = np.random.default_rng(hvkit.rank())
    for _ in range(5):
        x, y = (random.normal(size=(16, n)).astype(np.float32) for n in (512, 8))
        LOOPS["eager"](model, optimizer, [(x, y)])
    (sync,) = syncs_of(model)
    kept = {key: array for key, array in sync.rank_state().items() if "residual" in key}
    assert len(kept) == 3
    assert all(np.abs(array).sum() > 1 for array in kept.values())
