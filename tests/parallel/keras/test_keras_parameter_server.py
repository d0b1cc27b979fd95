"""Keras: ranks that train at their own pace and exchange weights with a server on rank 0."""

import itertools
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    alike,
    joined,
    local,
    mlp,
    refit,
    regression,
    scaled_step,
    sgd,
    tape_step,
    unbuilt,
    weights,
)
from ranks import (
    Busy,
    as_vector,
    identical,
    keras_in_float64,
    largest_difference,
    same_on_all_ranks,
    shared_folder,
)
from server_log import logged

import hvkit
from hvkit.frameworks.keras.tensorflow.local_weights import ServedModel
from hvkit.strategies.parameter_server import add


def served(staleness, optimizer=None, model=None):
    strategy = hvkit.ParameterServer(staleness)
    return hvkit.distribute(model or mlp(), optimizer or sgd(), strategy=strategy)


@pytest.fixture
def log(monkeypatch):
    """What the server adds, on rank 0."""
    return logged(monkeypatch)


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


class SlowLastRank(keras.callbacks.Callback):
    """Makes each step of the last rank take longer."""

    def on_train_batch_begin(self, batch, logs=None):
        if hvkit.rank() == hvkit.size() - 1:
            time.sleep(0.005)


@pytest.mark.parametrize("staleness", cases([2, 0]))
def test_fit_keeps_the_bound_and_ends_with_the_servers_weights(staleness, log):
    model, optimizer = served(staleness)
    model.compile(optimizer, "mse")
    start = as_vector(weights(model))
    refit(model, local(regression()), callbacks=[SlowLastRank()])
    assert alike(model)
    if hvkit.rank() == 0:
        assert len(log) == 20 * hvkit.size()
        assert max(update.lead for update in log) <= staleness
        for update in log:
            add([start], update.changes, hvkit.size())
        assert np.array_equal(start, as_vector(weights(model)))


@MORE
def test_ranks_may_fit_different_numbers_of_steps():
    model, optimizer = served(1)
    model.compile(optimizer, "mse")
    data = local(regression())[: 4 + 3 * hvkit.rank()]
    validated = refit(model, data, epochs=2, validation_data=joined(data)).history["val_loss"]
    assert alike(model)
    assert same_on_all_ranks([np.array(validated)])
    refit(model, data)
    assert alike(model)


@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_settled_shows_the_servers_weights_for_a_while(loop):
    model, optimizer = served(None)
    data = local(regression())
    LOOPS[loop](model, optimizer, data[: 5 + 2 * hvkit.rank()])
    own = weights(model)
    with hvkit.settled(model):
        assert alike(model)
        agreed = weights(model)
    assert identical(weights(model), own)
    LOOPS[loop](model, optimizer, data[10:])
    with hvkit.settled(model):
        assert largest_difference(weights(model), agreed) > 1e-3


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
@pytest.mark.parametrize("loop", ["function", "eager"])
def test_an_overflow_on_one_rank_is_a_step_without_a_change(loop, log):
    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0)
    model, optimizer = served(0, scaler)
    step = tf.function(scaled_step) if loop == "function" else scaled_step
    for number, batch in enumerate(local(regression(steps=4))):
        overflows = number == 2 and hvkit.rank() == 0
        step(model, optimizer, *map(tf.constant, (*batch, np.float32(np.inf if overflows else 1))))
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
@pytest.mark.two_ranks
@pytest.mark.parametrize("scaled", [False, True])
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
    rows = tf.data.Dataset.from_tensor_slices(joined(regression(steps=10))).batch(6)
    model, optimizer = served(None)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    model.compile(optimizer, "mse")
    own = hvkit.shard(rows, dynamic=True)
    model.fit(own, epochs=2, verbose=0, callbacks=[checkpoint.callback()])
    steps = hvkit.allgather(int(optimizer.iterations))
    assert sum(steps) == 2 * 10 * hvkit.size()
    assert alike(model)
    assert checkpoint.restore().step == max(steps)


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

    for name in ("serve", "exchange"):
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
def test_batches_go_to_the_ranks_that_have_time(tmp_path):
    busy = Busy(hvkit.broadcast(tmp_path), number=15)
    rows = np.arange(40, dtype=np.float32)
    pipeline = tf.data.Dataset.from_tensor_slices(rows).shuffle(40, seed=1).batch(2)
    pipeline = hvkit.shard(pipeline, dynamic=True)
    model, optimizer = served(None)
    for epoch in range(2):
        mine = []
        for batch in pipeline:
            x = np.broadcast_to(batch.numpy()[:, None] / 100, (2, 8))
            tape_step(model, optimizer, x, np.zeros((2, 4), np.float32))
            mine.append(batch.numpy().tolist())
            busy.take(epoch, len(mine))
        everyone = hvkit.allgather(mine)
        assert sorted(row for theirs in everyone for batch in theirs for row in batch) == [
            *range(40)
        ]
        assert len(everyone[0]) <= 20 - 15


@MORE
def test_two_iterators_over_handed_out_batches_each_read_an_epoch():
    rows = range(12 * hvkit.size())
    pipeline = tf.data.Dataset.from_tensor_slices(np.arange(len(rows))).batch(1)
    pipeline = hvkit.shard(pipeline, dynamic=True)
    served(None)
    both = ([], [])
    for pair in itertools.zip_longest(iter(pipeline), iter(pipeline)):
        for taken, batch in zip(both, pair, strict=True):
            taken += [] if batch is None else [int(batch[0])]
    for mine in both:
        assert sorted(itertools.chain(*hvkit.allgather(mine))) == [*rows]
