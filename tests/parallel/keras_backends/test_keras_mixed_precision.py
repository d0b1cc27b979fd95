"""Loss scales, mixed precision, and gradients in fewer bits on the wire."""

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras_models import (
    CUSTOM_LOOPS,
    LOOPS,
    ON_TENSORFLOW,
    alike,
    dtype_policy,
    eager_tape,
    fit,
    local,
    mlp,
    mse,
    on_tensorflow,
    refit,
    regression,
    scaled_step,
    unbuilt,
    values,
    weights,
)
from ranks import as_vector, identical, largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks


@MORE
@pytest.mark.parametrize(
    ("loop", "wrapped"), [(CUSTOM_LOOPS[0], "after the call"), ("eager", "before the call")]
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(loop, wrapped):
    model, inner = mlp(), keras.optimizers.SGD(0.01)
    scaler = keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)
    hvkit.distribute(model, scaler if wrapped == "before the call" else inner)
    scaler.build(model.trainable_variables)
    step = scaled_step
    if loop == "function":
        import tensorflow as tf

        step = tf.function(scaled_step)
    scales = []
    for i, (x, y) in enumerate(local(regression(steps=4))):
        if i == 1 and hvkit.rank() == hvkit.size() - 1:
            y = y * np.float32("inf")
        before = weights(model)
        step(model, scaler, *map(keras.ops.convert_to_tensor, (x, y)))
        scales.append(float(scaler.dynamic_scale.numpy()))
        assert (largest_difference(weights(model), before) > 0) == (i != 1)
    # Each rank has its part of the scale that one process would have.
    assert np.allclose(np.multiply(scales, hvkit.size()), [64.0, 32.0, 32.0, 32.0])
    assert alike(model)


def test_files_have_the_whole_loss_scale(tmp_path):
    model, scaler = mlp(), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01))
    path = tmp_path / "model.keras"
    model.compile(scaler, "mse")
    scaler.build(model.trainable_variables)
    for _ in range(3):
        hvkit.distribute(model, model.optimizer)
        assert float(model.optimizer.dynamic_scale.numpy()) == 2**15 / hvkit.size()
        model.save(path)
        kept = {}
        model.optimizer.save_own_variables(kept)
        model.optimizer.load_own_variables(kept)
        assert float(model.optimizer.dynamic_scale.numpy()) == 2**15 / hvkit.size()
        model = keras.models.load_model(path)
        assert float(model.optimizer.dynamic_scale.numpy()) == 2**15


class Scales(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.dynamic_scale.numpy()))


@pytest.mark.parametrize("compiled", cases(["before the call", "after the call"], 2))
def test_the_steps_that_overflow_are_those_of_one_process(compiled):
    """Each rank has its part of the scale, and float32 holds sums that float16 would not."""
    data = [(x, 50 * y) for x, y in regression(steps=20, seed=2)]

    def train(model, optimizer, data, distribute=lambda *_: None):
        scaler = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**16)
        if compiled == "after the call":
            distribute(model, optimizer)
        model.compile(optimizer=scaler, loss="mse")
        if compiled == "before the call":
            scaler.build(model.trainable_variables)
            distribute(model, scaler)
        refit(model, data, callbacks=[scales := Scales()])
        return weights(model), scales.seen

    with dtype_policy("mixed_float16"):
        alone, scales = train(mlp(0), keras.optimizers.SGD(0.05), data)
        model, optimizer = mlp(hvkit.rank()), keras.optimizers.SGD(0.05)
        mine, parts = train(model, optimizer, local(data), hvkit.distribute)
    assert len(set(scales)) > 3  # it skips some, not one after the other
    assert np.allclose(np.multiply(parts, hvkit.size()), scales)
    assert largest_difference(mine, alone) < 0.02
    assert same_on_all_ranks(mine)


@on_tensorflow
def test_two_loss_scales_in_one_graph_are_checked_at_the_same_time():
    import tensorflow as tf

    models = [mlp(seed) for seed in range(2)]
    scalers = [keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01)) for _ in models]
    hvkit.distribute(models, scalers)
    for model, scaler in zip(models, scalers, strict=True):
        scaler.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            losses = [
                scaler.scale_loss(mse(y, model(x)))
                for scaler, model in zip(scalers, models, strict=True)
            ]
        gradients = [
            tape.gradient(loss, model.trainable_variables)
            for loss, model in zip(losses, models, strict=True)
        ]
        for scaler, each in zip(scalers, gradients, strict=True):
            scaler.apply(each)

    for x, y in local(regression(steps=20)):
        step(*map(tf.constant, (x, y)))
    assert all(map(alike, models))
    assert [int(each.inner_optimizer.iterations) for each in scalers] == [20, 20]


@MORE
@pytest.mark.parametrize(
    ("policy", "compression"), [("mixed_float16", "none"), ("mixed_bfloat16", "bf16")]
)
def test_mixed_precision_policies_in_fit(policy, compression):
    """compile wraps the optimizer in a LossScaleOptimizer, after distribute."""
    data = local(regression(steps=6))
    if hvkit.rank() == 1:
        data[2] = (data[2][0] * np.float32(1e6), data[2][1])
    with dtype_policy(policy):
        model, optimizer = mlp(hvkit.rank()), keras.optimizers.Adam(0.01)
        hvkit.distribute(model, optimizer, compression=compression)
        fit(model, optimizer, data)
    assert np.isfinite(as_vector(weights(model))).all()
    assert alike(model)
    assert same_on_all_ranks(values(model.optimizer.variables))


def test_late_weights_are_those_of_rank_0_to_the_last_bit_under_mixed_precision():
    """A layer's call sees weights in 16 bits: what is copied must not be that."""
    with dtype_policy("mixed_bfloat16"):
        expected, model = unbuilt(), unbuilt(hvkit.rank())
    expected.build((None, 8))
    hvkit.distribute(model, optimizer := keras.optimizers.SGD(0.0))
    eager_tape(model, optimizer, local(regression(steps=1)))
    assert identical(weights(model), weights(expected))


COMPRESSIONS = {"bf16": 0.02, "fp16": 0.02, "int8": 0.05, "top k": 0.9, "power": 0.9}


@pytest.mark.parametrize(
    ("name", "loop"),
    cases(
        [(name, list(LOOPS)[i % len(LOOPS)]) for i, name in enumerate(COMPRESSIONS)],
        3 if ON_TENSORFLOW else 1,
    ),
)
def test_training_comes_close_to_uncompressed_training(name, loop):
    compression = {"top k": hvkit.TopK(0.5), "power": hvkit.PowerSGD(2)}.get(name, name)
    data = regression(steps=3)
    reference = mlp()
    eager_tape(reference, keras.optimizers.SGD(0.1), data)
    model, optimizer = hvkit.distribute(
        mlp(hvkit.rank()), keras.optimizers.SGD(0.1), compression=compression
    )
    LOOPS[loop](model, optimizer, local(data))
    start = as_vector(weights(mlp()))
    moved, exact = (as_vector(weights(each)) - start for each in (model, reference))
    assert 0 < largest_difference([moved], [exact]) < COMPRESSIONS[name]
    assert alike(model)


@on_tensorflow  # on PyTorch it is refused
def test_loss_scaling_goes_with_compressions_that_keep_residuals():
    """Keras takes the scale out before the optimizer averages."""
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0)
    model, optimizer = hvkit.distribute(mlp(), scaler, compression=hvkit.TopK(1))
    plain, other = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05), compression=hvkit.TopK(1))
    data = local(regression(steps=4))
    for x, y in data:
        scaled_step(model, optimizer, x, y)
    eager_tape(plain, other, data)
    assert largest_difference(weights(model), weights(plain)) < 1e-6
