"""Gradients of every kind are averaged, in eager code and in graphs."""

import logging
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from keras_models import graph_tape, local, mlp, regression, weights
from ranks import error_of, largest_difference

import hvkit
from hvkit.frameworks.keras.tensorflow.averager import GradientAverager

pytestmark = pytest.mark.two_ranks


def sgd(factor=1):
    return keras.optimizers.SGD(0.02 * factor)


@pytest.mark.parametrize("kinds", [["dense", None], ["slices", None], ["slices", "dense"]])
def test_eager_ranks_may_differ_in_the_gradients_they_have(kinds):
    """Rank 0 has the first kind, other ranks the second; no rank uses the third variable."""
    gradients = {
        "dense": tf.ones((4, 2)),
        "slices": tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([4, 2])),
        None: None,
    }
    mine = gradients[kinds[0] if hvkit.rank() == 0 else kinds[1]]
    variables = [keras.Variable(np.zeros((4, 2), np.float32)) for _ in range(3)]
    name = f"hvkit.test.{kinds[0]}.{kinds[1]}"
    means = GradientAverager(name, hvkit.Synchronous())([mine, tf.ones((4, 2)), None], variables)
    expected = np.zeros((4, 2))
    for rank in range(hvkit.size()):
        theirs = gradients[kinds[0] if rank == 0 else kinds[1]]
        expected += 0 if theirs is None else tf.convert_to_tensor(theirs).numpy()
    assert tf.convert_to_tensor(means[0]).numpy() == pytest.approx(expected / hvkit.size())
    assert isinstance(means[0], tf.IndexedSlices) == (kinds == ["slices", None])
    assert means[1].numpy() == pytest.approx(1)
    assert means[2] is None


def test_more_gradients_than_variables_are_an_error():
    variable = keras.Variable(np.zeros(3, np.float32))
    averager = GradientAverager("hvkit.test.more", hvkit.Synchronous())
    with pytest.raises(ValueError, match="2 gradients for 1 variables"):
        averager([tf.ones(3), tf.ones(3)], [variable])


@MORE
@pytest.mark.parametrize("accumulate", [None, 2])
def test_graphs_of_ranks_that_lack_a_gradient_are_an_error_not_a_hang(accumulate):
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
    hvkit.distribute(model, optimizer)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = model.layers[0](x)
            loss = tf.reduce_sum(model.layers[1](hidden) if hvkit.rank() == 0 else hidden)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    if accumulate:
        step(tf.ones((2, 8)))  # nothing is sent yet
    error, text = error_of(lambda: step(tf.ones((2, 8))))
    assert error is tf.errors.InvalidArgumentError
    assert "only some ranks have a gradient" in text
    assert "dense_1/kernel" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_every_dtype_are_averaged(dtype):
    variable = keras.Variable(np.zeros(3, np.float32), dtype=dtype)
    (mean,) = GradientAverager(f"hvkit.test.{dtype}", hvkit.Synchronous())(
        [tf.cast([60000.0] * 3, dtype) * (1 if hvkit.rank() < 2 else 0)], [variable]
    )
    assert mean.dtype.name == dtype
    expected = tf.cast(tf.cast(60000.0, dtype), tf.float64) * 2 / hvkit.size()
    assert tf.cast(mean, tf.float64).numpy() == pytest.approx(expected.numpy(), rel=5e-3)


def test_autograph_translates_the_users_code_alone(monkeypatch):
    translated = []
    average = GradientAverager.__call__

    def look(self, *args):
        frames = traceback.extract_stack()
        translated.extend(f.name for f in frames if "autograph_generated" in f.filename)
        return average(self, *args)

    monkeypatch.setattr(GradientAverager, "__call__", look)
    model, optimizer = hvkit.distribute(mlp(), sgd())

    @tf.function
    def users_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    users_step(tf.ones((2, 8)), tf.ones((2, 4)))
    assert translated == ["tf__users_step"]


@MORE
def test_tensorflow_does_not_warn_that_hvkit_is_traced_again_and_again():
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for seed in range(8):
            model, optimizer = hvkit.distribute(mlp(seed), sgd())
            graph_tape(model, optimizer, local(regression(steps=1)))
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [text for text in warnings if "GradientAverager" in text]


@MORE
@pytest.mark.parametrize("compression", ["bf16", "none"])
def test_a_dense_layer_on_sequences_in_batches_of_any_size(compression):
    # While tracing, TensorFlow does not know the shape of such a kernel's gradient.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(14 * hvkit.size(), 5, 8)).astype(np.float32)
    y = rng.normal(size=(14 * hvkit.size(), 1)).astype(np.float32)

    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5, 8)), *layers])

    def fit(model, optimizer, x, y, batch_size, **options):
        model.compile(optimizer, "mse", **options)
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    reference = make()
    fit(reference, sgd(), x, y, 4 * hvkit.size(), run_eagerly=True)
    model, optimizer = hvkit.distribute(make(), sgd(), compression=compression)
    fit(model, optimizer, *hvkit.shard((x, y)), 4)
    difference = largest_difference(weights(model), weights(reference))
    assert difference < (1e-5 if compression == "none" else 1e-2)
