"""Kinds of models, gradients and files."""

import json
import logging
import subprocess
import sys
import traceback
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from models import (
    LOOPS,
    eager_tape,
    equals_one_process,
    fit,
    graph_tape,
    local,
    mlp,
    refit,
    regression,
    tape_step,
    weights,
)
from ranks import error_of, largest_difference, my_part, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks


def sgd(factor=1):
    return keras.optimizers.SGD(0.02 * factor)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_embedding_gradients_stay_sparse_and_equal_one_process(loop, optimizer):
    def make_model(seed):
        keras.utils.set_random_seed(seed)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((3,), dtype="int32"),
                layers.Embedding(40, 4),
                layers.Flatten(),
                layers.Dense(4),
            ]
        )

    words = np.random.default_rng(0).integers(0, 40, (8, 6 * hvkit.size(), 3)).astype(np.int32)
    data = [(w, y) for w, (_, y) in zip(words, regression(steps=8), strict=True)]
    make = getattr(keras.optimizers, optimizer)
    equals_one_process(make_model, lambda factor: make(0.01 * factor), LOOPS[loop], data)


def test_the_mean_of_indexed_slices_is_not_made_dense():
    from hvkit.adapters.keras.averager import GradientAverager

    variable = keras.Variable(np.zeros((10, 2), np.float32))
    rank = hvkit.rank()
    slices = tf.IndexedSlices(tf.ones((1, 2)) * rank, tf.constant([rank]), tf.constant([10, 2]))
    (mean,) = GradientAverager("hvkit.test.slices")([slices], [variable])
    assert isinstance(mean, tf.IndexedSlices)
    assert mean.indices.numpy().tolist() == list(range(hvkit.size()))
    assert mean.values.numpy()[:, 0] == pytest.approx(np.arange(hvkit.size()) / hvkit.size())


@pytest.mark.parametrize("kinds", [["dense", None], ["slices", None], ["slices", "dense"]])
def test_eager_ranks_may_differ_in_the_gradients_they_have(kinds):
    """Rank 0 has the first kind, the others the second; a third variable is used by none."""
    from hvkit.adapters.keras.averager import GradientAverager

    gradients = {
        "dense": tf.ones((4, 2)),
        "slices": tf.IndexedSlices(tf.ones((1, 2)), tf.constant([1]), tf.constant([4, 2])),
        None: None,
    }
    mine = gradients[kinds[0] if hvkit.rank() == 0 else kinds[1]]
    variables = [keras.Variable(np.zeros((4, 2), np.float32)) for _ in range(3)]
    name = f"hvkit.test.{kinds[0]}.{kinds[1]}"
    means = GradientAverager(name)([mine, tf.ones((4, 2)), None], variables)
    expected = np.zeros((4, 2))
    for rank in range(hvkit.size()):
        theirs = gradients[kinds[0] if rank == 0 else kinds[1]]
        expected += 0 if theirs is None else tf.convert_to_tensor(theirs).numpy()
    assert tf.convert_to_tensor(means[0]).numpy() == pytest.approx(expected / hvkit.size())
    assert isinstance(means[0], tf.IndexedSlices) == (kinds == ["slices", None])
    assert means[1].numpy() == pytest.approx(1)
    assert means[2] is None


@pytest.mark.parametrize("accumulate", [None, 2])
def test_graphs_of_ranks_that_lack_a_gradient_are_an_error_not_a_hang(accumulate):
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulate)
    hvkit.distribute(model, optimizer)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            hidden = model.layers[0](x)
            loss = tf.reduce_sum(model.layers[1](hidden) if hvkit.rank() == 0 else hidden)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    if accumulate:
        step(tf.ones((2, 8)))  # nothing is sent yet
    error, text = error_of(lambda: step(tf.ones((2, 8))))
    assert error is tf.errors.InvalidArgumentError
    assert "only some ranks have a gradient" in text
    assert "dense_1/kernel" in text


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_gradients_of_every_dtype_are_averaged(dtype):
    from hvkit.adapters.keras.averager import GradientAverager

    variable = keras.Variable(np.zeros(3, np.float32), dtype=dtype)
    (mean,) = GradientAverager(f"hvkit.test.{dtype}")(
        [tf.cast([60000.0] * 3, dtype) * (1 if hvkit.rank() < 2 else 0)], [variable]
    )
    assert mean.dtype.name == dtype
    expected = tf.cast(tf.cast(60000.0, dtype), tf.float64) * 2 / hvkit.size()
    assert tf.cast(mean, tf.float64).numpy() == pytest.approx(expected.numpy(), rel=5e-3)


def test_batch_norm_and_dropout_train_on_every_rank():
    keras.utils.set_random_seed(hvkit.rank())
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(8),
            layers.BatchNormalization(),
            layers.Dropout(0.5),
            layers.Dense(4),
        ]
    )
    model, optimizer = hvkit.distribute(model, sgd())
    graph_tape(model, optimizer, local(regression(steps=4)))
    assert same_on_all_ranks([v.numpy() for v in model.trainable_variables])


def test_frozen_layers_stay_as_they_are():
    def make_model(seed):
        model = mlp(seed)
        model.layers[0].trainable = False
        return model

    equals_one_process(make_model, sgd, fit)


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
    rank_0 = hvkit.broadcast([v.numpy() for v in saved.optimizer.variables])
    hvkit.distribute(model, optimizer, lr_scaling="none")
    assert optimizer.iterations.numpy() == 3
    for ours, theirs in zip(optimizer.variables, rank_0, strict=True):
        assert np.array_equal(ours.numpy(), theirs)
    eager_tape(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks([*weights(model), *(v.numpy() for v in optimizer.variables)])


def test_several_optimizers_on_one_model():
    model = mlp(hvkit.rank())
    pair = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01)]
    hvkit.distribute(model, pair)
    for x, y in local(regression(steps=4)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        for i, optimizer in enumerate(pair):
            part = slice(2 * i, 2 * i + 2)
            optimizer.apply(gradients[part], model.trainable_variables[part])
    assert same_on_all_ranks(weights(model))


class Adversaries(keras.Model):
    """Never called itself; its train_step calls the two parts."""

    def __init__(self, built):
        super().__init__()
        layers = keras.layers
        head = [keras.Input((8,))] if built else []
        self.generator = keras.Sequential([*head, layers.Dense(8, "tanh"), layers.Dense(4)])
        head = [keras.Input((4,))] if built else []
        self.critic = keras.Sequential([*head, layers.Dense(1)])

    def compile(self, optimizers):
        super().compile()
        self.g_optimizer, self.c_optimizer = optimizers

    def train_step(self, data):
        x, real = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.critic(self.generator(x)) - self.critic(real))
        variables = self.critic.trainable_variables
        self.c_optimizer.apply(tape.gradient(loss, variables), variables)
        with tf.GradientTape() as tape:
            loss = -tf.reduce_mean(self.critic(self.generator(x)))
        variables = self.generator.trainable_variables
        self.g_optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss}


@pytest.mark.parametrize("built", [True, False])
def test_a_model_with_its_own_train_step_over_its_parts(built):
    keras.utils.set_random_seed(hvkit.rank())
    model = Adversaries(built)
    optimizers = (keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
    hvkit.distribute(model, optimizers)
    model.compile(optimizers)
    refit(model, local(regression(steps=5)))
    assert same_on_all_ranks(weights(model.generator) + weights(model.critic))


def test_autograph_translates_the_users_code_alone(monkeypatch):
    from hvkit.adapters.keras.averager import GradientAverager

    translated = []
    average = GradientAverager.__call__

    def look(self, *args):
        frames = traceback.extract_stack()
        translated.extend(f.name for f in frames if "autograph_generated" in f.filename)
        return average(self, *args)

    monkeypatch.setattr(GradientAverager, "__call__", look)
    model, optimizer = hvkit.distribute(mlp(), sgd())

    @tf.function
    def users_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    users_step(tf.ones((2, 8)), tf.ones((2, 4)))
    assert translated == ["tf__users_step"]


def test_tensorflow_does_not_warn_that_hvkit_is_traced_again_and_again():
    warnings = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for seed in range(8):
            model, optimizer = hvkit.distribute(mlp(seed), sgd())
            fit(model, optimizer, local(regression(steps=1)))
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [text for text in warnings if "GradientAverager" in text]


def test_a_second_fit_goes_on_in_step():
    model = mlp(hvkit.rank())
    model, optimizer = hvkit.distribute(model, keras.optimizers.Adam(0.01))
    data = local(regression(steps=4))
    fit(model, optimizer, data)
    first = weights(model)
    refit(model, data)
    assert optimizer.iterations.numpy() == 8
    assert same_on_all_ranks(weights(model))
    assert not all(np.array_equal(a, b) for a, b in zip(first, weights(model), strict=True))


@pytest.mark.parametrize("compiled", ["before", "after"])
def test_xla_is_left_aside(compiled):
    model = mlp()
    optimizer = sgd()
    if compiled == "before":
        model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
        refit(model, regression(steps=1))
        hvkit.distribute(model, optimizer)
    else:
        hvkit.distribute(model, optimizer)
        with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
            model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
    assert not model.jit_compile
    refit(model, local(regression(steps=3)))
    assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("kind", ["plain", "nested"])
def test_a_function_that_xla_compiles_is_an_error_that_names_the_fix(kind):
    model, optimizer = hvkit.distribute(mlp(), sgd())
    x, y = (tf.constant(each) for each in local(regression(steps=1))[0])

    def step(x, y):
        tape_step(model, optimizer, x, y)

    inner = tf.function(step)
    compiled = tf.function(step if kind == "plain" else lambda x, y: inner(x, y), jit_compile=True)
    before = weights(model)
    error, text = error_of(lambda: compiled(x, y))
    assert error is ValueError
    assert "optimizer.apply is inside a tf.function with jit_compile=True" in text
    assert "leave jit_compile=True away" in text
    assert largest_difference(weights(model), before) == 0
    hvkit.barrier()


def test_xla_may_compile_the_gradients_apart_from_the_update():
    def loop(model, optimizer, data):
        @tf.function(jit_compile=True)
        def gradients(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            return tape.gradient(loss, model.trainable_variables)

        @tf.function
        def step(x, y):
            optimizer.apply(gradients(x, y), model.trainable_variables)

        for x, y in data:
            step(tf.constant(x), tf.constant(y))

    equals_one_process(mlp, sgd, loop)


@pytest.mark.parametrize("compiled", ["loss scale", "batch norm"])
def test_other_collectives_in_a_function_that_xla_compiles_are_errors_too(compiled):
    layers = keras.layers
    model = keras.Sequential([keras.Input((8,)), layers.BatchNormalization(), layers.Dense(4)])
    scaler = keras.optimizers.LossScaleOptimizer(sgd())
    hvkit.distribute(model, scaler, batch_norm="sync" if compiled == "batch norm" else "local")

    @tf.function(jit_compile=True)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=compiled == "batch norm") - y) ** 2)
        variables = model.trainable_variables
        scaler.apply(tape.gradient(loss, variables), variables)

    error, text = error_of(lambda: step(tf.ones((2, 8)), tf.ones((2, 4))))
    assert error is ValueError
    assert "leave jit_compile=True away" in text


class OwnStep(keras.Sequential):
    """A train_step of the user's own, with the optimizer that compile was given."""

    def train_step(self, data):
        tape_step(self, self.optimizer, *data)
        return {}


@pytest.mark.parametrize("loop", [*LOOPS, "own train_step"])
def test_an_update_by_an_optimizer_that_was_not_distributed_is_refused(loop):
    model = mlp()
    if loop == "own train_step":
        model = OwnStep([keras.Input((8,)), keras.layers.Dense(4)])
    hvkit.distribute(model, sgd())
    train = LOOPS.get(loop, fit)
    with pytest.raises(ValueError, match=r"'adam.*' .* was not passed to hvkit.distribute"):
        train(model, keras.optimizers.Adam(), local(regression(steps=1)))


def test_phases_of_training_with_an_optimizer_each():
    def phases(model, first, second, data):
        model.layers[0].trainable = False
        fit(model, first, data[:4])
        model.layers[0].trainable = True
        fit(model, second, data[4:])

    def optimizers():
        return keras.optimizers.SGD(0.02), keras.optimizers.Adam(0.001)

    data = regression(steps=8)
    reference = mlp()
    phases(reference, *optimizers(), data)
    model = mlp(hvkit.rank())
    model, pair = hvkit.distribute(model, optimizers())
    phases(model, *pair, local(data))
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5


def test_optimizers_with_different_settings_are_an_error_everywhere():
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9 if hvkit.rank() == 1 else 0.0)
    error, text = error_of(lambda: hvkit.distribute(model, optimizer))
    assert error is hvkit.RanksDisagreeError
    assert '"momentum": 0.9' in text
    assert '"momentum": 0.0' in text


@pytest.mark.parametrize("multiplied", [True, False])
def test_a_sum_over_samples_equals_one_process_if_multiplied_by_the_number_of_ranks(multiplied):
    def train(model, optimizer, data, weight):
        loss = keras.losses.MeanSquaredError(reduction="sum")
        fit(model, optimizer, data, loss=loss, loss_weights=float(weight))

    data = regression(steps=8)
    reference = mlp()
    train(reference, keras.optimizers.SGD(0.002), data, 1)
    model, optimizer = mlp(hvkit.rank()), keras.optimizers.SGD(0.002)
    hvkit.distribute(model, optimizer, lr_scaling="none")
    train(model, optimizer, local(data), hvkit.size() if multiplied else 1)
    assert (largest_difference(weights(model), weights(reference)) < 1e-5) == multiplied


def test_fit_that_runs_eagerly():
    equals_one_process(
        mlp, sgd, lambda model, optimizer, data: fit(model, optimizer, data, run_eagerly=True)
    )


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
def test_saved_files_name_nothing_of_hvkit_and_load_without_it(tmp_path):
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
    done = subprocess.run(
        [sys.executable, "-c", LOADS_PLAINLY, path],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    predicted = model.predict(np.ones((1, 8)), verbose=0).tobytes().hex()
    assert done.stdout.split() == ["keras", "3", predicted], done.stderr
    again = keras.models.load_model(path)
    assert [w.tolist() for w in weights(again)] == [w.tolist() for w in weights(model)]


def test_the_returned_objects_are_the_ones_passed_in_and_of_their_own_class():
    model, optimizer = mlp(), keras.optimizers.Adam()
    assert hvkit.distribute(model, optimizer) == (model, optimizer)
    assert type(model) is keras.Sequential
    assert type(optimizer) is keras.optimizers.Adam


WRONG = {
    "a string": (lambda m: "adam", {}, TypeError, "keras.optimizers.get('adam')"),
    "accumulate": (lambda m: sgd(), {"accumulate": 2}, ValueError, "gradient_accumulation_steps=2"),
    "an optimizer of another model": (
        lambda m: built_for(mlp()), {}, ValueError, "was built for 4 other variables",
    ),
}  # fmt: skip


def built_for(model):
    optimizer = sgd()
    optimizer.build(model.trainable_variables)
    return optimizer


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_say_what_came_and_what_is_accepted(kind):
    make_optimizer, options, expected, message = WRONG[kind]
    model = mlp()
    error, text = error_of(lambda: hvkit.distribute(model, make_optimizer(model), **options))
    assert error is expected
    assert message in text


def test_a_second_call_is_an_error():
    model = mlp()
    hvkit.distribute(model, sgd())
    error, text = error_of(lambda: hvkit.distribute(model, sgd()))
    assert error is ValueError
    assert "passed to hvkit.distribute before" in text


@pytest.mark.parametrize("built", [True, False])
def test_models_that_differ_are_an_error_everywhere(built):
    units = 5 if hvkit.rank() == hvkit.size() - 1 else 4
    head = [keras.Input((8,))] if built else []
    model = keras.Sequential([*head, keras.layers.Dense(units, name="head")])
    optimizer = sgd()
    y = np.ones((2, units), np.float32)

    def run():
        hvkit.distribute(model, optimizer)
        tape_step(model, optimizer, my_part(np.ones((2 * hvkit.size(), 8), np.float32)), y)

    error, text = error_of(run)
    assert error in (hvkit.RanksDisagreeError, ValueError)
    assert "head/kernel: shape (8, 5), float32" in text
    assert "head/kernel: shape (8, 4), float32 on rank 0" in text


@pytest.mark.parametrize("compression", ["none", "bf16"])
def test_a_dense_layer_on_sequences_in_batches_of_any_size(compression):
    # TensorFlow does not know the shape of such a kernel's gradient when it makes the graph.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(14 * hvkit.size(), 5, 8)).astype(np.float32)
    y = rng.normal(size=(14 * hvkit.size(), 1)).astype(np.float32)

    def make():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(4), keras.layers.Flatten(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5, 8)), *layers])

    def fit(model, optimizer, x, y, batch_size):
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)

    reference = make()
    fit(reference, sgd(), x, y, 4 * hvkit.size())
    model, optimizer = hvkit.distribute(make(), sgd(), compression=compression)
    fit(model, optimizer, *hvkit.shard((x, y)), 4)
    difference = largest_difference(weights(model), weights(reference))
    assert difference < (1e-5 if compression == "none" else 1e-2)
