"""Keras: weights that the script and callbacks set, and variables beside the model's."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import cases
from models import LOOPS, alike, fit, in_rounds, local, mse, refit, regression, weights
from ranks import error_of, largest_difference

import hvkit


def test_weights_that_the_script_sets_before_fit_are_no_training():
    data = local(regression(steps=4))
    x, y = (np.concatenate(part) for part in zip(*data, strict=True))
    model, optimizer = in_rounds(hvkit.DiLoCo(2, 1.0, 0.0), keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse")
    options = {"batch_size": 6, "shuffle": False, "verbose": 0}
    model.fit(x, y, **options)
    chosen = [np.full_like(w, 0.25) for w in weights(model)]
    model.set_weights(chosen)
    optimizer.learning_rate = 0.0
    model.fit(x, y, **options)
    assert all(map(np.array_equal, weights(model), chosen))


def test_weights_that_the_script_sets_between_two_fits_are_where_the_next_begins():
    model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=2), keras.optimizers.SGD(0.0))
    fit(model, optimizer, local(regression(steps=6)))
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    refit(model, local(regression(steps=6)))
    assert all(np.allclose(w, 1) for w in weights(model))


class Sets(keras.callbacks.Callback):
    """Sets all weights at the end of the first epoch, after which nothing trains any more."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0 and self.value is not None:
            self.model.set_weights([np.full_like(w, self.value) for w in weights(self.model)])
        self.model.optimizer.learning_rate = 0.0


def fit_with(callback, strategy):
    """Two epochs of 8 steps; rounds of 3 steps do not end with them."""
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.05))
    x, y = (np.concatenate(part) for part in zip(*local(regression(steps=8)), strict=True))
    model.compile(optimizer, "mse")
    model.fit(x, y, 6, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
    return model


@pytest.mark.parametrize(
    "strategy",
    cases(
        [
            hvkit.DiLoCo(3, 1.0, 0.0),
            hvkit.ParameterServer(2),
            hvkit.LocalSGD(3),
            hvkit.DiLoCo(3, 1.0, 0.0, overlap=2),
            hvkit.ElasticAveraging(3),
            hvkit.Gossip(3),
        ],
        2,
    ),
)
def test_weights_that_a_callback_sets_are_kept(strategy):
    model = fit_with(Sets(0.25), strategy)
    assert (
        largest_difference(weights(model), [np.full_like(w, 0.25) for w in weights(model)]) < 1e-6
    )
    assert alike(model)


@pytest.mark.parametrize("value", cases([None, 0.5]))
def test_a_callback_that_sets_other_weights_on_one_rank_is_an_error(value):
    callback = Sets(value if hvkit.rank() == 1 else 0.25)
    error, text = error_of(lambda: fit_with(callback, hvkit.DiLoCo(3)))
    assert error is hvkit.RanksDisagreeError, text
    expected = (
        "at the end of an epoch on some ranks only"
        if value is None
        else "weight 0, kernel, of rank 1 differs"
    )
    assert expected in text


def test_weights_that_one_rank_sets_between_two_fits_are_found():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=4))
    fit(model, optimizer, data)
    if hvkit.rank() == 1:
        model.layers[0].kernel.assign(np.zeros((8, 16)))
    error, text = error_of(lambda: refit(model, data))
    assert error is hvkit.RanksDisagreeError
    assert "weight 0, kernel, of rank 1 differs" in text


def test_ranks_that_round_differently_between_two_fits_become_alike():
    model, optimizer = in_rounds(hvkit.DiLoCo(2, 1.0, 0.0), keras.optimizers.SGD(0.05))
    data = local(regression(steps=4))
    fit(model, optimizer, data)
    for w in model.weights:
        w.assign(w * (1 + 1e-6 * hvkit.rank()))
    refit(model, data)
    assert alike(model)


@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(8), hvkit.ParameterServer(0)])
@pytest.mark.parametrize("loop", cases(["function", "eager"]))
def test_looking_leaves_variables_beside_the_model_alone(strategy, loop):
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.01))
    beside = keras.Variable(1.0)

    def step(x, y, slope):
        with tf.GradientTape() as tape:
            loss = mse(y, model(x)) + slope * beside
        variables = [*model.trainable_variables, beside]
        optimizer.apply(tape.gradient(loss, variables), variables)

    if loop == "function":
        step = tf.function(step)
    slope = tf.constant(float(hvkit.rank()))
    for x, y in local(regression(steps=10)):
        step(tf.constant(x), tf.constant(y), slope)
        with hvkit.settled(model):
            pass
    with hvkit.settled(model):
        mean = np.mean(range(hvkit.size()))
        assert beside.numpy() == pytest.approx(1 - 10 * 0.01 * mean, abs=1e-6)


def test_what_compression_leaves_out_at_the_end_of_fit_is_sent_later():
    """The last step of the first ``fit`` is in the middle of a round, beside an agreement."""
    strategy = hvkit.DiLoCo(8, 1.0, 0.0, overlap=1)
    top = hvkit.TopK(0.05)
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.05), compression=top)
    own = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: own.append(weights(model))
    )
    model.compile(optimizer, "mse")
    x, y = (np.concatenate(part) for part in zip(*local(regression(steps=4)), strict=True))
    model.fit(x, y, 6, shuffle=False, verbose=0, callbacks=[keep])
    everyone = hvkit.allgather(own[-1])
    means = [np.mean(each, axis=0) for each in zip(*everyone, strict=True)]
    assert largest_difference(weights(model), means) > 1e-3
    optimizer.learning_rate = 0.0
    for _ in range(7):
        refit(model, local(regression(steps=64)))
    assert largest_difference(weights(model), means) < 1e-5


def test_ranks_that_update_other_variables_are_named():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    model.layers[hvkit.rank() % 2].trainable = False
    error, text = error_of(lambda: LOOPS["eager"](model, optimizer, data[1:]))
    assert error is hvkit.RanksDisagreeError
    assert "weight 2, kernel, of shape (16, 4)" in text
    assert "update the same variables" in text
