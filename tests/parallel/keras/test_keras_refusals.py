"""Calls and updates that hvkit refuses, and the errors that name the fix."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    equals_one_process,
    fit,
    local,
    mlp,
    refit,
    regression,
    tape_step,
    unbuilt,
    weights,
)
from ranks import error_of, largest_difference, my_part, same_on_all_ranks

import hvkit
from hvkit import main_rank

pytestmark = pytest.mark.two_ranks


def sgd(factor=1):
    return keras.optimizers.SGD(0.02 * factor)


@MORE
@pytest.mark.parametrize("compiled", cases(["before", "after"]))
def test_compile_with_xla_is_switched_off(compiled):
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
    assert "remove jit_compile=True from the tf.function" in text
    assert largest_difference(weights(model), before) == 0
    hvkit.barrier()


@MORE
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
    assert "remove jit_compile=True from the tf.function" in text


class OwnStep(keras.Sequential):
    """A custom train_step with the optimizer that compile got."""

    def train_step(self, data):
        tape_step(self, self.optimizer, *data)
        return {}


@MORE
@pytest.mark.parametrize("loop", [*LOOPS, "own train_step"])
def test_an_update_by_an_optimizer_that_was_not_distributed_is_refused(loop):
    model = mlp()
    if loop == "own train_step":
        model = OwnStep([keras.Input((8,)), keras.layers.Dense(4)])
    hvkit.distribute(model, sgd())
    train = LOOPS.get(loop, fit)
    with pytest.raises(ValueError, match=r"'adam.*' .* was not passed to hvkit.distribute"):
        train(model, keras.optimizers.Adam(), local(regression(steps=1)))


class Gan(keras.Model):
    """Two models, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = mlp(), mlp()
        self.error = keras.metrics.Mean(name="error")

    def compile(self, g_optimizer, d_optimizer):
        super().compile()
        self.g_optimizer, self.d_optimizer = g_optimizer, d_optimizer

    def train_step(self, data):
        tape_step(self.generator, self.g_optimizer, *data)
        tape_step(self.discriminator, self.d_optimizer, *data)
        return self.test_step(data)

    def test_step(self, data):
        x, y = data
        self.error.update_state(tf.reduce_mean((self.generator(x) - y) ** 2))
        return {"error": self.error.result()}


@pytest.fixture
def warned(caplog):
    """The warnings with these words, on rank 0."""
    for kind in ("own models", "evaluate of a model around"):
        main_rank._logged.discard(kind)
    return lambda words: hvkit.broadcast([each for each in caplog.messages if words in each])


@pytest.mark.parametrize("calls", cases(["one each", "a list"]))
def test_fit_of_a_model_whose_parts_were_distributed_is_refused_with_the_fix(calls):
    gan, optimizers = Gan(), [sgd(), sgd()]
    parts = [gan.generator, gan.discriminator]
    if calls == "a list":
        hvkit.distribute(parts, optimizers)
    else:
        for model, optimizer in zip(parts, optimizers, strict=True):
            hvkit.distribute(model, optimizer)
    gan.compile(*optimizers)
    before = weights(gan)
    error, text = error_of(lambda: refit(gan, local(regression(steps=1))))
    assert error is ValueError
    names = ", ".join(sorted(repr(each.name) for each in parts))
    assert f"fit of model {gan.name!r} would train {names}, passed to hvkit.distribute" in text
    assert "hvkit.distribute(gan, [g_optimizer, d_optimizer])" in text
    assert largest_difference(weights(gan), before) == 0


class Around(keras.Model):
    """A model that calls another one."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        return self.inner(x)


def test_a_part_that_has_no_weights_yet_counts_as_well():
    outer = Around(inner := unbuilt())
    hvkit.distribute(inner, optimizer := sgd())
    with pytest.raises(ValueError, match=f"would train {inner.name!r}"):
        fit(outer, optimizer, local(regression(steps=1)))


@MORE
def test_fit_of_the_outer_model_that_was_passed_reports_metrics_of_all_ranks(warned):
    gan, optimizers = Gan(), [sgd(), sgd()]
    hvkit.distribute(gan, optimizers)
    gan.compile(*optimizers)
    x, y = local(regression(steps=1))[0]
    errors = gan.fit(x, y, verbose=0).history["error"]
    assert len({*hvkit.allgather(errors[0])}) == 1
    assert warned("neither was passed") == warned("each rank's own data") == []


def test_evaluate_of_a_model_around_a_distributed_one_warns_of_its_metrics(warned):
    model, _ = hvkit.distribute(mlp(), sgd())
    outer = keras.Sequential([model, keras.layers.Softmax()])
    outer.compile(loss="mse")
    x, y = local(regression(steps=1))[0]
    outer.predict(x, verbose=0)
    assert warned("each rank's own data") == []
    for _ in range(2):
        outer.evaluate(x, y, verbose=0)
    assert len(warned(f"evaluate of model {outer.name!r} reports the metrics of each rank's")) == 1


def test_training_a_frozen_distributed_model_with_a_new_head_alone_gives_one_warning(warned):
    model, _ = hvkit.distribute(mlp(), sgd())
    model.trainable = False
    for _ in range(2):
        probe = keras.Sequential([model, keras.layers.Dense(4)])
        fit(probe, sgd(), local(regression(steps=2)))
    (said,) = warned("each rank trains a model of its own")
    assert "(SGD) updates a model, but neither was passed to hvkit.distribute" in said


def test_an_input_that_is_optimised_alone_gives_no_warning(warned):
    hvkit.distribute(mlp(), sgd())
    picture = keras.Variable(np.ones(4, np.float32), name="picture")
    sgd().apply([tf.ones(4)], [picture])
    assert warned("each rank trains a model of its own") == []


@MORE
def test_layers_that_outlive_their_model_are_still_updated_by_averaged_optimizers_alone():
    def trained_layers():
        model, optimizer = hvkit.distribute(mlp(), sgd())
        fit(model, optimizer, local(regression(steps=1)))
        return model.layers

    tuned = keras.Sequential(trained_layers())
    gc.collect()
    with pytest.raises(ValueError, match=r"updates weights of a distributed model, but was not"):
        fit(tuned, sgd(), local(regression(steps=1)))
    tuned, optimizer = hvkit.distribute(tuned, sgd())
    fit(tuned, optimizer, local(regression(steps=1)))
    assert same_on_all_ranks(weights(tuned))


def test_optimizers_with_different_settings_are_an_error_everywhere():
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9 if hvkit.rank() == 1 else 0.0)
    error, text = error_of(lambda: hvkit.distribute(model, optimizer))
    assert error is hvkit.RanksDisagreeError
    assert '"momentum": 0.9' in text
    assert '"momentum": 0.0' in text


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
def test_errors_about_wrong_arguments_name_the_fix(kind):
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


@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(2), hvkit.ParameterServer(1)])
def test_averages_of_a_ranks_own_weights_are_refused(strategy):
    model = mlp()
    error, text = error_of(
        lambda: hvkit.distribute(model, keras.optimizers.SGD(0.1, use_ema=True), strategy=strategy)
    )
    assert error is ValueError
    assert "use_ema=True" in text


@pytest.mark.parametrize("made_in", cases(["the scope", "no scope"]))
def test_a_strategy_of_tf_distribute_is_refused_with_the_fix(made_in):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inside = mlp()
    if made_in == "the scope":
        kind, text = error_of(lambda: hvkit.distribute(inside, sgd()))
        assert f"model {inside.name!r} is in the scope of tf.distribute.MirroredStrategy" in text
    else:
        model, optimizer = hvkit.distribute(mlp(), sgd())
        x, y = (tf.constant(each) for each in local(regression(steps=1))[0])

        def step():
            strategy.run(lambda: tape_step(model, optimizer, x, y))

        kind, text = error_of(step)
        assert "an update is in the scope of tf.distribute.MirroredStrategy" in text
    assert kind is ValueError
    assert "remove the strategy and `with strategy.scope():`" in text


def test_the_default_strategy_of_tf_distribute_may_stay():
    with tf.distribute.get_strategy().scope():
        model, optimizer = hvkit.distribute(mlp(), sgd())
        fit(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks(weights(model))
