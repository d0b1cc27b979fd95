"""Kinds of models, several optimizers, phases of training, and saved files."""

import gc
import json
import subprocess
import sys
import weakref
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    eager_tape,
    fit,
    gradients_of,
    graph_tape,
    local,
    mlp,
    mse,
    refit,
    regression,
    update,
    values,
    weights,
)
from ranks import error_of, identical, largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks


def sgd(factor=1):
    return keras.optimizers.SGD(0.02 * factor)


OPTIONS = {
    "plain": {},
    "skip": {"on_nonfinite": "skip", "batch_norm": "sync"},
    "stop": {"on_nonfinite": "stop"},
    "residuals": {"compression": hvkit.TopK(0.1), "warmup_steps": 2},
    "sharded": {"strategy": hvkit.ShardedOptimizer(), "check_every": 1},
    "rounds": {"strategy": hvkit.LocalSGD(2), "compression": "int8"},
    "beside": {"strategy": hvkit.DiLoCo(2, overlap=1)},
    "server": {"strategy": hvkit.ParameterServer(1)},
}


@MORE
@pytest.mark.parametrize(
    ("steps", "name"),
    [
        *((fit, name) for name in ("plain", "beside", "sharded")),
        *((graph_tape, name) for name in ("plain", "server")),
        *((eager_tape, name) for name in OPTIONS),
    ],
)
def test_a_model_that_a_script_drops_is_freed(steps, name):
    def train():
        model, optimizer = hvkit.distribute(mlp(0), sgd(), **OPTIONS[name])
        steps(model, optimizer, local(regression(steps=2)))
        return weakref.ref(model), weakref.ref(optimizer)

    dropped = train()
    gc.collect()
    assert [thing() for thing in dropped] == [None, None]


def test_an_optimizer_loaded_on_rank_0_alone_is_the_same_everywhere(tmp_path):
    saved = mlp(5)
    fit(saved, keras.optimizers.Adam(0.05), local(regression(steps=3)))
    model = mlp(hvkit.rank())
    optimizer = keras.optimizers.Adam(0.01)
    if hvkit.rank() == 0:
        model.set_weights(saved.get_weights())
        optimizer.build(model.trainable_variables)
        for ours, theirs in zip(optimizer.variables, saved.optimizer.variables, strict=True):
            ours.assign(theirs)
    rank_0 = hvkit.broadcast(values(saved.optimizer.variables))
    hvkit.distribute(model, optimizer, lr_scaling="none")
    assert optimizer.iterations.numpy() == 3
    assert identical(values(optimizer.variables), rank_0)
    eager_tape(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks([*weights(model), *values(optimizer.variables)])


def test_several_optimizers_on_one_model():
    model = mlp(hvkit.rank())
    pair = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
    hvkit.distribute(model, pair)
    for x, y in local(regression(steps=4)):
        _, gradients = gradients_of(lambda x=x, y=y: mse(y, model(x)), model.trainable_variables)
        for i, optimizer in enumerate(pair):
            part = slice(2 * i, 2 * i + 2)
            optimizer.apply(gradients[part], model.trainable_variables[part])
    assert same_on_all_ranks(weights(model))


class Adversaries(keras.Model):
    """Nobody calls this model; its train_step calls the two parts."""

    def __init__(self, built):
        super().__init__()
        layers = keras.layers
        head = [keras.Input((8,))] if built else []
        self.generator = keras.Sequential([*head, layers.Dense(8, "tanh"), layers.Dense(4)])
        head = [keras.Input((4,))] if built else []
        self.critic = keras.Sequential([*head, layers.Dense(1)])

    def compile(self, optimizers, **options):
        super().compile(**options)
        self.g_optimizer, self.c_optimizer = optimizers

    def train_step(self, data):
        x, real = data

        def criticised():
            return tf.reduce_mean(self.critic(self.generator(x)))

        def of_critic():
            return criticised() - tf.reduce_mean(self.critic(real))

        update(self.c_optimizer, self.critic, of_critic)
        return {"loss": update(self.g_optimizer, self.generator, lambda: -criticised())}


@MORE
@pytest.mark.parametrize("built", [True, False])
def test_a_model_with_its_own_train_step_over_its_parts(built):
    keras.utils.set_random_seed(hvkit.rank())
    model = Adversaries(built)
    optimizers = (keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    hvkit.distribute(model, optimizers)
    model.compile(optimizers, run_eagerly=built)
    refit(model, local(regression(steps=5)))
    assert same_on_all_ranks(weights(model.generator) + weights(model.critic))


def pair(seed, built=True):
    """An encoder, and a decoder with batch norm."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    first, second = ([keras.Input((n,))] if built else [] for n in (8, 6))
    encoder = keras.Sequential([*first, layers.Dense(6, "tanh")])
    return [encoder, keras.Sequential([*second, layers.BatchNormalization(), layers.Dense(4)])]


def train_pair(models, optimizer, data, make_step=tf.function):
    def step(x, y):
        models[1](models[0](x))  # which builds them
        variables = [v for model in models for v in model.trainable_variables]
        predicted = lambda: models[1](models[0](x, training=True), training=True)  # noqa: E731
        update(optimizer, variables, lambda: mse(y, predicted()))

    take = make_step(step)
    for x, y in data:
        take(tf.constant(x), tf.constant(y))


@pytest.mark.parametrize("built", cases([True, False]))
def test_a_list_of_models_trains_as_in_one_process(built):
    data = regression(steps=6)
    reference, models = pair(0, built), pair(hvkit.rank(), built)
    keras.utils.set_random_seed(0)
    train_pair(reference, sgd(), data, lambda step: step)
    keras.utils.set_random_seed(hvkit.rank())
    optimizer = sgd()
    returned, same = hvkit.distribute(models, optimizer, batch_norm="sync")
    assert (returned, same) == (models, optimizer)
    train_pair(models, optimizer, local(data))
    found, expected = ([w for m in each for w in weights(m)] for each in (models, reference))
    assert largest_difference(found, expected) < 1e-5
    assert same_on_all_ranks(found)


def test_a_model_that_was_left_out_is_refused_and_named():
    models, optimizer = pair(0), sgd()
    hvkit.distribute(models[0], optimizer)
    error, text = error_of(lambda: train_pair(models, optimizer, local(regression(steps=1))))
    assert error is ValueError
    assert f"also updates Sequential '{models[1].name}', which was not passed" in text
    assert "hvkit.distribute([encoder, decoder], optimizer)" in text


@MORE
def test_phases_of_training_with_an_optimizer_each():
    def phases(model, first, second, data, **options):
        model.layers[0].trainable = False
        fit(model, first, data[:4], **options)
        model.layers[0].trainable = True
        fit(model, second, data[4:], **options)

    def optimizers():
        return keras.optimizers.SGD(0.02), keras.optimizers.Adam(0.001)

    data = regression(steps=8)
    reference = mlp()
    phases(reference, *optimizers(), data, run_eagerly=True)
    model = mlp(hvkit.rank())
    model, pair = hvkit.distribute(model, optimizers())
    phases(model, *pair, local(data))
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5


LOADS_PLAINLY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hvkit", "horovod"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import keras, numpy
model = keras.models.load_model(sys.argv[1])
print(type(model.optimizer).__module__.split(".")[0], int(model.optimizer.iterations.numpy()))
print(model.predict(numpy.ones((1, 8)), verbose=0).tobytes().hex())
"""


@pytest.mark.two_ranks
@pytest.mark.parametrize("elsewhere", cases([False, True]))
def test_saved_files_do_not_mention_hvkit_and_load_without_it(elsewhere, tmp_path):
    model = mlp()
    model, optimizer = hvkit.distribute(model, keras.optimizers.Adam(0.01))
    fit(model, optimizer, local(regression(steps=3)))
    path = tmp_path / "model.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive:
        config = archive.read("config.json").decode()
    assert "hvkit" not in config
    assert "horovod" not in config
    assert json.loads(config)["compile_config"]["optimizer"]["class_name"] == "Adam"
    predicted = model.predict(np.ones((1, 8)), verbose=0).tobytes().hex()
    if elsewhere and hvkit.rank() == 0:
        done = subprocess.run(
            [sys.executable, "-c", LOADS_PLAINLY, path],
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.stdout.split() == ["keras", "3", predicted], done.stderr
    again = keras.models.load_model(path)
    assert [w.tolist() for w in weights(again)] == [w.tolist() for w in weights(model)]


def test_the_returned_objects_are_the_ones_passed_in_and_of_their_own_class():
    model, optimizer = mlp(), keras.optimizers.Adam()
    assert hvkit.distribute(model, optimizer) == (model, optimizer)
    assert type(model) is keras.Sequential
    assert type(optimizer) is keras.optimizers.Adam
