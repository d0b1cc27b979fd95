"""Keras models in a pipeline, and one process that trains in the same micro-batches.

On two ranks a pipeline of two stages; on four, started with HOROVOD_DYNAMIC_PROCESS_SETS=1, two
pipelines of two stages.
"""

import functools
import random

import keras
import numpy as np
import pytest
from keras import ops
from keras_models import ON_TENSORFLOW
from ranks import largest_difference, same_on_all_ranks

import hvkit
from hvkit.pipeline.gpipe import sizes_of

ROWS, MICRO, PER_ROW = max(hvkit.size() // 2, 1), 4, 8
MESH = functools.partial(hvkit.Mesh, pipeline=2, data=ROWS)

one_pipeline = pytest.mark.skipif(ROWS > 1, reason="about one pipeline")


def cnn(**_):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(12, "tanh"),
            layers.Dense(3),
        ]
    )


def residual(regularizer=None, norm=False, **_):
    """Branches and residual connections between single tensors; a nested model."""
    layers = keras.layers
    inputs = keras.Input((64,))
    x = layers.Dense(16, "tanh", name="first", kernel_regularizer=regularizer)(inputs)
    x = layers.Add(name="skip")([x, layers.Dense(16, "tanh", name="branch")(x)])
    if norm:
        x = layers.BatchNormalization(name="norm")(x)
    hidden = keras.Sequential([keras.Input((16,)), layers.Dense(16, "tanh", name="in_nested")])
    x = layers.Add(name="again")([x, hidden(x)])
    if norm:
        x = layers.BatchNormalization(name="norm_again")(x)
    x = layers.Dense(16, "tanh", name="last", kernel_regularizer=regularizer)(x)
    return keras.Model(inputs, layers.Dense(3, name="out")(x))


def built(make, seed=0, **options):
    random.seed(seed)
    np.random.seed(seed)
    if ON_TENSORFLOW:
        keras.utils.set_random_seed(seed)
    else:  # Keras would import TensorFlow where it finds it
        import torch

        torch.manual_seed(seed)
    return make(**options)


def data(model, samples, seed=0):
    """Inputs and targets for all rows."""
    rng = np.random.default_rng(seed)
    kind = keras.config.floatx()
    x = rng.normal(size=(samples * ROWS, *model.input_shape[1:])).astype(kind)
    return x, rng.normal(size=(samples * ROWS, 3)).astype(kind)


def row():
    return hvkit.rank() // 2


def mine(array, per_row=PER_ROW):
    """This row's samples, of arrays that one process reads in batches of all rows."""
    steps = range(0, len(array), per_row * ROWS)
    return np.concatenate([array[s : s + per_row * ROWS][row() :: ROWS] for s in steps])


def in_microbatches(model, x, micro=MICRO, training=True):
    """The model's outputs in one process; each row has micro-batches of its own."""
    places, outputs = [], []
    for r in range(ROWS):
        numbers = np.arange(len(x))[r::ROWS]
        sizes = sizes_of(len(numbers), min(micro, len(numbers)))
        for part in np.split(numbers, np.cumsum(sizes)[:-1]):
            outputs.append(model(x[part], training=training))
            places.append(part)
    order = np.argsort(np.concatenate(places))
    return ops.take(ops.concatenate(outputs, 0), order, 0)


def gradients_of(compute, model):
    """What a function returns, and the gradients of the model's weights."""
    if ON_TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = compute()
        return loss, tape.gradient(loss, model.trainable_variables)
    model.zero_grad()
    loss = compute()
    loss.backward()
    return loss.detach(), [v.value.grad for v in model.trainable_variables]


def one_process(model, optimizer, x, y, epochs=1, weights=None, micro=MICRO, reduction="mean"):
    """Train, and return the mean loss of the last epoch."""
    size = PER_ROW * ROWS
    for _ in range(epochs):
        losses = []
        for s in range(0, len(x), size):
            kind = None if weights is None else weights[s : s + size]

            def loss(batch=slice(s, s + size), kind=kind):
                predicted = in_microbatches(model, x[batch], micro)
                mse = keras.losses.MeanSquaredError(reduction=reduction)
                found = mse(y[batch], predicted, kind)
                return found + sum(model.losses)

            total, gradients = gradients_of(loss, model)
            optimizer.apply(gradients, model.trainable_variables)
            losses.append((float(total), len(x[s : s + size])))
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
    return np.average([v for v, _ in losses], weights=[n for _, n in losses])


def whole(model):
    """The model's weights, the same on every rank."""
    with hvkit.settled(model):
        found = model.get_weights() if hvkit.is_main() else None
    return hvkit.broadcast(found)


def adam(**options):
    return keras.optimizers.AdamW(0.01, weight_decay=0.01, **options)


def distributed(make, make_optimizer=adam, seed=None, micro=MICRO, **options):
    model = built(make, hvkit.rank() if seed is None else seed, **options)
    optimizer = make_optimizer()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=micro)
    return model, optimizer


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def fit_equals_one_process(
    make,
    make_optimizer=None,
    samples=24,
    epochs=2,
    bound=1e-6,
    compiled=None,
    change=None,
    micro=MICRO,
    **options,
):
    """Train in ``fit`` and compare weights and loss; return both models.

    AdamW would enlarge what float32 rounds off.
    """
    make_optimizer = make_optimizer or (sgd if keras.config.floatx() == "float32" else adam)
    alone = built(make, **options)
    if change:
        change(alone)
    x, y = data(alone, samples)
    start = alone.get_weights()
    loss = one_process(alone, make_optimizer(), x, y, epochs, micro=micro)
    model = built(make, hvkit.rank(), **options)
    if hvkit.rank() == 0:
        model.set_weights(start)
    if change:
        change(model)
    optimizer = make_optimizer()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=micro)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled or {})
    history = model.fit(
        mine(x), mine(y), batch_size=PER_ROW, epochs=epochs, shuffle=False, verbose=0
    ).history
    assert same_on_all_ranks([np.array(history["loss"]), np.array(history["mae"])])
    assert abs(history["loss"][-1] - loss) < 10 * bound * abs(loss)
    found = whole(model)
    assert largest_difference(found, alone.get_weights()) < bound
    assert largest_difference(found, start) > 1e-3
    return model, alone
