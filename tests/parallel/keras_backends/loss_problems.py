"""Models and data whose losses are means over something that differs between ranks."""

import functools

import keras
import numpy as np
from keras import layers, losses
from keras_models import seeded

import hvkit

WORDS, CLASSES, LENGTH, STEPS = 20, 5, 8, 4
UNEVEN = [6, 2, 5, 3][: hvkit.size()]
EVEN = [4] * hvkit.size()


def sequences(per_rank=3):
    """Words, 0 beyond the end of a text, and classes: texts of rank r are longer than of r - 1."""
    rng = np.random.default_rng(0)
    rows = STEPS * per_rank * hvkit.size()
    lengths = 1 + np.arange(rows) % hvkit.size() * 3 + rng.integers(0, 2, rows)
    shown = np.arange(LENGTH) < lengths[:, None]
    words = rng.integers(1, WORDS, (rows, LENGTH)) * shown
    return words.astype(np.int32), rng.integers(0, CLASSES, (rows, LENGTH)), shown


def tagger(seed=0, masks=False):
    """A class for each word."""
    seeded(seed)
    inner = [layers.Embedding(WORDS, 6, mask_zero=masks), layers.Dense(8, "tanh")]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *inner, layers.Dense(CLASSES)])


def classes(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def ignored_class():
    """Inputs, and targets of which some do not count; this loss leaves these out."""
    words, targets, shown = sequences()
    return (words, np.where(shown, targets, -1)), classes(ignore_class=-1)


def with_penalties(seed):
    """Two outputs, one of them masked, and losses of layers."""
    seeded(seed)
    x = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(WORDS, 6, mask_zero=True, embeddings_regularizer="l2")(x)
    h = layers.Dense(8, "tanh", activity_regularizer="l2")(h)
    tags = layers.Dense(CLASSES, name="tags")(h)
    first = layers.Dense(1, name="first")(layers.Flatten()(layers.Dense(2)(h)))
    return keras.Model(x, {"tags": tags, "first": first})


def problems():
    """By name: what makes the model, the loss, the data, and options of ``compile``."""
    words, targets, shown = sequences()
    masking = functools.partial(tagger, masks=True)
    of_weights = classes(reduction="mean_with_sample_weight")
    ignoring, ignoring_loss = ignored_class()
    both = {"tags": targets, "first": targets[:, :1].astype(float)}
    loss_of_both = {"tags": classes(), "first": "mse"}
    loss_weights = {"loss_weights": {"tags": 1.0, "first": 0.3}}
    return {
        "ignored class": (tagger, ignoring_loss, ignoring, {}),
        "masked embedding": (masking, classes(), (words, targets), {}),
        "mean with sample weights": (tagger, of_weights, (words, targets, shown * 1.5), {}),
        "weights and a mask": (masking, of_weights, (words, targets, shown * targets / 3), {}),
        "mean of weighted samples": (tagger, classes(), (words, targets, shown * 1.5), {}),
        "sum": (tagger, classes(reduction="sum"), (words, targets), {}),
        "penalties": (with_penalties, loss_of_both, (words, both), loss_weights),
    }


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


def mine(data):
    return keras.tree.map_structure(lambda each: each[hvkit.rank() :: hvkit.size()], data)


def named(data):
    return dict(zip(("x", "y", "sample_weight"), data, strict=False))


def trained(model, optimizer, loss, data, batch_size, **options):
    model.compile(optimizer=optimizer, loss=loss, **options)
    options = {"epochs": 2, "shuffle": False, "verbose": 0, "batch_size": batch_size}
    return model.fit(**named(data), **options).history
