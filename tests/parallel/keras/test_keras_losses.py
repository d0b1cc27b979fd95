"""``fit`` trains with the mean over all ranks' tokens, weights or samples, and reports it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, losses
from models import weights
from ranks import keras_in_float64, largest_difference, same_on_all_ranks

import hvkit

WORDS, CLASSES, LENGTH, STEPS = 20, 5, 8, 4


@pytest.fixture(autouse=True)
def double_precision():
    with keras_in_float64():
        yield


def sequences(per_rank=3):
    """Words, 0 beyond the end of a text, and classes: texts of rank r are longer than of r - 1."""
    rng = np.random.default_rng(0)
    rows = STEPS * per_rank * hvkit.size()
    lengths = 1 + np.arange(rows) % hvkit.size() * 3 + rng.integers(0, 2, rows)
    shown = np.arange(LENGTH) < lengths[:, None]
    words = rng.integers(1, WORDS, (rows, LENGTH)) * shown
    return words.astype(np.int32), rng.integers(0, CLASSES, (rows, LENGTH)), shown


def tagger(seed, masks):
    """A class for each word."""
    keras.utils.set_random_seed(seed)
    inner = [layers.Embedding(WORDS, 6, mask_zero=masks), layers.Dense(8, "tanh")]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *inner, layers.Dense(CLASSES)])


def classes(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def masked_embedding():
    words, targets, _ = sequences()
    return lambda seed: tagger(seed, True), classes(), (words, targets), {}


def ignored_class():
    words, targets, shown = sequences()
    loss = classes(ignore_class=-1)
    return lambda seed: tagger(seed, False), loss, (words, np.where(shown, targets, -1)), {}


def weighted_mean():
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")
    return lambda seed: tagger(seed, False), loss, (words, targets, shown * 1.5), {}


def weights_and_mask():
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")
    return lambda seed: tagger(seed, True), loss, (words, targets, shown * targets / 3), {}


def mean_of_weighted_samples():
    words, targets, shown = sequences()
    return lambda seed: tagger(seed, False), classes(), (words, targets, shown * 1.5), {}


def sum_of_losses():
    words, targets, _ = sequences()
    return lambda seed: tagger(seed, False), classes(reduction="sum"), (words, targets), {}


def two_outputs(penalised=False):
    words, targets, shown = sequences()

    def make(seed):
        keras.utils.set_random_seed(seed)
        x = keras.Input((LENGTH,), dtype="int32")
        penalty = "l2" if penalised else None
        h = layers.Embedding(WORDS, 6, mask_zero=True, embeddings_regularizer=penalty)(x)
        h = layers.Dense(8, "tanh", activity_regularizer=penalty)(h)
        tags = layers.Dense(CLASSES, name="tags")(h)
        first = layers.Dense(1, name="first")(layers.Flatten()(layers.Dense(2)(h)))
        return keras.Model(x, {"tags": tags, "first": first})

    data = words, {"tags": targets, "first": targets[:, :1].astype(float)}
    loss = {"tags": classes(), "first": "mse"}
    return make, loss, data, {"loss_weights": {"tags": 1.0, "first": 0.3}}


CASES = {
    "masked embedding": masked_embedding,
    "ignored class": ignored_class,
    "mean with sample weights": weighted_mean,
    "sample weights and a mask": weights_and_mask,
    "mean of weighted samples": mean_of_weighted_samples,
    "sum": sum_of_losses,
    "two outputs": two_outputs,
    "penalties": lambda: two_outputs(penalised=True),
}
WAYS = {
    "fit": {},
    "eager": {"run_eagerly": True},
    "steps per execution": {"steps_per_execution": 3},
    "jit": {"jit_compile": True},
}


def mine(data):
    return keras.tree.map_structure(lambda each: each[hvkit.rank() :: hvkit.size()], data)


def trained(model, optimizer, loss, data, batch_size, **options):
    model.compile(optimizer=optimizer, loss=loss, **options)
    named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    return model.fit(**named, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history


def equals_one_process(
    case, optimizer=lambda: keras.optimizers.SGD(0.1), strategy=hvkit.Synchronous(), **way
):
    make, loss, data, options = CASES[case]()
    reference = make(0)
    expected = trained(reference, optimizer(), loss, data, 3 * hvkit.size(), **options)
    model, own = hvkit.distribute(make(hvkit.rank()), optimizer(), strategy=strategy)
    history = trained(model, own, loss, mine(data), 3, **options, **way)
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-12
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-12), name


@pytest.mark.parametrize("case", CASES)
def test_losses_are_means_over_what_all_ranks_have(case):
    equals_one_process(case)


@pytest.mark.parametrize("way", [each for each in WAYS if each != "fit"])
@pytest.mark.parametrize("case", ["ignored class", "penalties"])
def test_in_every_way_to_run_a_step(case, way):
    equals_one_process(case, **WAYS[way])


@pytest.mark.parametrize("case", ["masked embedding", "two outputs"])
def test_with_accumulated_gradients(case):
    equals_one_process(case, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


def test_with_a_divided_optimizer():
    equals_one_process(
        "masked embedding", lambda: keras.optimizers.Adam(0.01), hvkit.ShardedOptimizer()
    )


def uneven_batches(rows_of_ranks):
    """Batches of other sizes on each rank, the whole of each step, and this rank's."""
    rng = np.random.default_rng(0)
    whole = [
        (rng.normal(size=(sum(rows), 8)), rng.normal(size=(sum(rows), 4))) for rows in rows_of_ranks
    ]
    own = []
    for rows, batch in zip(rows_of_ranks, whole, strict=True):
        start = sum(rows[: hvkit.rank()])
        own.append(tuple(each[start : start + rows[hvkit.rank()]] for each in batch))
    return whole, own


def dataset(batches):
    shapes = (tf.TensorSpec((None, 8), tf.float64), tf.TensorSpec((None, 4), tf.float64))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=shapes)


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_batches_of_other_sizes_on_each_rank(embeds, eager):
    rows = [[4] * hvkit.size(), [6, 2, 5, 3][: hvkit.size()], [4] * hvkit.size()]
    whole, own = uneven_batches(rows)

    def make(seed):
        keras.utils.set_random_seed(seed)
        first = [layers.Dense(16, "tanh", kernel_regularizer="l2")]
        if embeds:  # whose gradients are sparse
            whether = layers.Lambda(lambda x: keras.ops.cast(x > 0, "int32"))
            first = [whether, layers.Embedding(2, 3), layers.Flatten()]
        return keras.Sequential([keras.Input((8,)), *first, layers.Dense(4)])

    def fitted(model, optimizer, batches):
        model.compile(optimizer=optimizer, loss="mse", run_eagerly=eager)
        return model.fit(dataset(batches), verbose=0).history["loss"]

    reference = make(0)
    expected = fitted(reference, keras.optimizers.SGD(0.1), whole)
    model, optimizer = hvkit.distribute(make(hvkit.rank()), keras.optimizers.SGD(0.1))
    assert fitted(model, optimizer, own) == pytest.approx(expected, rel=1e-12)
    assert largest_difference(weights(model), weights(reference)) < 1e-12
