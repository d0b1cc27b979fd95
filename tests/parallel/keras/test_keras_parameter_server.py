"""Keras: ranks that train at their own pace and exchange weights with a server on rank 0."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    alike,
    local,
    mlp,
    mse,
    refit,
    regression,
    served,
    sgd,
    steps_of_halves,
    tape_step,
    unbuilt,
    weights,
)
from ranks import (
    error_of,
    keras_in_float64,
    largest_difference,
    same_on_all_ranks,
    shared_folder,
)

import hvkit
from hvkit.frameworks.keras.weights.parameter_server import ServedModel
from hvkit.parameter_server import server
from hvkit.strategies.parameter_server import add


def settled_weights(model):
    with hvkit.settled(model):
        return weights(model)


@pytest.fixture
def log(monkeypatch):
    """What the server adds, on rank 0."""
    updates = []
    monkeypatch.setattr(server, "log_of_next", updates)
    return updates


class SlowLastRank(keras.callbacks.Callback):
    """Makes each step of the last rank take longer."""

    def on_train_batch_begin(self, batch, logs=None):
        if hvkit.rank() == hvkit.size() - 1:
            time.sleep(0.005)


def fit_unevenly(model, optimizer, data, **more):
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    model.compile(optimizer, "mse")
    options = {"batch_size": len(data[0][0]), "shuffle": False, "verbose": 0}
    return model.fit(x, y, callbacks=[SlowLastRank()], **options, **more)


@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_staleness_0_is_synchronous(loop):
    data = [(x.astype(np.float64), y.astype(np.float64)) for x, y in local(regression())]
    found = []
    with keras_in_float64():
        for strategy in (hvkit.Synchronous(), hvkit.ParameterServer(0)):
            model = mlp()
            optimizer = keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01)
            hvkit.distribute(model, optimizer, strategy=strategy)
            LOOPS[loop](model, optimizer, data)
            found.append(weights(model))
            assert alike(model)
    assert found[0][0].dtype == np.float64
    assert largest_difference(*found) < 1e-12


@pytest.mark.parametrize("staleness", cases([2, 0]))
def test_fit_keeps_the_bound_and_ends_with_the_servers_weights(staleness, log):
    model, optimizer = served(staleness)
    start = np.concatenate([each.reshape(-1) for each in weights(model)])
    fit_unevenly(model, optimizer, local(regression()))
    assert alike(model)
    if hvkit.rank() == 0:
        assert len(log) == 20 * hvkit.size()
        assert max(update.lead for update in log) <= staleness
        for update in log:
            add([start], update.changes, hvkit.size())
        found = np.concatenate([each.reshape(-1) for each in weights(model)])
        assert np.array_equal(start, found)


@MORE
def test_without_a_bound_a_fast_rank_runs_ahead(log):
    model, optimizer = served(None)
    fit_unevenly(model, optimizer, local(regression()))
    assert hvkit.rank() > 0 or max(update.lead for update in log) > 4


@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_settled_shows_the_servers_weights_for_a_while(loop):
    model, optimizer = served(None)
    data = local(regression())
    LOOPS[loop](model, optimizer, data[: 5 + 2 * hvkit.rank()])
    own = weights(model)
    with hvkit.settled(model):
        assert alike(model)
        agreed = weights(model)
    assert all(map(np.array_equal, weights(model), own))
    LOOPS[loop](model, optimizer, data[10:])
    assert largest_difference(settled_weights(model), agreed) > 1e-3


@MORE
def test_ranks_may_fit_different_numbers_of_steps():
    model, optimizer = served(1)
    data = local(regression())[: 4 + 3 * hvkit.rank()]
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    history = fit_unevenly(model, optimizer, data, epochs=2, validation_data=(x, y))
    assert alike(model)
    assert same_on_all_ranks([np.array(history.history["val_loss"])])
    refit(model, data)
    assert alike(model)


@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_each_step_sends_the_weights_to_the_server_and_back(loop):
    model, optimizer = served(2)
    data = local(regression(steps=8))
    LOOPS[loop](model, optimizer, data[:1])
    hvkit.barrier()
    before = hvkit.traffic()
    hvkit.barrier()  # the server answers as soon as another rank goes on
    LOOPS[loop](model, optimizer, data[1:])
    hvkit.barrier()
    sent = hvkit.traffic()["weights"].bytes - before["weights"].bytes
    size = 4 * sum(int(np.prod(w.shape)) for w in model.weights)
    assert sent == 7 * size * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)
    assert hvkit.traffic().get("gradients") == before.get("gradients")


@MORE
def test_accumulated_gradients_are_one_step(log):
    model, optimizer = served(0, sgd(gradient_accumulation_steps=2))
    LOOPS["function"](model, optimizer, local(regression(steps=8)))
    assert alike(model)
    assert hvkit.rank() > 0 or len(log) == 4 * hvkit.size()


@MORE
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_an_overflow_on_one_rank_is_a_step_without_a_change(loop, log):
    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0)
    model, optimizer = served(0, scaler)

    def step(x, y, by):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(mse(y, model(x)))
        variables = model.trainable_variables
        gradients = [g * by for g in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    step = tf.function(step) if loop == "function" else step
    for number, (x, y) in enumerate(local(regression(steps=4))):
        overflows = number == 2 and hvkit.rank() == 0
        step(tf.constant(x), tf.constant(y), tf.constant(np.inf if overflows else 1, tf.float32))
        assert alike(model)
    if hvkit.rank() == 0:
        still = [not any(each.any() for each in update.changes) for update in log]
        assert still.index(True) == 2 * hvkit.size()
        assert still.count(True) == 1


@MORE
def test_layers_that_train_later_join():
    model, optimizer = served(0)
    model.layers[0].trainable = False
    optimizer.build([w for layer in model.layers for w in layer.weights])
    data = local(regression(steps=6))
    before = weights(model)
    LOOPS["function"](model, optimizer, data[:3])
    assert np.array_equal(weights(model)[0], before[0])
    model.layers[0].trainable = True
    LOOPS["function"](model, optimizer, data[3:])
    assert alike(model)
    assert not np.array_equal(weights(model)[0], before[0])


@MORE
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_variables_that_are_updated_in_turn(loop):
    model, optimizer = served(0)
    steps = steps_of_halves(model, optimizer, loop)
    optimizer.build(model.trainable_variables)
    for number, (x, y) in enumerate(local(regression(steps=6))):
        steps[number % 2](tf.constant(x), tf.constant(y))
        assert alike(model)


@MORE
def test_bfloat16_weights():
    layer = keras.layers.Dense(4, dtype="bfloat16")
    model, optimizer = served(0, model=keras.Sequential([keras.Input((8,)), layer]))
    narrow = tf.bfloat16.as_numpy_dtype
    data = [(x, y.astype(narrow)) for x, y in local(regression(steps=4))]
    before = weights(model)
    LOOPS["function"](model, optimizer, data)
    assert alike(model)
    assert weights(model)[0].dtype == narrow
    assert not np.array_equal(weights(model)[0], before[0])


@MORE
def test_batch_norm_statistics_are_averaged_where_the_model_is_settled():
    layers = [keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model, optimizer = served(0, model=keras.Sequential(layers))
    LOOPS["function"](model, optimizer, local(regression(steps=3)))
    own = weights(model)
    assert not same_on_all_ranks(own)
    mean = [np.mean(each, axis=0) for each in zip(*hvkit.allgather(own), strict=True)]
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(weights(model), mean) < 1e-5
    assert all(map(np.array_equal, weights(model), own))


@MORE
def test_weights_that_one_rank_loaded_alone_are_found_before_the_first_step():
    model, optimizer = served(2)
    if hvkit.rank() == 1:
        model.layers[-1].kernel.assign(tf.zeros((16, 4)))
    error, text = error_of(lambda: LOOPS["eager"](model, optimizer, local(regression(steps=1))))
    assert error is hvkit.RanksDisagreeError
    assert "of rank 1 differs from that of rank 0" in text


@MORE
def test_weights_that_the_script_sets_before_fit_are_kept():
    model, optimizer = served(2, keras.optimizers.SGD(0.05))
    data = local(regression(steps=4))
    fit_unevenly(model, optimizer, data)
    chosen = [np.full_like(w, 0.25) for w in weights(model)]
    model.set_weights(chosen)
    optimizer.learning_rate = 0.0
    refit(model, data)
    assert largest_difference(weights(model), chosen) < 1e-6


@MORE
def test_compression_is_refused():
    error, text = error_of(lambda: served(2, compression="int8"))
    assert error is ValueError
    assert "leave compression out" in text


@pytest.mark.two_ranks
def test_a_step_inside_settled_is_refused():
    model, optimizer = served(2)
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    with hvkit.settled(model):
        error, text = error_of(lambda: LOOPS["eager"](model, optimizer, data[1:]))
    assert error is ValueError
    assert "hvkit.settled" in text


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("scaled", cases([False, True]))
def test_a_graph_that_builds_the_model_begins_with_rank_0s_weights(scaled):
    adam = keras.optimizers.Adam(0.01)
    optimizer = keras.optimizers.LossScaleOptimizer(adam) if scaled else adam
    model, optimizer = served(0, optimizer, unbuilt(hvkit.rank()))
    LOOPS["function"](model, optimizer, local(regression(steps=3)))
    with hvkit.settled(model):
        assert alike(model)


@MORE
@pytest.mark.two_ranks
def test_the_callback_saves_ranks_that_have_taken_different_numbers_of_steps(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    x, y = (np.concatenate(part) for part in zip(*regression(steps=20), strict=True))
    pipeline = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)
    model, optimizer = served(None)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    model.compile(optimizer, "mse")
    own = hvkit.shard(pipeline, dynamic=True)
    model.fit(own, epochs=2, verbose=0, callbacks=[checkpoint.callback()])
    steps = max(hvkit.allgather(int(optimizer.iterations)))
    assert checkpoint.restore().step == steps


@MORE
@pytest.mark.two_ranks
def test_two_optimizers_in_one_graph_take_turns(monkeypatch):
    """As in a GAN: TensorFlow runs what does not depend on each other at the same time."""
    inside, together = [], []

    def slowly(method):
        def call(self, *args):
            inside.append(method)
            together.append(len(inside))
            time.sleep(0.02)
            inside.pop()
            return method(self, *args)

        return call

    for name in ("_begin_with", "_stepped"):
        monkeypatch.setattr(ServedModel, name, slowly(getattr(ServedModel, name)))
    models = [mlp(seed) for seed in range(2)]
    optimizers = [sgd() for _ in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        served(1, optimizer, model)

    @tf.function
    def step(x, y):
        for model, optimizer in zip(models, optimizers, strict=True):
            tape_step(model, optimizer, x, y)

    for x, y in local(regression(steps=6)):
        step(tf.constant(x), tf.constant(y))
    assert together == [1] * (2 + 12)
    for model in models:
        with hvkit.settled(model):
            assert alike(model)


@MORE
@pytest.mark.parametrize("stop", [3, 4])
def test_accumulated_gradients_are_resumed(stop, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    data = local(regression(steps=9))

    def run(seed):
        model, optimizer = mlp(seed), sgd(gradient_accumulation_steps=2)
        served(0, optimizer, model)
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    model, optimizer, checkpoint = run(0)
    LOOPS["eager"](model, optimizer, data[:stop])
    checkpoint.save(epoch=0, step=stop)
    LOOPS["eager"](model, optimizer, data[stop:])
    resumed, optimizer, checkpoint = run(1)
    checkpoint.restore()
    LOOPS["eager"](resumed, optimizer, data[stop:])
    assert all(map(np.array_equal, weights(resumed), weights(model)))
