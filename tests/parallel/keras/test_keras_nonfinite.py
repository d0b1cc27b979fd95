"""Keras: gradients with NaN or infinite values stop all ranks, or skip an update on all."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import LOOPS, alike, local, mlp, regression, sgd, weights
from ranks import error_of, shared_folder

import hvkit
from hvkit.sync.nonfinite import skipped_steps
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


@pytest.mark.parametrize("loop", cases(["function", "eager", "fit"]))
def test_an_update_that_is_skipped_changes_nothing(loop, capfd):
    data = local(regression(steps=5))
    model, optimizer = distributed("skip", keras.optimizers.Adam(0.01))
    LOOPS[loop](model, optimizer, spoiled(data, 2))
    twin, plain = distributed("ignore", keras.optimizers.Adam(0.01))
    LOOPS[loop](twin, plain, data[:2] + data[3:])
    assert all(map(np.array_equal, weights(model), weights(twin)))
    assert alike(model)
    assert int(optimizer.iterations) == 4
    logged = capfd.readouterr().err
    assert ("skipped step 103: rank 1 has a NaN or infinite gradient of parameters " in logged) == (
        hvkit.rank() == 0
    )


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("loop", "batch_norm"),
    cases([("eager", "sync"), ("function", "average"), ("fit", "average")]),
)
def test_statistics_of_batch_norm_survive_a_skipped_update(loop, batch_norm):
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = keras.optimizers.SGD(0.1)
    hvkit.distribute(model, optimizer, on_nonfinite="skip", batch_norm=batch_norm)
    data = local(regression(steps=4))
    statistics = layers[1].moving_mean, layers[1].moving_variance
    LOOPS[loop](model, optimizer, spoiled(data[:1], 0))
    assert [each.numpy().tolist() for each in statistics] == [[0] * 4, [1] * 4]
    LOOPS[loop](model, optimizer, data[:3])
    before = [each.numpy().copy() for each in statistics]
    LOOPS[loop](model, optimizer, spoiled(data[3:], 0))  # a NaN in one sample: all channels
    assert all(map(np.array_equal, (each.numpy() for each in statistics), before))
    LOOPS[loop](model, optimizer, data[3:])
    assert all(np.isfinite(each).all() for each in weights(model))
    assert alike(model)


@pytest.mark.parametrize(
    ("loop", "kind"),
    cases(
        [
            ("function", tf.errors.InvalidArgumentError),
            ("eager", FloatingPointError),
            ("fit", FloatingPointError),
        ],
        2,
    ),
)
def test_stop_names_rank_and_variable_on_every_rank(loop, kind):
    model, optimizer = distributed("stop", sgd())
    data = spoiled(local(regression(steps=3)), 1)
    error, text = error_of(lambda: LOOPS[loop](model, optimizer, data))
    assert issubclass(error, kind)
    assert "in step 102: rank 1 has a NaN or infinite gradient of " in text
    assert "kernel" in text
    assert kind is not FloatingPointError or text.startswith("in step 102: ")


@pytest.fixture
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory)


@MORE
@pytest.mark.two_ranks
def test_fit_numbers_steps_on_after_a_resumption_with_skipped_ones(folder, monkeypatch, capfd):
    data = local(regression(steps=5))
    for at, number in ((2, 3), (1, 7)):
        # As in a new process.
        for name in ("_resumed", "_last_step"):
            monkeypatch.setattr(calls, name, 0)
        monkeypatch.setattr(calls, "_graphs", {})
        monkeypatch.setattr(skipped_steps, "number", 0)
        model, optimizer = distributed("skip", sgd())
        model.compile(optimizer, "mse")
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        start = checkpoint.restore()
        assert start.step == 5 * start.epoch
        x, y = (np.concatenate(part) for part in zip(*spoiled(data, at), strict=True))
        model.fit(
            x, y, batch_size=len(data[0][0]), shuffle=False, verbose=0,
            initial_epoch=start.epoch, epochs=start.epoch + 1, callbacks=[checkpoint.callback()],
        )  # fmt: skip
        logged = capfd.readouterr().err
        assert (f"skipped step {number}: rank 1 has" in logged) == (hvkit.rank() == 0)


@MORE
@pytest.mark.two_ranks
def test_stop_in_train_on_batch_is_hvkits_own_error():
    model, optimizer = distributed("stop", sgd())
    model.compile(optimizer, "mse")
    good, bad = spoiled(local(regression(steps=2)), 1)
    model.train_on_batch(*good)
    error, text = error_of(lambda: model.train_on_batch(*bad))
    assert error is FloatingPointError
    assert text.startswith("in step 102: rank 1 has a NaN or infinite gradient of ")


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (keras.optimizers.LossScaleOptimizer(sgd()), "LossScaleOptimizer, which skips"),
        (sgd(gradient_accumulation_steps=2), "add NaN to what it has"),
    ],
)
def test_what_skips_or_adds_up_itself_is_refused(optimizer, text):
    with pytest.raises(ValueError, match=text):
        distributed("skip", optimizer)


@pytest.mark.two_ranks
def test_a_model_for_which_compile_scales_the_loss_is_refused():
    model = mlp()
    model.dtype_policy = "mixed_float16"
    with pytest.raises(ValueError, match="compile makes a LossScaleOptimizer for model"):
        hvkit.distribute(model, sgd(), on_nonfinite="skip")
