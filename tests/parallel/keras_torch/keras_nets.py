"""Small models of Keras on PyTorch, the ways to train them, and the comparison with one process."""

import random

import keras
import numpy as np
import torch
from keras import layers
from ranks import batches, largest_difference, same_on_all_ranks

import hvkit

WORDS, LENGTH = 30, 7


def seeded(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def mlp(seed=0):
    """8 inputs, 4 outputs; the same weights for the same seed."""
    seeded(seed)
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(4)])


def unbuilt(seed=0):
    """The same without an input shape: weights come with the first batch."""
    seeded(seed)
    return keras.Sequential([layers.Dense(16, "tanh"), layers.Dense(4)])


def normalised(seed=0):
    """With batch norm."""
    seeded(seed)
    # Without a bias, whose gradient would be rounding alone.
    dense = layers.Dense(16, use_bias=False)
    inner = [dense, layers.BatchNormalization(), layers.Activation("tanh")]
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(4)])


def embedded(seed=0):
    """Words in, 4 outputs."""
    seeded(seed)
    inner = [layers.Embedding(WORDS, 6), layers.GlobalAveragePooling1D()]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *inner, layers.Dense(4)])


class InParts(keras.Model):
    """A ``train_step`` that never calls the model itself."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(16, "tanh"), layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = ((self.out(self.hidden(x)) - y) ** 2).mean()
        loss.backward()
        own = self.trainable_weights
        self.optimizer.apply([v.value.grad for v in own], own)
        return {"loss": loss.detach()}


class ConvNet(keras.Model):
    """Images in, 4 outputs, with batch norm; subclassed, so that its first batch builds it."""

    def __init__(self, seed=0):
        super().__init__()
        seeded(seed)
        # Without biases, whose gradients would be rounding alone.
        self.convolutions = [layers.Conv2D(n, 3, use_bias=False) for n in (4, 8)]
        self.norms = [layers.BatchNormalization() for _ in self.convolutions]
        self.pool, self.out = layers.GlobalAveragePooling2D(), layers.Dense(4)

    def call(self, x, training=False):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = keras.ops.relu(norm(convolution(x), training=training))
        return self.out(self.pool(x))


def images(steps=20, per_rank=6):
    """Global batches of 8 x 8 pixels, and targets."""
    data = batches(steps, per_rank, (8, 8, 1), (4,), seed=0)
    return [tuple(each.astype(keras.config.floatx()) for each in batch) for batch in data]


def regression(steps=20, per_rank=6):
    """Global batches of inputs and targets."""
    data = batches(steps, per_rank, (8,), (4,), seed=0)
    return [tuple(each.astype(keras.config.floatx()) for each in batch) for batch in data]


def texts(steps=20, per_rank=6):
    """Global batches of words, and targets."""
    rng, rows = np.random.default_rng(1), per_rank * hvkit.size()
    words = (rng.integers(0, WORDS, (rows, LENGTH)).astype("int32") for _ in range(steps))
    return [(each, rng.normal(size=(rows, 4)).astype(keras.config.floatx())) for each in words]


def local(data):
    """This rank's part of global batches."""
    return [tuple(each[hvkit.rank() :: hvkit.size()] for each in batch) for batch in data]


def fit(model, optimizer, data, **options):
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    joined = [np.concatenate(each) for each in zip(*data, strict=True)]
    options = {"shuffle": False, "verbose": 0, "batch_size": len(data[0][0]), **options}
    return model.fit(*joined, **options)


def loop(model, optimizer, data):
    for x, y in data:
        model.zero_grad()
        loss = ((model(torch.from_numpy(x), training=True) - torch.from_numpy(y)) ** 2).mean()
        loss.backward()
        own = model.trainable_variables
        optimizer.apply([v.value.grad for v in own], own)


LOOPS = {"fit": fit, "loop": loop}


def weights(model):
    return [w.numpy() for w in model.weights]


def equals_one_process(make, make_optimizer, train, data, *, tolerance, factor=1, **options):
    """Train on all ranks, and alone on the global batches; compare. Returns the distributed model.

    ``make(seed)`` and ``make_optimizer(lr_factor)``; ``factor`` is what a step multiplies the rate
    by.
    """
    reference = make(0)
    train(reference, make_optimizer(factor), data)
    model = make(hvkit.rank())  # another start on every rank but rank 0
    model, optimizer = hvkit.distribute(model, make_optimizer(1), **options)
    seeded(0)
    train(model, optimizer, local(data))
    identical = same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < tolerance
    assert identical
    return model
