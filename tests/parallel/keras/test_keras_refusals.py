"""Calls and updates that hvkit refuses, and the errors that name the fix."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    alike,
    equals_one_process,
    fit,
    gradients_of,
    local,
    mlp,
    mse,
    normalised,
    refit,
    regression,
    tape_step,
    unbuilt,
    weights,
)
from ranks import error_of, largest_difference, my_part

import hvkit
from hvkit import main_rank

pytestmark = pytest.mark.two_ranks


def sgd(factor=1, **options):
    return keras.optimizers.SGD(0.02 * factor, **options)


def refused(function, *parts, kind=ValueError):
    """Whether every rank gets an error of a kind with these words."""
    error, text = error_of(function)
    assert error is kind, text
    assert [part for part in parts if part not in text] == []
    return True


@MORE
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_compile_with_xla_is_switched_off(compiled):
    model, optimizer = mlp(), sgd()
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
    assert alike(model)


@pytest.mark.parametrize("kind", ["plain", "nested", "loss scale", "batch norm"])
def test_a_function_that_xla_compiles_is_an_error_that_names_the_fix(kind):
    model, optimizer = normalised(), sgd()
    named = ["optimizer.apply is inside a tf.function with jit_compile=True"]
    if kind in ("loss scale", "batch norm"):  # which have collectives besides
        optimizer, named = keras.optimizers.LossScaleOptimizer(optimizer), []
    hvkit.distribute(model, optimizer, batch_norm="sync" if kind == "batch norm" else "local")

    step = tf.function(tape_step) if kind == "nested" else tape_step
    compiled = tf.function(lambda x, y: step(model, optimizer, x, y), jit_compile=True)
    before = weights(model)
    x, y = map(tf.constant, local(regression(steps=1))[0])
    assert refused(lambda: compiled(x, y), "remove jit_compile=True from the tf.function", *named)
    assert largest_difference(weights(model), before) == 0
    hvkit.barrier()


@MORE
def test_xla_may_compile_the_gradients_apart_from_the_update():
    def loop(model, optimizer, data):
        @tf.function(jit_compile=True)
        def gradients(x, y):
            return gradients_of(lambda: mse(y, model(x)), model.trainable_variables)[1]

        @tf.function
        def step(x, y):
            optimizer.apply(gradients(x, y), model.trainable_variables)

        for x, y in data:
            step(tf.constant(x), tf.constant(y))

    equals_one_process(mlp, sgd, loop)


class OwnStep(keras.Sequential):
    """A custom train_step with the optimizer that compile got."""

    def train_step(self, data):
        tape_step(self, self.optimizer, *data)
        return {}


@MORE
@pytest.mark.parametrize("loop", ["fit", "function", "own train_step"])
def test_an_update_by_an_optimizer_that_was_not_distributed_is_refused(loop):
    model = OwnStep(mlp().layers) if loop == "own train_step" else mlp()
    hvkit.distribute(model, sgd())
    with pytest.raises(ValueError, match=r"'adam.*' .* was not passed to hvkit.distribute"):
        LOOPS.get(loop, fit)(model, keras.optimizers.Adam(), local(regression(steps=1)))


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
        self.error.update_state(mse(data[1], self.generator(data[0])))
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
    names = ", ".join(sorted(repr(each.name) for each in parts))
    assert refused(
        lambda: refit(gan, local(regression(steps=1))),
        f"fit of model {gan.name!r} would train {names}, passed to hvkit.distribute",
        "hvkit.distribute(gan, [g_optimizer, d_optimizer])",
    )
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
    errors = refit(gan, local(regression(steps=1))).history["error"]
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


def test_training_beside_a_distributed_model_gives_one_warning_if_it_trains_a_model(warned):
    """A frozen model with a new head; not an input that is optimised."""
    model, _ = hvkit.distribute(mlp(), sgd())
    model.trainable = False
    picture = keras.Variable(np.ones(4, np.float32), name="picture")
    sgd().apply([tf.ones(4)], [picture])
    assert warned("each rank trains a model of its own") == []
    for _ in range(2):
        probe = keras.Sequential([model, keras.layers.Dense(4)])
        fit(probe, sgd(), local(regression(steps=2)))
    (said,) = warned("each rank trains a model of its own")
    assert "(SGD) updates a model, but neither was passed to hvkit.distribute" in said


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
    assert alike(tuned)


def built_for_another_model():
    optimizer = sgd()
    optimizer.build(mlp().trainable_variables)
    return optimizer


def with_averages():
    return sgd(use_ema=True)


def of_this_rank():
    return sgd(momentum=0.9 if hvkit.rank() == 1 else 0.0)


@pytest.mark.parametrize(
    ("make_optimizer", "options", "kind", "parts"),
    [
        (lambda: "adam", {}, TypeError, ["keras.optimizers.get('adam')"]),
        (sgd, {"accumulate": 2}, ValueError, ["gradient_accumulation_steps=2"]),
        (built_for_another_model, {}, ValueError, ["was built for 4 other variables"]),
        (with_averages, {"strategy": hvkit.LocalSGD(2)}, ValueError, ["use_ema=True"]),
        (with_averages, {"strategy": hvkit.ParameterServer(1)}, ValueError, ["use_ema=True"]),
        (of_this_rank, {}, hvkit.RanksDisagreeError, ['"momentum": 0.9', '"momentum": 0.0']),
    ],
)
def test_errors_about_wrong_arguments_name_the_fix(make_optimizer, options, kind, parts):
    assert refused(lambda: hvkit.distribute(mlp(), make_optimizer(), **options), *parts, kind=kind)


def test_a_second_call_is_an_error():
    model = mlp()
    hvkit.distribute(model, sgd())
    assert refused(lambda: hvkit.distribute(model, sgd()), "passed to hvkit.distribute before")


@pytest.mark.parametrize("built", [True, False])
def test_models_that_differ_are_an_error_everywhere(built):
    units = 5 if hvkit.rank() == hvkit.size() - 1 else 4
    head = [keras.Input((8,))] if built else []
    model = keras.Sequential([*head, keras.layers.Dense(units, name="head")])
    x = my_part(np.ones((2 * hvkit.size(), 8), np.float32))

    def run():
        hvkit.distribute(model, optimizer := sgd())
        tape_step(model, optimizer, x, np.ones((2, units), np.float32))

    error, text = error_of(run)
    assert error in (hvkit.RanksDisagreeError, ValueError)
    assert "head/kernel: shape (8, 5), float32" in text
    assert "head/kernel: shape (8, 4), float32 on rank 0" in text


def test_a_strategy_of_tf_distribute_is_refused_with_the_fix_but_the_default_one():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inside = mlp()
    with tf.distribute.get_strategy().scope():
        model, optimizer = hvkit.distribute(mlp(), sgd())
        fit(model, optimizer, local(regression(steps=2)))
    assert alike(model)
    x, y = map(tf.constant, local(regression(steps=1))[0])
    fix = "remove the strategy and `with strategy.scope():`"
    for function, what in (
        (lambda: hvkit.distribute(inside, sgd()), f"model {inside.name!r} is"),
        (lambda: strategy.run(lambda: tape_step(model, optimizer, x, y)), "an update is"),
    ):
        assert refused(function, f"{what} in the scope of tf.distribute.MirroredStrategy", fix)
