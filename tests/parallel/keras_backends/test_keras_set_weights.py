"""Weights that the script and callbacks set, and variables beside the model's."""

import keras
import numpy as np
import pytest
from cases import MORE, cases, each_once
from keras_models import (
    CUSTOM_LOOPS,
    LOOPS,
    alike,
    filled_like,
    in_rounds,
    local,
    mlp,
    mse,
    normalised,
    on_tensorflow,
    refit,
    regression,
    steps_of_halves,
    update,
    weights,
)
from ranks import (
    error_of,
    identical,
    largest_difference,
    same_on_all_ranks,
    shared_folder,
)

import hvkit

pytestmark = pytest.mark.two_ranks

# Rounds of 3 steps end neither with an epoch of 4 nor with two.
STRATEGIES = [
    hvkit.DiLoCo(3, 1.0, 0.0),
    hvkit.ParameterServer(2),
    hvkit.LocalSGD(3),
    hvkit.DiLoCo(3, 1.0, 0.0, overlap=2),
    hvkit.ElasticAveraging(3),
    hvkit.Gossip(3),
]


class Sets(keras.callbacks.Callback):
    """Sets all weights when an event of ``fit`` comes, after which nothing trains any more."""

    def __init__(self, value=0.25, event="on_epoch_end", epoch=0):
        super().__init__()
        self.value, self.epoch = value, epoch
        setattr(self, event, self.set)

    def set(self, epoch, logs=None):
        if epoch in (self.epoch, {}):  # the beginning of training has no number
            if self.value is not None:
                self.model.set_weights(filled_like(self.model, self.value))
            self.model.optimizer.learning_rate = 0.0


def begun(strategy, eager=True, make=mlp):
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.05), make())
    model.compile(optimizer, "mse", run_eagerly=eager)
    return model


def train_on(model, *callbacks, epochs=1):
    refit(model, local(regression(steps=4)), epochs=epochs, callbacks=list(callbacks))


def saved_in(folder, model):
    return hvkit.Checkpoint(folder, model=model, optimizer=model.optimizer)


def distance_from(value, model):
    return largest_difference(weights(model), filled_like(model, value))


@MORE
@pytest.mark.parametrize("strategy", STRATEGIES[:5], ids=str)
def test_weights_set_between_two_fits_are_kept_settled_and_saved(strategy, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model = begun(strategy, make=normalised)
    train_on(model)
    model.set_weights(filled_like(model, 0.25))
    with hvkit.settled(model):
        assert distance_from(0.25, model) < 1e-6
    model.optimizer.learning_rate = 0.0
    saved_in(folder, model).save(epoch=1, step=4)
    resumed = begun(strategy, make=normalised)
    saved_in(folder, resumed).restore()
    for each in (model, resumed):
        train_on(each)
        trained = [w.numpy() for w in each.trainable_variables]
        assert largest_difference(trained, [np.full_like(w, 0.25) for w in trained]) < 1e-6


@MORE
@pytest.mark.parametrize(
    "strategy", [hvkit.DiLoCo(3, overlap=2), hvkit.ElasticAveraging(3)], ids=str
)
def test_a_run_whose_ranks_are_never_alike_can_go_back(strategy, tmp_path_factory):
    model = begun(strategy)
    checkpoint = saved_in(shared_folder(tmp_path_factory), model)
    train_on(model, checkpoint.callback())
    checkpoint.restore()
    train_on(model)
    assert alike(model)


@MORE
def test_rounds_before_a_checkpoint_of_another_strategy_are_forgotten(tmp_path_factory):
    folder, data = shared_folder(tmp_path_factory), local(regression(steps=4))
    saved, optimizer = in_rounds(hvkit.LocalSGD(2))
    LOOPS["eager"](saved, optimizer, data)
    hvkit.Checkpoint(folder, model=saved, optimizer=optimizer).save(epoch=1, step=4)
    model, optimizer = in_rounds(hvkit.Gossip(2))
    LOOPS[CUSTOM_LOOPS[0]](model, optimizer, data)
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer).restore()
    with hvkit.settled(model):
        assert identical(weights(model), weights(saved))


@MORE
@on_tensorflow
@pytest.mark.parametrize("loop", CUSTOM_LOOPS)
def test_a_round_after_an_error_begins_with_what_the_script_has_set(loop, monkeypatch):
    from hvkit.frameworks.keras.tensorflow import local_weights

    monkeypatch.setattr(local_weights, "_COMPARED_EVERY", 2)
    model, optimizer = in_rounds(hvkit.DiLoCo(2, 1.0, 0.0), keras.optimizers.SGD(0.05))
    steps = steps_of_halves(model, optimizer, loop)
    data = local(regression(steps=4))
    x, y = map(keras.ops.convert_to_tensor, data[0])
    for half in (0, 0, 1, 1):
        steps[half](x, y)
    if hvkit.rank() == 0:
        steps[0](x, y)
    for w in model.trainable_variables[2:]:
        w.assign(w + 1 + 1e-6 * hvkit.rank())
    chosen = weights(model)[2:]
    error, text = error_of(lambda: LOOPS["fit"](model, optimizer, data))
    assert error is hvkit.RanksDisagreeError
    assert "was trained in this round on rank 0 but not on rank 1" in text
    if hvkit.rank() == 1:
        steps[0](x, y)
    for _ in range(2):
        steps[1](x, y)
    trained = weights(model)[2:]
    assert same_on_all_ranks(trained)
    assert 1e-3 < largest_difference(trained, chosen) < 1


@MORE
@pytest.mark.parametrize("loop", CUSTOM_LOOPS)
def test_weights_that_the_script_sets_after_a_round_in_which_it_has_looked_are_no_training(loop):
    model, optimizer = in_rounds(hvkit.DiLoCo(4, 1.0, 0.0), keras.optimizers.SGD(0.05))
    data = local(regression(steps=4))
    LOOPS[loop](model, optimizer, data[:2])
    with hvkit.settled(model):  # in the middle of the round
        pass
    LOOPS[loop](model, optimizer, data[2:])
    chosen = filled_like(model, 0.25 + hvkit.rank() * 1e-7)
    model.set_weights(chosen)
    with hvkit.settled(model):
        assert alike(model)
        shown = weights(model)
    assert largest_difference(shown, chosen) < 1e-6
    optimizer.learning_rate = 0.0
    LOOPS[loop](model, optimizer, data)
    assert identical(weights(model), shown)


@MORE
@pytest.mark.parametrize(
    ("strategy", "epoch", "eager"),
    [(STRATEGIES[0], 0, False), *each_once(STRATEGIES, [1, 0], [True])],
)
def test_weights_that_a_callback_sets_are_kept(strategy, epoch, eager):
    model = begun(strategy, eager)
    train_on(model, Sets(epoch=epoch), epochs=2)
    assert distance_from(0.25, model) < 1e-6
    assert alike(model)


@pytest.mark.parametrize(
    ("strategy", "event"),
    cases(each_once(STRATEGIES[:0:-1], ["on_train_begin", "on_epoch_begin"])),
)
def test_weights_that_a_callback_sets_before_training_are_where_it_begins(strategy, event):
    model = begun(strategy)
    train_on(model)
    train_on(model, Sets(event=event))
    assert distance_from(0.25, model) < 1e-6


@MORE
@pytest.mark.parametrize("strategy", [STRATEGIES[1], STRATEGIES[3]], ids=str)
def test_a_checkpoint_holds_what_a_callback_before_it_has_set(strategy, tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model = begun(strategy)
    train_on(model, Sets(), saved_in(folder, model).callback())
    resumed = begun(strategy)
    saved_in(folder, resumed).restore()
    train_on(resumed)
    assert distance_from(0.25, resumed) < 1e-6


@MORE
@on_tensorflow
def test_a_step_that_one_rank_skips_between_two_fits_confuses_nobody():
    scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=2.0)
    model, _ = in_rounds(hvkit.Gossip(1), scaler)
    model.compile(scaler, "mse", run_eagerly=True)
    train_on(model)
    x, y = local(regression(steps=1))[0]
    model.train_on_batch(x * (np.inf if hvkit.rank() else 1), y)
    train_on(model)
    assert alike(model)


@pytest.mark.parametrize("value", cases([None, 0.5]))
def test_a_callback_that_sets_other_weights_on_one_rank_is_an_error(value):
    callback = Sets(value if hvkit.rank() == 1 else 0.25)
    error, text = error_of(lambda: train_on(begun(hvkit.DiLoCo(3)), callback))
    assert error is hvkit.RanksDisagreeError, text
    expected = (
        "at the end of an epoch on rank 0 but not on rank 1"
        if value is None
        else "kernel, set by a callback, of rank 1 differs"
    )
    assert expected in text


@MORE
@pytest.mark.parametrize("change", [1e-6, 1.0])
def test_weights_that_ranks_set_otherwise_between_two_fits_are_found_or_rounded(change):
    model = begun(hvkit.DiLoCo(2, 1.0, 0.0), eager=False)
    train_on(model)
    kernel = model.layers[0].kernel
    kernel.assign(kernel * (1 + change * hvkit.rank()))
    error, text = error_of(lambda: train_on(model))
    if change < 1:
        assert error is None
        assert alike(model)
    else:
        assert error is hvkit.RanksDisagreeError
        assert "kernel, set between two rounds, of rank 1 differs" in text


@MORE
@on_tensorflow
@pytest.mark.parametrize(
    ("strategy", "loop"), [(hvkit.LocalSGD(8), "function"), (hvkit.ParameterServer(2), "eager")]
)
def test_looking_leaves_variables_beside_the_model_alone(strategy, loop):
    import tensorflow as tf

    beside, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.01)
    model, optimizer = hvkit.distribute(mlp(), optimizer, strategy=strategy)

    def step(x, y, slope):
        variables = [*model.trainable_variables, beside]
        update(optimizer, variables, lambda: mse(y, model(x)) + slope * beside)

    step = tf.function(step) if loop == "function" else step
    slope = tf.constant(float(hvkit.rank()))
    for x, y in local(regression(steps=10)):
        step(tf.constant(x), tf.constant(y), slope)
        own = beside.numpy()
        with hvkit.settled(model):
            pass
        assert beside.numpy() == own
    with hvkit.settled(model):
        mean = np.mean(range(hvkit.size()))
        assert beside.numpy() == pytest.approx(1 - 10 * 0.01 * mean, abs=1e-6)


@on_tensorflow
def test_a_variable_beside_the_model_that_the_script_sets_is_where_the_next_round_begins():
    strategy = hvkit.DiLoCo(2, 0.5, 0.0)
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05), strategy=strategy)
    beside = keras.Variable(1.0)
    for step, (x, y) in enumerate(local(regression(steps=4))):
        if step == 2:
            beside.assign(10.0)
            optimizer.learning_rate = 0.0
            with hvkit.settled(model):
                pass
        variables = [*model.trainable_variables, beside]
        update(optimizer, variables, lambda x=x, y=y: mse(y, beside * model(x)))
    assert beside.numpy() == 10.0


@MORE
def test_residuals_at_the_end_of_fit_are_sent_later():
    """The last step of the first ``fit`` is in the middle of a round, beside an agreement."""
    strategy, compression = hvkit.DiLoCo(4, 1.0, 0.0, overlap=1), hvkit.TopK(0.2)
    model, optimizer = in_rounds(strategy, keras.optimizers.SGD(0.05), compression=compression)
    own = []
    keep = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: own.append(weights(model))
    )
    model.compile(optimizer, "mse")
    refit(model, local(regression(steps=2)), callbacks=[keep])
    everyone = hvkit.allgather(own[-1])
    means = [np.mean(each, axis=0) for each in zip(*everyone, strict=True)]
    assert largest_difference(weights(model), means) > 1e-3
    optimizer.learning_rate = 0.0
    refit(model, local(regression(steps=64)))
    assert largest_difference(weights(model), means) < 1e-5
