"""Variables that an update overwrites with their gradient: all ranks use the largest."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from keras_models import LOOPS, alike, graph_tape, local, regression, sgd
from ranks import error_of

import hvkit

pytestmark = [
    MORE,
    pytest.mark.two_ranks,
    pytest.mark.skipif(
        "overwrite_with_gradient"
        not in inspect.signature(keras.layers.Layer.add_weight).parameters,
        reason="Keras is older than these variables",
    ),
]


def float8(seed=0):
    keras.utils.set_random_seed(seed)
    policy = keras.dtype_policies.QuantizedFloat8DTypePolicy(
        "float8", "float32", amax_history_length=3
    )
    layer = keras.layers.Dense(4, dtype=policy)
    return keras.Sequential([keras.Input((8,)), layer])


def overwritten(model):
    return {v.name: v.numpy() for v in model.variables if v.overwrite_with_gradient}


@pytest.mark.parametrize(("loop", "steps"), [("function", None), ("fit", 2)])
def test_scales_of_float8_cover_the_values_of_all_ranks(loop, steps):
    """Those of outputs belong to gradients, which each rank has of its own samples."""
    data = [(x * (1 + np.arange(len(x)))[:, None], y) for x, y in regression(steps=6)]
    alone = float8()
    graph_tape(alone, keras.optimizers.SGD(1e-4, gradient_accumulation_steps=steps), data)
    model = float8(hvkit.rank())
    optimizer = keras.optimizers.SGD(1e-4, gradient_accumulation_steps=steps)
    model, optimizer = hvkit.distribute(model, optimizer)
    LOOPS[loop](model, optimizer, local(data))
    assert alike(model)
    expected = overwritten(alone)
    for name, value in overwritten(model).items():
        if not name.startswith("outputs"):
            # The kernel learns from gradients that each rank has rounded to 8 bits.
            rtol = 1e-5 if name.startswith("inputs") else 1e-2
            np.testing.assert_allclose(value, expected[name], rtol=rtol)
    np.testing.assert_allclose(model.weights[0], alone.weights[0], rtol=0.1, atol=1e-3)


class Overwritten(keras.layers.Layer):
    """Beside a kernel it has a variable that updates overwrite with its gradient."""

    def build(self, shape):
        self.kernel = self.add_weight(name="kernel", shape=(2,))
        self.largest = self.add_weight(name="largest", shape=(2,), overwrite_with_gradient=True)

    def call(self, x):
        return x * self.kernel


@pytest.mark.parametrize("steps", [None, 3])
def test_eager_updates_overwrite_with_the_largest_gradient(steps):
    model = keras.Sequential([keras.Input((2,)), Overwritten()])
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
    model, optimizer = hvkit.distribute(model, optimizer)
    rank, size = hvkit.rank(), hvkit.size()
    for step in range(steps or 1):
        mine = np.array([1.0 + rank - step, 9.0 - rank - step], np.float32)
        optimizer.apply([tf.constant(mine), tf.constant(mine)], model.trainable_variables)
    np.testing.assert_array_equal(model.layers[0].largest, [size, 9.0])
    assert alike(model)


def test_ranks_that_train_alone_refuse_float8():
    model, optimizer = hvkit.distribute(float8(), sgd(), strategy=hvkit.LocalSGD(every=2))
    kind, text = error_of(lambda: graph_tape(model, optimizer, local(regression(steps=1))))
    assert kind is ValueError
    assert "inputs_scale is overwritten in each update" in text
    assert "use hvkit.Synchronous()" in text
