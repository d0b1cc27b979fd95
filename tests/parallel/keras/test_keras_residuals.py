"""Keras: compressions that keep for later steps what they have not sent."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import LOOPS, local, mlp, mse, regression, weights
from ranks import largest_difference, same_on_all_ranks

import hvkit
from hvkit.frameworks.keras.collectives.graph_collectives import CompressedMeans
from hvkit.sync.distributed_objects import keepers_of

pytestmark = pytest.mark.two_ranks


def trained(compression, loop, data, **options):
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model, optimizer = hvkit.distribute(
        mlp(hvkit.rank()), optimizer, compression=compression, **options
    )
    LOOPS[loop](model, optimizer, local(data))
    return model


@MORE
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_top_k_of_everything_is_the_default(loop):
    expected = weights(trained("none", loop, regression()))
    found = weights(trained(hvkit.TopK(1), loop, regression()))
    if hvkit.size() == 2:
        assert all(map(np.array_equal, found, expected))
    assert largest_difference(found, expected) < 1e-5


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
    model = trained(compression, loop, data, strategy=strategy)
    assert same_on_all_ranks(weights(model))
    x, y = data[0]
    assert mse(y, model(x)) < 0.8 * mse(y, mlp(0)(x))


@MORE
@pytest.mark.parametrize("kept", [True, False])
def test_without_the_residual_the_gradients_are_not_all_used(kept, monkeypatch):
    """The same value is largest in every step; only the residual lets the other through."""
    if not kept:
        monkeypatch.setattr(CompressedMeans, "keep", lambda *_: None)
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((4,)), layer])
    optimizer = keras.optimizers.SGD(1.0)
    hvkit.distribute(model, optimizer, compression=hvkit.TopK(0.25))
    step = tf.function(
        lambda: optimizer.apply([tf.constant([[4.0], [1], [0], [0]])], model.trainable_variables)
    )
    for _ in range(8):
        step()
    assert (layer.kernel.numpy()[1, 0] < 0) == kept


def test_loss_scaling_goes_with_residuals():
    """Keras takes the scale out before the optimizer averages."""
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)
    model, optimizer = hvkit.distribute(mlp(), scaler, compression=hvkit.TopK(1))
    plain, other = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05), compression=hvkit.TopK(1))
    for x, y in local(regression(steps=4)):
        for each, update in ((model, optimizer), (plain, other)):
            with tf.GradientTape() as tape:
                loss = update.scale_loss(mse(y, each(x)))
            variables = each.trainable_variables
            update.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert largest_difference(weights(model), weights(plain)) < 1e-6


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
    (keeper,) = keepers_of(model)
    kept = {key: array for key, array in keeper.own_state().items() if "residual" in key}
    assert len(kept) == 3
    assert all(np.abs(array).sum() > 1 for array in kept.values())
