"""Where a model is cut, and what cannot be in a pipeline."""

import keras
import pytest
from cases import MORE
from keras_models import on_pytorch, on_tensorflow
from ranks import error_of
from stages import (
    MESH,
    PER_ROW,
    ROWS,
    adam,
    built,
    data,
    distributed,
    one_pipeline,
    residual,
)

import hvkit
from hvkit.communication.collectives import gather

pytestmark = [MORE, one_pipeline]


def test_rank_0_says_after_which_layer_it_has_cut(capfd):
    """The one that ``stages`` names, or its own choice."""
    for options, cut in (({}, "first"), ({"stages": ["again"]}, "again")):
        hvkit.distribute(built(residual), adam(), mesh=MESH(), microbatches=2, **options)
        said = "".join(gather("test", capfd.readouterr().err))
        assert "stage 0: " in said
        assert "MB of weights" in said
        assert f"; cut after {cut}" in said


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def shared(**_):
    inputs, dense = keras.Input((8,)), keras.layers.Dense(8, name="twice")
    return keras.Model(inputs, dense(keras.layers.Dense(8, name="between")(dense(inputs))))


def with_activity(**_):
    layers = keras.layers
    active = layers.Dense(8, name="active", activity_regularizer="l2")
    return keras.Sequential([keras.Input((8,)), active, layers.Dense(3)])


def with_synchronised(**_):
    layers = keras.layers
    norm = layers.BatchNormalization(synchronized=True, name="norm")
    return keras.Sequential([keras.Input((8,)), norm, layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Subclassed, {}, "has a call() of its own"),
        (shared, {}, "twice is called several times, and must be in one stage"),
        (with_activity, {}, "layer 'active' has an activity_regularizer"),
        pytest.param(
            with_synchronised, {}, "layer 'norm' has synchronized=True", marks=on_tensorflow
        ),
        (residual, {"stages": ["branch"]}, "cannot be cut after 'branch', only after first, skip"),
        (residual, {"stages": ["first", "skip"]}, "names 2 cuts, but a pipeline of 2 stages has 1"),
        (residual, {"stages": "layers"}, "stages must be 'flops' or 'bytes', or a list of"),
        (residual, {"strategy": hvkit.LocalSGD(2)}, "along the data axis of Mesh(data="),
    ],
)
def test_models_and_options_without_a_pipeline_are_refused_with_the_reason(make, options, message):
    model = make()
    kind, text = error_of(lambda: hvkit.distribute(model, adam(), mesh=MESH(), **options))
    assert kind is ValueError
    assert message in text


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 2}, "run Keras on JAX (KERAS_BACKEND=jax), write the model as a torch.nn"),
        ({"shard": 2}, "hvkit.ShardedOptimizer() without a mesh"),
    ],
)
def test_other_axes_are_refused_with_what_to_use(axes, message):
    mesh = hvkit.Mesh(data=ROWS, **axes)
    kind, text = error_of(lambda: hvkit.distribute(built(residual), adam(), mesh=mesh))
    assert kind is ValueError
    assert message in text


@on_tensorflow
def test_a_call_in_a_graph_is_refused():
    import tensorflow as tf

    model, _ = distributed(residual)
    x, _ = data(model, PER_ROW)
    kind, text = error_of(lambda: tf.function(model)(tf.constant(x)))
    assert kind is ValueError
    assert "leave tf.function out around the call" in text


@on_pytorch
def test_an_input_that_requires_a_gradient_is_refused():
    model, _ = distributed(residual)
    x = keras.ops.convert_to_tensor(data(model, PER_ROW)[0]).requires_grad_()
    kind, text = error_of(lambda: model(x))
    assert kind is ValueError
    assert "requires a gradient, which no rank of a pipeline computes" in text


def test_a_loss_that_a_layer_adds_is_refused():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    def make(**_):
        layers = keras.layers
        adds = Adding(name="adding_1"), Adding(name="adding_2")
        return keras.Sequential(
            [keras.Input((8,)), adds[0], layers.Dense(8), layers.Dense(3), adds[1]]
        )

    model, _ = distributed(make)
    x, _ = data(model, PER_ROW)
    kind, text = error_of(lambda: model(x))
    assert kind is (hvkit.HvkitError if hvkit.rank() else ValueError)
    assert "adds a loss of its own with add_loss()" in text
    kind, text = error_of(lambda: model(x))
    assert "adds a loss of its own with add_loss()" in text
