"""Keras: gradients with NaN or infinite values stop all ranks, or skip an update on all."""

from weakref import WeakKeyDictionary

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras_models import (
    CUSTOM_LOOPS,
    LOOPS,
    alike,
    local,
    mlp,
    refit,
    regression,
    sgd,
    values,
    weights,
)
from ranks import error_of, identical, shared_folder

import hvkit
from hvkit.sync.port import skipped_steps
from hvkit.watch import calls


@pytest.fixture(autouse=True)
def _resumed_after_step_100(monkeypatch):
    monkeypatch.setattr(calls, "_resumed", 100)


def distributed(action, optimizer, **options):
    return hvkit.distribute(mlp(), optimizer, on_nonfinite=action, **options)


def spoiled(data, at):
    """The data with a NaN in one batch of rank 1."""
    data = [(np.array(x), np.array(y)) for x, y in data]
    if hvkit.rank() == 1:
        data[at][0][0, 0] = np.nan
    return data


@pytest.mark.parametrize("loop", cases([*CUSTOM_LOOPS, "fit"]))
def test_an_update_that_is_skipped_changes_nothing(loop, capfd):
    data = local(regression(steps=5))
    model, optimizer = distributed("skip", keras.optimizers.Adam(0.01))
    LOOPS[loop](model, optimizer, spoiled(data, 2))
    twin, plain = distributed("ignore", keras.optimizers.Adam(0.01))
    LOOPS[loop](twin, plain, data[:2] + data[3:])
    assert identical(weights(model), weights(twin))
    assert alike(model)
    assert int(optimizer.iterations) == 4
    logged = capfd.readouterr().err
    assert ("skipped step 103: rank 1 has a NaN or infinite gradient of parameters " in logged) == (
        hvkit.rank() == 0
    )


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("loop", "batch_norm"),
    cases([("eager", "sync"), (CUSTOM_LOOPS[0], "average"), ("fit", "average")]),
)
def test_statistics_of_batch_norm_survive_a_skipped_update(loop, batch_norm):
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    hvkit.distribute(model, optimizer, on_nonfinite="skip", batch_norm=batch_norm)
    model.compile(optimizer, "mse")

    def train(data):
        refit(model, data) if loop == "fit" else LOOPS[loop](model, optimizer, data)

    data = local(regression(steps=4))
    statistics = layers[1].moving_mean, layers[1].moving_variance
    train(spoiled(data[:1], 0))
    assert [each.numpy().tolist() for each in statistics] == [[0] * 4, [1] * 4]
    train(data[:3])
    before = values(statistics)
    train(spoiled(data[3:], 0))  # a NaN in one sample: all channels
    assert identical(values(statistics), before)
    train(data[3:])
    assert all(np.isfinite(each).all() for each in weights(model))
    assert alike(model)


@pytest.mark.parametrize("loop", cases([*CUSTOM_LOOPS, "fit", "train_on_batch"], 2))
def test_stop_names_rank_and_variable_on_every_rank(loop):
    model, optimizer = distributed("stop", sgd())
    good, bad = spoiled(local(regression(steps=2)), 1)
    if loop == "train_on_batch":
        model.compile(optimizer, "mse")
        model.train_on_batch(*good)
        error, text = error_of(lambda: model.train_on_batch(*bad))
    else:
        error, text = error_of(lambda: LOOPS[loop](model, optimizer, [good, bad]))
    assert "in step 102: rank 1 has a NaN or infinite gradient of " in text
    assert "kernel" in text
    if loop == "function":  # the error is TensorFlow's
        import tensorflow as tf

        assert error is tf.errors.InvalidArgumentError
    else:
        assert error is FloatingPointError
        assert text.startswith("in step 102: ")


@MORE
@pytest.mark.two_ranks
def test_fit_numbers_steps_on_after_a_resumption_with_skipped_ones(
    tmp_path_factory, monkeypatch, capfd
):
    folder = shared_folder(tmp_path_factory)
    data = local(regression(steps=5))
    for at, number in ((2, 3), (1, 7)):
        # As in a new process.
        for name in ("_resumed", "_last_step"):
            monkeypatch.setattr(calls, name, 0)
        monkeypatch.setattr(calls, "_graphs", WeakKeyDictionary())
        monkeypatch.setattr(skipped_steps, "number", 0)
        model, optimizer = distributed("skip", sgd())
        model.compile(optimizer, "mse")
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        start = checkpoint.restore()
        assert start.step == 5 * start.epoch
        epochs = {"initial_epoch": start.epoch, "epochs": start.epoch + 1}
        refit(model, spoiled(data, at), callbacks=[checkpoint.callback()], **epochs)
        logged = capfd.readouterr().err
        assert (f"skipped step {number}: rank 1 has" in logged) == (hvkit.rank() == 0)


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("make_optimizer", "policy", "text"),
    [
        (
            lambda: keras.optimizers.LossScaleOptimizer(sgd()),
            "float32",
            "LossScaleOptimizer, which skips",
        ),
        (lambda: sgd(gradient_accumulation_steps=2), "float32", "add NaN to what it has"),
        (sgd, "mixed_float16", "compile makes a LossScaleOptimizer for model"),
    ],
)
def test_optimizers_that_skip_or_accumulate_themselves_are_refused(make_optimizer, policy, text):
    model = mlp()
    model.dtype_policy = policy
    with pytest.raises(ValueError, match=text):
        hvkit.distribute(model, make_optimizer(), on_nonfinite="skip")
