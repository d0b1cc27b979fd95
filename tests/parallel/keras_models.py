"""Small Keras models and training loops, and the comparison with one process.

On TensorFlow, or on PyTorch where ``KERAS_BACKEND`` says so.
"""

import contextlib
import functools
import random

import keras
import numpy as np
import pytest
from ranks import batches, largest_difference, my_part, same_on_all_ranks

import hvkit

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"
if ON_TENSORFLOW:
    import tensorflow as tf
else:
    import torch

on_tensorflow = pytest.mark.skipif(not ON_TENSORFLOW, reason="about TensorFlow")
on_pytorch = pytest.mark.skipif(ON_TENSORFLOW, reason="about PyTorch")

WORDS, LENGTH = 30, 7


def seeded(seed):
    """As ``keras.utils.set_random_seed``, which imports TensorFlow also beside PyTorch."""
    if ON_TENSORFLOW:
        keras.utils.set_random_seed(seed)
    else:
        random.seed(seed)
        torch.manual_seed(seed)


def mlp(seed=0):
    """8 inputs, 4 outputs; the same weights for the same seed."""
    seeded(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.Dense(4)])


def unbuilt(seed=0):
    """The same without an input shape: weights come with the first batch."""
    seeded(seed)
    return keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(4)])


class Subclassed(keras.Model):
    """The same, written as a class."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(16, "tanh")
        self.out = keras.layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))


def subclassed(seed=0):
    seeded(seed)
    return Subclassed()


def normalised(seed=0):
    """With batch norm; no bias before it, whose gradient would be rounding alone."""
    seeded(seed)
    dense = keras.layers.Dense(16, use_bias=False)
    inner = [dense, keras.layers.BatchNormalization(), keras.layers.Activation("tanh")]
    return keras.Sequential([keras.Input((8,)), *inner, keras.layers.Dense(4)])


class TokensAndPositions(keras.layers.Layer):
    """The sum of both embeddings, as at the start of most transformers."""

    def __init__(self, width=8, in_two_dimensions=False):
        super().__init__()
        self.tokens = keras.layers.Embedding(WORDS, width)
        self.positions = keras.layers.Embedding(LENGTH + 3, width)
        self.in_two_dimensions = in_two_dimensions

    def call(self, x):
        positions = keras.ops.arange(0, keras.ops.shape(x)[-1], 1)
        return self.tokens(x) + self.positions(
            positions[None] if self.in_two_dimensions else positions
        )


def embedded(seed=0, in_two_dimensions=False):
    """The two embeddings and a linear layer."""
    seeded(seed)
    layers = keras.layers
    words = keras.Input((None,), dtype="int32")
    x = TokensAndPositions(4, in_two_dimensions)(words)
    return keras.Model(words, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def texts(steps, per_rank=5, length=LENGTH, words=WORDS):
    """Global batches of words, some of which are frequent, and targets."""
    rng = np.random.default_rng(1)
    rows = per_rank * hvkit.size()
    return [
        (
            (words * rng.random((rows, length)) ** 2).astype(np.int32),
            rng.normal(size=(rows, 4)).astype(keras.config.floatx()),
        )
        for _ in range(steps)
    ]


def regression(steps=20, per_rank=6, seed=0):
    """Global batches of inputs and targets of shapes (rows, 8) and (rows, 4)."""
    data = batches(steps, per_rank, (8,), (4,), seed=seed)
    return [tuple(each.astype(keras.config.floatx()) for each in batch) for batch in data]


def local(data, group=None):
    """This rank's part of each batch of all ranks, or of a group."""
    return [tuple(my_part(each, group) for each in batch) for batch in data]


def joined(data):
    """All inputs, and all targets."""
    return tuple(np.concatenate(part) for part in zip(*data, strict=True))


def mse(y, predicted):
    return keras.ops.mean(keras.ops.square(keras.ops.subtract(predicted, y)))


def fit(model, optimizer, data, **compile_options):
    """``compile`` and ``fit``, over the batches in order."""
    options = {"loss": "mse", **compile_options}
    model.compile(optimizer=optimizer, **options)
    return refit(model, data)


def refit(model, data, **options):
    """``fit`` again, over the batches in order."""
    options = {"batch_size": len(data[0][0]), "shuffle": False, "verbose": 0, **options}
    return model.fit(*joined(data), **options)


def variables_of(trained):
    """Those of a model, or these."""
    return trained.trainable_variables if isinstance(trained, keras.Model) else trained


def gradients_of(compute, trained):
    """What ``compute`` returns, and its gradients of a model, which it may build, or variables."""
    if ON_TENSORFLOW:
        with tf.GradientTape() as tape:
            loss = compute()
        return loss, tape.gradient(loss, variables_of(trained))
    for variable in variables_of(trained):
        variable.value.grad = None
    loss = compute()
    loss.backward()
    return loss, [variable.value.grad for variable in variables_of(trained)]


def update(optimizer, trained, compute):
    """A step of a custom loop, that minimises what ``compute`` returns; returns it, too."""
    loss, gradients = gradients_of(compute, trained)
    optimizer.apply(gradients, variables_of(trained))
    return loss


def tape_step(model, optimizer, x, y):
    return update(optimizer, model, lambda: mse(y, model(x, training=True)))


def scaled_step(model, optimizer, x, y, by=1.0):
    """A step that scales the loss, and then its gradients by a number."""
    _, gradients = gradients_of(lambda: optimizer.scale_loss(mse(y, model(x))), model)
    optimizer.apply([gradient * by for gradient in gradients], model.trainable_variables)


def eager_tape(model, optimizer, data):
    """A custom loop without ``tf.function``."""
    for x, y in data:
        tape_step(model, optimizer, x, y)


def graph_tape(model, optimizer, data):
    """A custom loop with ``tf.function``, which another call with the same variables uses again."""
    steps = vars(model).setdefault("_steps_of_graph_tape", {})
    made_for = (optimizer, *map(id, model.trainable_variables))
    if made_for not in steps:
        steps[made_for] = tf.function(lambda x, y: tape_step(model, optimizer, x, y))
    for x, y in data:
        steps[made_for](tf.constant(x), tf.constant(y))


def steps_of_halves(model, optimizer, loop):
    """Two functions that train either layer of ``mlp``."""
    halves = model.trainable_variables[:2], model.trainable_variables[2:]

    def step(x, y, which):
        update(optimizer, halves[which], lambda: mse(y, model(x)))

    steps = [lambda x, y, w=which: step(x, y, w) for which in (0, 1)]
    if loop == "function":
        steps = [tf.function(each) for each in steps]
    return steps


LOOPS = {"fit": fit, "eager": eager_tape}
if ON_TENSORFLOW:
    LOOPS["function"] = graph_tape
CUSTOM_LOOPS = ["function", "eager"] if ON_TENSORFLOW else ["eager"]


def in_eager_code(loop):
    """The same loop without a graph, which one process makes only to run a few steps."""
    return {graph_tape: eager_tape, fit: functools.partial(fit, run_eagerly=True)}.get(loop, loop)


def weights(model):
    return values(model.weights)


def values(variables):
    return [each.numpy().copy() for each in variables]


def distributed(model, optimizer, **options):
    """``hvkit.distribute``, and the optimizer's state: graphs that make it are traced twice."""
    hvkit.distribute(model, optimizer, **options)
    return with_state(model, optimizer)


def with_state(model, optimizer):
    """Both, after the optimizer has made its state, if the model has its weights."""
    if model.built:
        optimizer.build(model.trainable_variables)
    return model, optimizer


def equals_one_process(
    make_model, make_optimizer, loop, data=None, tolerance=1e-5, lr_scaling="linear", **options
):
    """Train on all ranks, and alone on the global batches at the rate that a step uses; compare.

    ``make_model(seed)`` and ``make_optimizer(lr_factor)``. Returns the distributed model.
    """
    data = data or regression(steps=8)
    factor = {"none": 1, "linear": hvkit.size()}[lr_scaling]
    reference, optimizer = with_state(make_model(0), make_optimizer(factor))
    in_eager_code(loop)(reference, optimizer, data)
    # Another seed on every rank but rank 0: the start is rank 0's.
    model = make_model(hvkit.rank())
    model, optimizer = distributed(model, make_optimizer(1), lr_scaling=lr_scaling, **options)
    loop(model, optimizer, local(data))
    identical = alike(model)
    assert largest_difference(weights(model), weights(reference)) < tolerance
    assert identical
    return model


def sgd(**options):
    return keras.optimizers.SGD(0.05, momentum=0.9, **options)


def in_rounds(strategy, optimizer=None, model=None, **options):
    return distributed(model or mlp(), optimizer or sgd(), strategy=strategy, **options)


def alike(model):
    return same_on_all_ranks(weights(model))


def filled_like(model, value):
    return [np.full_like(w, value) for w in weights(model)]


@contextlib.contextmanager
def dtype_policy(name):
    """Layers that are made meanwhile have this policy."""
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")
