"""Row-sparse gradients: rows looked up for each sample, and rows looked up for the whole batch."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from keras_models import LOOPS, TokensAndPositions, embedded, equals_one_process, texts

import hvkit
from hvkit.frameworks.keras.tensorflow.averager import GradientAverager
from hvkit.frameworks.keras.tensorflow.sparse import Origin, origin

pytestmark = MORE


def transformer(seed=0):
    """A text classifier: 2 classes, sequences of any length up to 10."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    words = keras.Input((None,), dtype="int32")
    x = TokensAndPositions()(words)
    # The keys have no bias: its gradient is zero, and Adam would amplify its rounding error.
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4, use_bias=False)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, "relu")(x)))
    return keras.Model(words, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def adam(factor, **options):
    return keras.optimizers.Adam(0.01 * factor, **options)


def test_a_transformer_with_positions_equals_one_process():
    # Some processors round so that Adam's default epsilon amplifies it to more than 1e-5.
    equals_one_process(
        transformer, lambda factor: adam(factor, epsilon=1e-3), LOOPS["fit"], texts(8)
    )


def test_positions_of_shape_one_by_length_equal_one_process():
    equals_one_process(lambda seed: embedded(seed, True), adam, LOOPS["function"], texts(5))


@pytest.mark.parametrize("loop", ["fit", "eager"])
def test_accumulation_equals_one_process_that_accumulates(loop):
    equals_one_process(
        embedded, lambda factor: adam(factor, gradient_accumulation_steps=2), LOOPS[loop], texts(5)
    )


def test_one_word_per_sample_and_one_sample_per_rank_is_not_a_position():
    """All ranks often have the same word; one process has several rows for it."""

    def make_model(seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        words = [keras.Input((1,), dtype="int32"), layers.Embedding(2, 4), layers.Flatten()]
        return keras.Sequential([*words, layers.Dense(4)])

    data = texts(12, per_rank=1, length=1, words=2)
    assert any(len(set(words.ravel())) == 1 for words, _ in data)
    equals_one_process(make_model, adam, LOOPS["function"], data)


def slices(indices, dtype=tf.int32):
    """A row for each index: the rank's number plus one."""
    values = tf.ones((len(indices), 2)) * (hvkit.rank() + 1)
    return tf.IndexedSlices(values, tf.constant(indices, dtype), tf.constant([10, 2]))


def mean_of(name, mine, where="eager"):
    variable = keras.Variable(np.zeros((10, 2), np.float32))
    average = GradientAverager(f"hvkit.test.{name}", hvkit.Synchronous())
    if where == "graph":
        return tf.function(lambda: average([mine], [variable])[0])()
    if where == "argument":
        return tf.function(lambda g: average([g], [variable])[0])(mine)
    return average([mine], [variable])[0]


TOTAL = sum(range(1, hvkit.size() + 1))


@pytest.mark.parametrize("where", ["eager", "graph", "argument"])
def test_a_rank_with_shorter_sequences_has_the_first_positions(where):
    mine = [0, 1, 2, 3] if hvkit.rank() == 0 else [0, 1]
    mean = mean_of(f"shorter.{where}", slices(mine), where)
    assert mean.indices.numpy().tolist() == [0, 1, 2, 3]
    expected = np.array([TOTAL, TOTAL, 1, 1]) / hvkit.size()
    assert mean.values.numpy()[:, 1] == pytest.approx(expected)


@pytest.mark.parametrize("indices", [[3, 3], [4, 2], [5]])
def test_rows_that_are_not_positions_stay_apart(indices):
    mean = mean_of(f"apart.{indices}", slices(indices))
    assert mean.indices.numpy().tolist() == indices * hvkit.size()


def test_rows_are_not_made_dense():
    mean = mean_of("slices", slices([hvkit.rank()]))
    assert mean.indices.numpy().tolist() == list(range(hvkit.size()))
    assert mean.values.numpy()[:, 0] == pytest.approx(np.arange(1, 1 + hvkit.size()) / hvkit.size())


def test_a_rank_without_the_gradient_sends_no_rows_for_any_dtype_of_indices():
    mine = (
        None if hvkit.rank() == 0 else slices([1, 2], tf.int64 if hvkit.rank() == 1 else tf.int32)
    )
    mean = mean_of("absent", mine)
    assert mean.indices.numpy().tolist() == [1, 2]
    assert mean.values.numpy()[:, 0] == pytest.approx((TOTAL - 1) / hvkit.size())


def test_a_graph_shows_where_indices_come_from():
    found = {}
    variable, constant = tf.Variable([1, 2, 3]), tf.range(200)

    @tf.function
    def step(x):
        found["the length"] = origin(tf.range(tf.shape(x)[1]))
        found["a constant outside"] = origin(constant + 1)
        found["a variable"] = origin(variable + 1)
        found["the samples"] = origin(tf.reshape(x, [-1]) + 1)
        found["chance"] = origin(tf.random.uniform([3], 0, 9, tf.int32))
        found["an argument"] = origin(tf.identity(x))
        found["another function"] = origin(inner(x))
        tf.cond(x[0, 0] > 0, lambda: in_branch(x), lambda: 0)

    @tf.function
    def inner(x):
        return x + 1

    def in_branch(x):
        found["the samples, in a branch"] = origin(x + 1)
        return 0

    step(tf.ones((2, 3), tf.int32))
    assert found == {
        "the length": Origin.BATCH,
        "a constant outside": Origin.BATCH,
        "a variable": Origin.BATCH,
        "the samples": Origin.SAMPLES,
        "chance": Origin.SAMPLES,
        "an argument": Origin.UNKNOWN,
        "another function": Origin.UNKNOWN,
        "the samples, in a branch": Origin.SAMPLES,
    }
