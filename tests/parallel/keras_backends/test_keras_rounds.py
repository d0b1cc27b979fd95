"""Strategies that let ranks train alone for a round, and then agree on weights."""

import gc

import keras
import numpy as np
import pytest
from cases import MORE, cases, each_once
from keras_models import (
    CUSTOM_LOOPS,
    LOOPS,
    ON_TENSORFLOW,
    alike,
    distributed,
    fit,
    in_rounds,
    joined,
    local,
    mlp,
    normalised,
    on_tensorflow,
    refit,
    regression,
    scaled_step,
    sgd,
    steps_of_halves,
    weights,
)
from ranks import (
    as_vector,
    error_of,
    gossip_matrix,
    identical,
    largest_difference,
    same_on_all_ranks,
)

import hvkit

# Rounds of 3 steps end neither with an epoch of 8 nor with two.
ALONE = [
    hvkit.DiLoCo(3),
    hvkit.Gossip(3),
    hvkit.ParameterServer(2),
    hvkit.DiLoCo(3, overlap=2),
    hvkit.ElasticAveraging(3),
    hvkit.LocalSGD(3),
]


@MORE
@pytest.mark.parametrize(
    ("strategy", "loop"), each_once([hvkit.LocalSGD(5), hvkit.DiLoCo(5)], CUSTOM_LOOPS)
)
def test_ranks_differ_in_a_round_and_are_alike_after_it(strategy, loop):
    model, optimizer = in_rounds(strategy)
    data = local(regression(steps=10))
    LOOPS[loop](model, optimizer, data[:3])
    own = weights(model)
    assert not same_on_all_ranks(own)
    with hvkit.settled(model):
        assert alike(model)
    assert identical(weights(model), own)
    for part in (data[3:5], data[5:]):
        LOOPS[loop](model, optimizer, part)
        assert alike(model)


@pytest.mark.parametrize("loop", cases(CUSTOM_LOOPS))
def test_gossip_without_gradients_multiplies_by_its_matrix_in_each_step(loop):
    optimizer = keras.optimizers.SGD(0.05)
    model, optimizer = in_rounds(hvkit.Gossip(), optimizer)
    LOOPS[loop](model, optimizer, local(regression(steps=1)))  # the ranks begin alike
    model.set_weights([w + float(hvkit.rank()) for w in weights(model)])
    everyone = hvkit.allgather(as_vector(weights(model)))
    optimizer.learning_rate = 0.0
    LOOPS[loop](model, optimizer, local(regression(steps=3)))
    matrix = np.linalg.matrix_power(gossip_matrix("ring", hvkit.size()), 3)
    assert np.abs(as_vector(weights(model)) - matrix[hvkit.rank()] @ everyone).max() < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert np.abs(as_vector(weights(model)) - np.mean(everyone, axis=0)).max() < 1e-6


class Seen(keras.callbacks.Callback):
    """What a callback sees at the end of each epoch, and in each step."""

    def __init__(self):
        super().__init__()
        self.epochs, self.steps = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.steps.append(alike(self.model))

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append((alike(self.model), weights(self.model), logs))


@pytest.mark.parametrize("strategy", cases(ALONE, 3, str))
def test_fit_ends_with_one_model_which_is_the_one_that_callbacks_see(strategy):
    model, optimizer = in_rounds(strategy, model=normalised(hvkit.rank()))
    model.compile(optimizer, "mse", run_eagerly=strategy is not ALONE[0])
    seen = Seen()
    refit(model, local(regression(steps=8)), epochs=2, callbacks=[seen])
    assert [same for same, _, _ in seen.epochs] == [True, True]
    assert seen.epochs[1][2]["loss"] < seen.epochs[0][2]["loss"]
    assert alike(model)
    assert identical(weights(model), seen.epochs[-1][1])
    with hvkit.settled(model):
        assert largest_difference(weights(model), seen.epochs[-1][1]) < 1e-6


@MORE
@pytest.mark.two_ranks
def test_fit_validates_and_shows_callbacks_the_agreed_weights():
    others = regression(steps=1, seed=1)[0]
    found = []
    for looks in (True, False):
        model, optimizer = in_rounds(hvkit.LocalSGD(3))
        model.compile(optimizer, "mse", run_eagerly=True)
        seen = Seen()
        options = {"validation_data": others, "callbacks": [seen]} if looks else {}
        refit(model, local(regression(steps=8)), epochs=2, **options)
        # Two epochs are five rounds and a step: the end of fit ends the last one.
        assert alike(model)
        found.append((seen, weights(model)))
    (seen, looked), (_, alone) = found
    assert seen.steps == [(step + 1) % 3 == 0 for step in range(16)]
    for same, values, logs in seen.epochs:
        assert same
        twin = mlp()
        twin.set_weights(values)
        expected = np.mean((twin.predict(others[0], verbose=0) - others[1]) ** 2)
        assert logs["val_loss"] == pytest.approx(expected, rel=1e-5)
    assert identical(looked, alone)  # looking has changed nothing


@MORE
@pytest.mark.two_ranks
def test_early_stopping_restores_weights_that_all_ranks_hold():
    data = local(regression(steps=8))
    x, y = joined(data)
    model, optimizer = in_rounds(hvkit.DiLoCo(3))
    model.compile(optimizer, "mse", run_eagerly=True)
    seen = Seen()
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    refit(model, data, epochs=9, validation_data=(x + 3, -y), callbacks=[seen, stop])
    best = min(seen.epochs, key=lambda each: each[2]["val_loss"])
    assert len(seen.epochs) < 9
    assert identical(weights(model), best[1])
    assert alike(model)


@MORE
@pytest.mark.two_ranks
def test_batch_norm_statistics_are_averaged_at_each_agreement():
    model, optimizer = in_rounds(hvkit.LocalSGD(2), model=normalised())
    data = local(regression(steps=4))
    LOOPS[CUSTOM_LOOPS[0]](model, optimizer, data[:3])
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)
    LOOPS[CUSTOM_LOOPS[0]](model, optimizer, data[3:])
    assert alike(model)


@MORE
@pytest.mark.two_ranks
@on_tensorflow
@pytest.mark.parametrize("loop", ["function", "eager"])
def test_an_overflow_on_one_rank_does_not_shift_its_rounds(loop):
    import tensorflow as tf

    scaler = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=2.0)
    model, optimizer = in_rounds(hvkit.LocalSGD(3), scaler)
    step = tf.function(scaled_step) if loop == "function" else scaled_step
    for number, batch in enumerate(local(regression(steps=9))):
        overflows = number in (0, 5) and hvkit.rank() == 0
        step(model, optimizer, *map(tf.constant, (*batch, np.float32(np.inf if overflows else 1))))
        assert alike(model) == (number % 3 == 2)


@pytest.mark.two_ranks
def test_accumulated_gradients_count_as_one_step():
    model, optimizer = in_rounds(hvkit.LocalSGD(2), sgd(gradient_accumulation_steps=2))
    for number, batch in enumerate(local(regression(steps=8))):
        LOOPS["eager"](model, optimizer, [batch])
        assert alike(model) == (number in (0, 3, 4, 7))


@pytest.mark.parametrize(
    ("strategy", "compression", "loop", "kind", "bytes_of_a_weight"),
    cases(
        [
            (hvkit.LocalSGD(5), "bf16", CUSTOM_LOOPS[0], "weights", 2 / 5),
            (hvkit.LocalSGD(5), "none", "eager", "weights", 4 / 5),
            *[
                (hvkit.Synchronous(), "none", loop, "gradients", 4)
                for loop in ("function", "fit")
                if ON_TENSORFLOW  # on PyTorch its own hooks send them
            ],
        ]
    ),
)
def test_a_round_sends_the_weights_once_and_the_default_gradients_in_each_step(
    strategy, compression, loop, kind, bytes_of_a_weight
):
    model, optimizer = in_rounds(strategy, compression=compression)
    data = local(regression(steps=20))
    LOOPS[loop](model, optimizer, data[:5])
    before = hvkit.traffic()
    LOOPS[loop](model, optimizer, data[5:])
    sent = {name: each.bytes - before[name].bytes for name, each in hvkit.traffic().items()}
    count = sum(w.size for w in weights(model))
    ring = 2 * (hvkit.size() - 1) / hvkit.size() * count * bytes_of_a_weight
    assert sent[kind] == pytest.approx(15 * ring, rel=0.03)
    assert sent.get({"weights": "gradients", "gradients": "weights"}[kind], 0) == 0
    assert alike(model)


@pytest.mark.parametrize("strategy", cases([hvkit.LocalSGD(8), hvkit.ParameterServer(2)]))
def test_weights_that_one_rank_loaded_alone_are_found_before_the_first_step(strategy):
    model, optimizer = in_rounds(strategy)
    if hvkit.rank() == 1:
        model.layers[-1].kernel.assign(np.zeros((16, 4)))
    error, text = error_of(lambda: LOOPS["eager"](model, optimizer, local(regression(steps=1))))
    assert error is hvkit.RanksDisagreeError
    assert "of rank 1 differs from that of rank 0" in text


@pytest.mark.two_ranks
@on_tensorflow
def test_contradictions_are_refused():
    for strategy, options, kind, expected in (
        (hvkit.LocalSGD(4), {"batch_norm": "sync"}, ValueError, "LocalSGD(every=4)"),
        (hvkit.FullyShard(), {}, ValueError, "hvkit.ShardedOptimizer()"),
        (hvkit.LocalSGD(4 + hvkit.rank()), {}, hvkit.RanksDisagreeError, "LocalSGD(every=5)"),
    ):
        error, text = error_of(lambda s=strategy, o=options: in_rounds(s, **o))
        assert error is kind
        assert expected in text
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

    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    model.compile(optimizer, "mse")
    with pytest.raises(RuntimeError, match="full disk"):
        refit(model, local(regression(steps=4)), callbacks=[fails := Fails()])
    assert identical(weights(model), fails.own)
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize("loop", CUSTOM_LOOPS)
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(2), hvkit.ParameterServer(0)])
def test_variables_that_are_updated_in_turn_have_their_own_rounds(strategy, loop):
    model, optimizer = in_rounds(strategy)
    steps = steps_of_halves(model, optimizer, loop)
    after_steps = []
    for number, batch in enumerate(local(regression(steps=8))):
        steps[number % 2](*map(keras.ops.convert_to_tensor, batch))
        after_steps.append(alike(model))
    assert after_steps[-1]
    assert all(after_steps) == isinstance(strategy, hvkit.ParameterServer)


@MORE
@pytest.mark.two_ranks
@on_tensorflow  # where variables that are updated in turn have their own rounds
@pytest.mark.parametrize("loop", CUSTOM_LOOPS)
def test_looking_leaves_agreed_weights_alone_while_others_are_in_a_round(loop):
    model, optimizer = in_rounds(hvkit.DiLoCo(4, outer_momentum=0.9))
    steps = steps_of_halves(model, optimizer, loop)
    data = [map(keras.ops.convert_to_tensor, batch) for batch in local(regression(steps=7))]
    for number, half in enumerate([0, 1, 0, 1, 0, 0, 1]):
        if number == 4:
            with hvkit.settled(model):
                pass
        steps[half](*data[number])
    agreed = weights(model)[:2]
    assert same_on_all_ranks(agreed)
    with hvkit.settled(model):
        assert identical(weights(model)[:2], agreed)


@MORE
@pytest.mark.two_ranks
def test_layers_that_are_frozen_in_the_middle_of_a_round_are_agreed_on():
    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    # On TensorFlow the variables that still train begin a round.
    data = local(regression(steps=5 if ON_TENSORFLOW else 6))
    LOOPS[CUSTOM_LOOPS[0]](model, optimizer, data[:2])
    model.layers[0].trainable = False
    LOOPS[CUSTOM_LOOPS[0]](model, optimizer, data[2:])
    assert alike(model)


def test_layers_that_are_frozen_on_the_way_count_once_where_ranks_are_never_alike():
    model, optimizer = in_rounds(hvkit.ElasticAveraging(4, pull=0.5), keras.optimizers.SGD(0.0))
    data = local(regression(steps=1))
    LOOPS["eager"](model, optimizer, data)
    model.layers[0].trainable = False
    LOOPS["eager"](model, optimizer, data)
    start = weights(model)
    for weight, value in zip(model.weights, start, strict=True):
        weight.assign(value + hvkit.rank())
    with hvkit.settled(model):
        shown = weights(model)
    mean = np.mean(range(hvkit.size()))
    assert all(np.allclose(w, v + 0.5 * mean) for w, v in zip(shown, start, strict=True))


@pytest.mark.parametrize("strategy", cases([hvkit.LocalSGD(4), hvkit.ParameterServer(2)]))
def test_a_step_inside_settled_is_refused(strategy):
    model, optimizer = in_rounds(strategy)
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    with hvkit.settled(model):
        error, text = error_of(lambda: LOOPS["eager"](model, optimizer, data[1:]))
    assert error is ValueError
    assert "hvkit.settled" in text


@pytest.mark.two_ranks
def test_settled_after_the_optimizer_is_gone_and_of_a_layer():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    LOOPS["eager"](model, optimizer, local(regression(steps=2)))
    del optimizer
    gc.collect()
    assert not alike(model)
    for shown in (model, *([] if ON_TENSORFLOW else model.layers[:1])):
        with hvkit.settled(shown):  # on PyTorch, a layer is a module as well
            assert alike(model)


@MORE
def test_an_optimizer_that_never_steps_does_not_end_the_rounds_of_another():
    first, second = mlp(hvkit.rank()), mlp(5 + hvkit.rank())
    optimizers = [sgd(), sgd()]
    hvkit.distribute([first, second], optimizers, strategy=hvkit.LocalSGD(3))
    fit(second, optimizers[1], local(regression(steps=4)))
    assert same_on_all_ranks([*weights(first), *weights(second)])


@MORE
@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.LocalSGD(1)], ids=str)
@pytest.mark.parametrize("steps", [4, 6, 7])
def test_statistics_are_the_same_after_updates_that_are_only_accumulated(strategy, steps):
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    distributed(model := normalised(hvkit.rank()), optimizer, strategy=strategy)
    fit(model, optimizer, local(regression(steps)), run_eagerly=steps != 6)
    assert alike(model)


@on_tensorflow
def test_ranks_that_update_other_variables_are_named():
    model, optimizer = in_rounds(hvkit.LocalSGD(4))
    data = local(regression(steps=2))
    LOOPS["eager"](model, optimizer, data[:1])
    model.layers[hvkit.rank() % 2].trainable = False
    error, text = error_of(lambda: LOOPS["eager"](model, optimizer, data[1:]))
    assert error is hvkit.RanksDisagreeError
    assert "weight 2, kernel, of shape (16, 4)" in text
    assert "update the same variables" in text
