"""Which statistics batch-norm layers use and keep."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import LOOPS, eager_tape, local, weights
from ranks import batches, identical, largest_difference, same_on_all_ranks

import hvkit
from hvkit.frameworks.keras.buffers import average_statistics
from hvkit.frameworks.keras.tensorflow.wire import GraphWait
from hvkit.runtime import all_ranks


def normalised(seed=0):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(6, 3, use_bias=False),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(4, 3, use_bias=False),
            layers.BatchNormalization(axis=-1, scale=False),
            layers.Flatten(),
            layers.Dense(4),
        ]
    )


def images(steps):
    return batches(steps, 6, (6, 6, 1), (4,))


def distributed(**options):
    model = normalised(hvkit.rank())
    return hvkit.distribute(model, keras.optimizers.SGD(0.05), **options)


def statistics(model):
    return [w.numpy() for w in model.non_trainable_variables if "moving" in w.path]


def made_synchronised(layer):
    """The layer as it is made for ``tf.distribute``."""
    config = layer.get_config()
    if isinstance(layer, keras.layers.BatchNormalization):
        config["synchronized"] = True
    return type(layer).from_config(config)


@pytest.mark.parametrize(
    ("loop", "made"), cases([("function", False), ("eager", False), ("eager", True)])
)
def test_synchronised_layers_equal_one_process_with_all_ranks_batches(loop, made):
    data = images(steps=5)
    reference, model = normalised(), normalised(hvkit.rank())
    eager_tape(reference, keras.optimizers.SGD(0.05), data)
    if made:
        model = keras.models.clone_model(normalised(), clone_function=made_synchronised)
        model.set_weights(normalised().get_weights())
    optimizer = keras.optimizers.SGD(0.05)
    hvkit.distribute(model, optimizer, batch_norm="average" if made else "sync")
    LOOPS[loop](model, optimizer, local(data))
    assert largest_difference(weights(model), weights(reference)) < 1e-5
    assert same_on_all_ranks(weights(model))


@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_moving_statistics_are_averaged_with_every_update(loop):
    data = local(images(steps=1))
    twin = normalised()
    twin(data[0][0], training=True)
    expected = [np.mean(hvkit.allgather(each), axis=0) for each in statistics(twin)]
    model, optimizer = distributed()
    LOOPS[loop](model, optimizer, data)
    assert largest_difference(statistics(model), expected) < 1e-6
    assert same_on_all_ranks(weights(model))
    assert not same_on_all_ranks(statistics(twin))


@pytest.mark.two_ranks
def test_moving_statistics_stay_each_ranks_own_on_request():
    model, optimizer = distributed(batch_norm="local")
    LOOPS["eager"](model, optimizer, local(images(steps=3)))
    assert same_on_all_ranks([v.numpy() for v in model.trainable_variables])
    assert not same_on_all_ranks(statistics(model))


@pytest.mark.two_ranks
def test_frozen_layers_keep_their_statistics_bit_for_bit():
    model, optimizer = distributed()
    LOOPS["eager"](model, optimizer, local(images(steps=2)))
    model.layers[1].trainable = False
    before = weights(model.layers[1])
    LOOPS["eager"](model, optimizer, local(images(steps=3)))
    assert identical(weights(model.layers[1]), before)
    assert same_on_all_ranks(weights(model))


def test_masked_entries_do_not_count_in_synchronised_layers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * hvkit.size(), 5, 3)).astype(np.float32)
    mask = rng.random((2 * hvkit.size(), 5)) < 0.6
    layer = keras.layers.BatchNormalization()
    layer(x, training=True, mask=mask)
    model = keras.Sequential([keras.Input((5, 3)), keras.layers.BatchNormalization()])
    hvkit.distribute(model, keras.optimizers.SGD(0.1), batch_norm="sync")
    rows = slice(hvkit.rank() * 2, hvkit.rank() * 2 + 2)
    model.layers[0](tf.constant(x[rows]), training=True, mask=mask[rows])
    expected = [layer.moving_mean.numpy(), layer.moving_variance.numpy()]
    assert largest_difference(statistics(model), expected) < 1e-5


@pytest.mark.two_ranks
def test_a_synchronised_layer_may_be_called_twice_in_a_graph():
    """As that of a discriminator, on true and on generated samples."""
    data = images(steps=2)
    (expected,) = local([[normalised()(x, training=True).numpy() for x, _ in data]])
    model, _ = distributed(batch_norm="sync")
    call = tf.function(lambda *parts: [model(each, training=True) for each in parts])
    for _ in range(20):  # in any order
        found = call(*(tf.constant(x) for x, _ in local(data)))
        assert largest_difference(found, expected) < 1e-5


class Whole(keras.Model):
    """Built by its first call, perhaps inside a graph, which then calls its layers twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = (keras.layers.BatchNormalization() for _ in range(2))

    def call(self, x, training=False):
        return self.second(self.first(x, training=training), training=training)


@pytest.mark.two_ranks
def test_a_model_that_rank_0_alone_has_built_normalises_over_all_in_functions_inside_others():
    model = Whole()
    hvkit.distribute(model, keras.optimizers.SGD(0.1), batch_norm="sync")
    if hvkit.rank() == 0:
        model(tf.ones((1, 3)))

    @tf.function
    def normalised(x):
        return model(x, training=True)

    @tf.function
    def both(x, y, twice):
        of_x = normalised(x)
        of_y = normalised(y)
        return of_x, of_y, tf.cond(twice, lambda: model(x, training=True), lambda: of_x)

    x, y = (np.random.default_rng(seed).normal(size=(64, 3)).astype("float32") for seed in (0, 1))
    (mine,) = local([[x, y]])

    def expected(data):
        return local([[Whole()(data, training=True).numpy()]])[0][0]

    for _ in range(10):
        found = both(*mine, tf.constant(True))
        assert largest_difference(found, [expected(each) for each in (x, y, x)]) < 1e-4
    # Rank 0 traces the functions again, for fewer rows.
    both(mine[0], mine[1][hvkit.rank() == 0 :], tf.constant(True))


@pytest.mark.two_ranks
def test_the_averages_of_statistics_in_float64_are_not_rounded():
    both = [keras.layers.BatchNormalization(dtype=each) for each in ("float32", "float64")]
    model = keras.Sequential([keras.Input((3,)), *both])
    hvkit.distribute(model, keras.optimizers.SGD(0.1))
    wait = GraphWait("hvkit.test.statistics")
    for layer in both:
        layer.moving_mean.assign(np.full(3, 1 / 3 + hvkit.rank()))
    tf.function(average_statistics, autograph=False)(model, wait, all_ranks())
    expected = np.full(3, 1 / 3 + (hvkit.size() - 1) / 2)
    assert largest_difference([both[1].moving_mean], [expected]) < 1e-12
    assert largest_difference([both[0].moving_mean], [expected]) < 1e-6
    assert wait.read() == (1, 1)  # of a step, which these numbers count


@MORE
@pytest.mark.two_ranks
def test_models_with_synchronised_layers_save_as_plain_ones(tmp_path):
    model, optimizer = distributed(batch_norm="sync")
    LOOPS["fit"](model, optimizer, local(images(steps=1)))
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.models.load_model(path)
    if hvkit.rank() == 0:  # no collective is left in it
        loaded.layers[1](images(1)[0][0][..., :1].repeat(6, -1), training=True)
    hvkit.barrier()
