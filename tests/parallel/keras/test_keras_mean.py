"""``hvkit.mean`` in loops of TensorFlow: eager code, and graphs."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from ranks import error_of, keras_in_float64, largest_difference

import hvkit


def loss_of(model, x, y, mask, mean):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x))
    mask = tf.cast(mask, losses.dtype)
    return mean(tf.reduce_sum(losses * mask), tf.reduce_sum(mask))


def classifier():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(5)]
    return keras.Sequential([keras.Input((8,)), *layers])


@MORE
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_ranks_with_different_counts_train_the_model_of_one_process(in_graph):
    numbers = np.random.default_rng(0)
    with keras_in_float64():
        models = classifier(), classifier()
        optimizers = keras.optimizers.SGD(0.5), keras.optimizers.SGD(0.5)
        hvkit.distribute(models[0], optimizers[0])

        def step(number, *batch):
            model, mean = models[number], (hvkit.mean, lambda total, count: total / count)[number]
            with tf.GradientTape() as tape:
                loss = loss_of(model, *batch, mean)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizers[number].apply(gradients, model.trainable_variables)
            return loss

        mine = tf.function(step, reduce_retracing=True) if in_graph else step
        for _ in range(5):
            size = 4 * hvkit.size()
            batch = (
                numbers.normal(size=(size, 8)),
                numbers.integers(0, 5, size),
                numbers.random(size),
            )
            whole = batch[0], batch[1], batch[2] < 0.5
            own = [
                np.split(part, range(6, size, 4)[: hvkit.size() - 1])[hvkit.rank()]
                for part in whole
            ]
            assert abs(float(mine(0, *map(tf.constant, own))) - float(step(1, *whole))) < 1e-12
        assert largest_difference(models[0].get_weights(), models[1].get_weights()) < 1e-12


def test_counts_of_nothing_and_numbers_of_integers():
    assert np.isnan(hvkit.mean(tf.constant(0.0), 0))
    assert float(hvkit.mean(tf.constant(3.0), tf.constant(2))) == 1.5
    whole = hvkit.mean(tf.constant(3), 2.5)
    assert (float(whole), whole.dtype) == (1.2, tf.float64)
    assert hvkit.mean(3, tf.constant(2.0, tf.float16)).dtype == tf.float16


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_ranks_without_tokens_may_pass_numbers_and_counts_have_gradients(in_graph):
    last = hvkit.rank() == hvkit.size() - 1

    def means(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            mean = hvkit.mean(*(x, 2) if last else (0.0, 0))
            of_count = hvkit.mean(3.0, x)
        return mean, tape.gradient(of_count, x)

    mean, gradient = (tf.function(means) if in_graph else means)(tf.constant(2.0))
    assert (float(mean), mean.dtype) == (1, tf.float32)
    assert float(gradient) == pytest.approx(-3 / 4)  # 3 N / 2 N, whose derivative is -3 / 4 N


@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_other_shapes_are_refused_on_every_rank(in_graph):
    one, three = (1, 3) if hvkit.is_main() else (3, 1)

    def mean():
        return hvkit.mean(tf.ones(one), tf.ones(three))

    kind, text = error_of(tf.function(mean) if in_graph else mean)
    assert "same shapes on every rank" in text
    assert in_graph or kind is hvkit.RanksDisagreeError
