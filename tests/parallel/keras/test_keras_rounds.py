"""Keras: strategies that let ranks train alone for a round, and then agree on weights."""

import gc
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import (
    LOOPS,
    alike,
    fit,
    in_rounds,
    local,
    mlp,
    mse,
    refit,
    regression,
    sgd,
    steps_of_halves,
    weights,
)
from ranks import as_vector, error_of, gossip_matrix, largest_difference, same_on_all_ranks

import hvkit


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["eager", "function"]))
def test_rounds_of_two_steps_are_not_synchronous(loop):
    synchronous, optimizer = in_rounds(hvkit.Synchronous())
    LOOPS[loop](synchronous, optimizer, local(regression()))
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    LOOPS[loop](model, optimizer, local(regression()))
    assert largest_difference(weights(model), weights(synchronous)) > 1e-2


@MORE
@pytest.mark.parametrize(
    ("loop", "strategy"),
    cases(itertools.product(["function", "eager"], [hvkit.LocalSGD(5), hvkit.DiLoCo(5)])),
)
def test_ranks_differ_in_a_round_and_are_alike_after_it(loop, strategy):
    model, optimizer = in_rounds(strategy)
    data = local(regression(steps=10))
    LOOPS[loop](model, optimizer, data[:3])
    assert not alike(model)
    own = weights(model)
    with hvkit.settled(model):
        assert alike(model)
    assert all(map(np.array_equal, weights(model), own))
    LOOPS[loop](model, optimizer, data[3:5])
    assert alike(model)
    LOOPS[loop](model, optimizer, data[5:])
    assert alike(model)


@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_gossip_without_gradients_multiplies_by_its_matrix_in_each_step(loop):
    optimizer = keras.optimizers.SGD(0.05)
    model, optimizer = in_rounds(hvkit.Gossip(), optimizer)
    LOOPS[loop](model, optimizer, local(regression(steps=1)))  # the ranks begin alike
    for w in model.weights:
        w.assign_add(tf.fill(w.shape, float(hvkit.rank())))
    everyone = hvkit.allgather(as_vector(weights(model)))
    optimizer.learning_rate = 0.0
    LOOPS[loop](model, optimizer, local(regression(steps=3)))
    matrix = np.linalg.matrix_power(gossip_matrix("ring", hvkit.size()), 3)
    assert np.abs(as_vector(weights(model)) - matrix[hvkit.rank()] @ everyone).max() < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert np.abs(as_vector(weights(model)) - np.mean(everyone, axis=0)).max() < 1e-6


@MORE
def test_gossip_with_all_ranks_is_local_sgd():
    found = []
    for strategy in (hvkit.LocalSGD(1), hvkit.Gossip(1, topology="complete")):
        model, optimizer = in_rounds(strategy)
        LOOPS["function"](model, optimizer, local(regression(steps=20)))
        found.append(weights(model))
    assert largest_difference(*found) < 1e-6


@pytest.mark.parametrize(
    "strategy", cases([hvkit.ElasticAveraging(3), hvkit.DiLoCo(3, overlap=2), hvkit.Gossip()])
)
def test_fit_ends_strategies_whose_ranks_differ_with_one_model(strategy):
    data = local(regression(steps=8))
    model, optimizer = in_rounds(strategy)
    seen = Seen()
    fit_and_see = {
        "x": np.concatenate([x for x, _ in data]),
        "y": np.concatenate([y for _, y in data]),
    }
    model.compile(optimizer, "mse")
    model.fit(**fit_and_see, batch_size=6, verbose=0, callbacks=[seen])
    assert seen.epochs[0][0]
    assert alike(model)
    assert all(map(np.array_equal, weights(model), seen.epochs[-1][1]))
    with hvkit.settled(model):
        assert largest_difference(weights(model), seen.epochs[-1][1]) < 1e-6


class Seen(keras.callbacks.Callback):
    """What a callback sees at the end of each epoch, and in each step."""

    def __init__(self):
        super().__init__()
        self.epochs, self.steps = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(alike(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((alike(self.model), weights(self.model), logs))


@MORE
@pytest.mark.two_ranks
def test_fit_validates_and_shows_callbacks_the_agreed_weights():
    data = local(regression(steps=8))
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    others = np.random.default_rng(1).normal(size=(12, 8)).astype(np.float32)
    targets = others[:, :4]
    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    model.compile(optimizer, "mse")
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    seen = Seen()
    model.fit(x, y, epochs=2, validation_data=(others, targets), callbacks=[seen], **options)
    assert seen.steps == [(step + 1) % 3 == 0 for step in range(16)]
    for same, values, logs in seen.epochs:
        assert same
        twin = mlp()
        twin.set_weights(values)
        expected = float(tf.reduce_mean((twin(others) - targets) ** 2))
        assert logs["val_loss"] == pytest.approx(expected, rel=1e-5)
    # Two epochs are five rounds and a step: the end of fit ends the last one.
    assert alike(model)


@MORE
def test_looking_does_not_change_the_training():
    data = local(regression(steps=8))
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    found = []
    for more in ({}, {"validation_data": (x, y), "callbacks": [Seen()]}):
        model, optimizer = in_rounds(hvkit.DiLoCo(3))
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0, **more)
        found.append(weights(model))
    assert all(map(np.array_equal, *found))


@MORE
@pytest.mark.two_ranks
def test_early_stopping_restores_weights_that_all_ranks_hold():
    data = local(regression(steps=8))
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    model, optimizer = in_rounds(hvkit.DiLoCo(3))
    model.compile(optimizer, "mse")
    seen = Seen()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    model.fit(
        x, y, batch_size=6, epochs=9, shuffle=False, verbose=0,
        validation_data=(x + 3, -y), callbacks=[seen, stop],
    )  # fmt: skip
    best = min(seen.epochs, key=lambda each: each[2]["val_loss"])
    assert len(seen.epochs) < 9
    assert all(map(np.array_equal, weights(model), best[1]))
    assert alike(model)


@MORE
@pytest.mark.two_ranks
def test_batch_norm_statistics_are_averaged_at_each_agreement():
    layers = [keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model, optimizer = in_rounds(hvkit.LocalSGD(2), model=keras.Sequential(layers))
    data = local(regression(steps=4))
    LOOPS["function"](model, optimizer, data[:3])
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)
    LOOPS["function"](model, optimizer, data[3:])
    assert alike(model)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_an_overflow_on_one_rank_does_not_shift_its_rounds(loop):
    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0)
    model, optimizer = in_rounds(hvkit.LocalSGD(3), scaler)

    def step(x, y, by):
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(mse(y, model(x)))
        variables = model.trainable_variables
        gradients = [g * by for g in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    step = tf.function(step) if loop == "function" else step
    for number, (x, y) in enumerate(local(regression(steps=9))):
        overflows = number in (0, 5) and hvkit.rank() == 0
        step(tf.constant(x), tf.constant(y), tf.constant(np.inf if overflows else 1, tf.float32))
        assert alike(model) == (number % 3 == 2)


@pytest.mark.two_ranks
def test_accumulated_gradients_count_as_one_step():
    model, optimizer = in_rounds(hvkit.LocalSGD(2), sgd(gradient_accumulation_steps=2))
    for number, batch in enumerate(local(regression(steps=8))):
        LOOPS["eager"](model, optimizer, [batch])
        assert alike(model) == (number in (0, 3, 4, 7))


@pytest.mark.parametrize(("compression", "width"), cases([("bf16", 2), ("none", 4)]))
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_a_round_sends_the_weights_once(loop, compression, width):
    model, optimizer = in_rounds(hvkit.LocalSGD(5), compression=compression)
    data = local(regression(steps=20))
    LOOPS[loop](model, optimizer, data[:5])
    before = hvkit.traffic()
    LOOPS[loop](model, optimizer, data[5:])
    sent = {name: each.bytes - before[name].bytes for name, each in hvkit.traffic().items()}
    count = sum(int(np.prod(w.shape)) for w in model.weights)
    ring = 2 * (hvkit.size() - 1) / hvkit.size() * count * width
    assert sent["weights"] == pytest.approx(3 * ring, rel=0.03)
    assert sent.get("gradients", 0) == 0
    assert alike(model)


@MORE
@pytest.mark.parametrize("loop", cases(LOOPS))
def test_the_default_sends_gradients(loop):
    model, optimizer = in_rounds(hvkit.Synchronous())
    data = local(regression(steps=4))
    LOOPS[loop](model, optimizer, data[:1])
    before = hvkit.traffic()["gradients"]
    LOOPS[loop](model, optimizer, data[1:])
    sent = hvkit.traffic()["gradients"].bytes - before.bytes
    count = sum(int(np.prod(w.shape)) for w in model.weights)
    assert sent == 3 * (2 * (hvkit.size() - 1) * count * 4 // hvkit.size())


def test_weights_that_one_rank_loaded_alone_are_found_before_the_first_step():
    model, optimizer = in_rounds(hvkit.LocalSGD(8))
    if hvkit.rank() == 1:
        model.layers[-1].kernel.assign(tf.zeros((16, 4)))
    error, text = error_of(lambda: LOOPS["eager"](model, optimizer, local(regression(steps=1))))
    assert error is hvkit.RanksDisagreeError
    assert "of rank 1 differs from that of rank 0" in text


@MORE
def test_compiled_before_and_fit_again():
    model, optimizer = mlp(), sgd()
    model.compile(optimizer, "mse")
    in_rounds(hvkit.LocalSGD(3), optimizer, model)
    data = local(regression(steps=4))
    refit(model, data)
    assert alike(model)
    refit(model, data)
    assert alike(model)


@pytest.mark.two_ranks
def test_contradictions_are_refused():
    error, text = error_of(lambda: in_rounds(hvkit.LocalSGD(4), batch_norm="sync"))
    assert error is ValueError
    assert "LocalSGD(every=4)" in text
    error, text = error_of(lambda: in_rounds(hvkit.FullyShard()))
    assert error is ValueError
    assert "hvkit.ShardedOptimizer()" in text
    error, text = error_of(lambda: in_rounds(hvkit.LocalSGD(4 + hvkit.rank())))
    assert error is hvkit.RanksDisagreeError
    model, _ = in_rounds(hvkit.LocalSGD(4))
    error, text = error_of(lambda: fit(model, sgd(), local(regression(steps=1))))
    assert error is ValueError
    assert "was not passed" in text


@MORE
@pytest.mark.two_ranks
def test_an_error_in_fit_leaves_each_rank_its_own_weights():
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.own = weights(self.model)

        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("full disk")

    data = local(regression(steps=4))
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    model.compile(optimizer, "mse")
    with pytest.raises(RuntimeError, match="full disk"):
        model.fit(x, y, batch_size=6, shuffle=False, verbose=0, callbacks=[fails := Fails()])
    assert all(map(np.array_equal, weights(model), fails.own))
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_variables_that_are_updated_in_turn_have_their_own_rounds(loop):
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    steps = steps_of_halves(model, optimizer, loop)
    optimizer.build(model.trainable_variables)
    for number, (x, y) in enumerate(local(regression(steps=8))):
        steps[number % 2](tf.constant(x), tf.constant(y))
    assert alike(model)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_looking_leaves_agreed_weights_alone_while_others_are_in_a_round(loop):
    model, optimizer = in_rounds(hvkit.DiLoCo(4, outer_momentum=0.9))
    steps = steps_of_halves(model, optimizer, loop)
    data = [tuple(map(tf.constant, batch)) for batch in local(regression(steps=7))]
    for which, (x, y) in zip([0, 1, 0, 1], data, strict=False):
        steps[which](x, y)
    with hvkit.settled(model):
        pass
    for which, (x, y) in zip([0, 0, 1], data[4:], strict=True):
        steps[which](x, y)
    agreed = weights(model)[:2]
    assert same_on_all_ranks(agreed)
    with hvkit.settled(model):
        assert all(map(np.array_equal, weights(model)[:2], agreed))


@MORE
@pytest.mark.two_ranks
def test_layers_that_are_frozen_in_the_middle_of_a_round_are_agreed_on():
    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    data = local(regression(steps=5))
    LOOPS["function"](model, optimizer, data[:2])
    model.layers[0].trainable = False
    LOOPS["function"](model, optimizer, data[2:])
    assert alike(model)


def test_layers_that_are_frozen_on_the_way_count_once_where_ranks_are_never_alike():
    model, optimizer = in_rounds(hvkit.ElasticAveraging(4, pull=0.5), keras.optimizers.SGD(0.0))
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    model.layers[0].trainable = False
    LOOPS["eager"](model, optimizer, data[:1])
    start = weights(model)
    for weight, value in zip(model.weights, start, strict=True):
        weight.assign(value + hvkit.rank())
    with hvkit.settled(model):
        shown = weights(model)
    mean = np.mean(range(hvkit.size()))
    assert all(np.allclose(w, v + 0.5 * mean) for w, v in zip(shown, start, strict=True))


def test_a_step_inside_settled_is_refused():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    with hvkit.settled(model):
        error, text = error_of(lambda: LOOPS["eager"](model, optimizer, data[1:]))
    assert error is ValueError
    assert "hvkit.settled" in text


@pytest.mark.two_ranks
def test_settled_after_the_optimizer_is_gone():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    LOOPS["eager"](model, optimizer, local(regression(steps=2)))
    del optimizer
    gc.collect()
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)
