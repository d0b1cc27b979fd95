"""Ranks that no longer train the same model, or that do the same work."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import (
    LOOPS,
    eager_tape,
    fit,
    graph_tape,
    local,
    mlp,
    refit,
    regression,
    tape_step,
    weights,
)
from ranks import error_of, identical, same_on_all_ranks

import hvkit
from hvkit import main_rank
from hvkit.sync import fingerprints

# The comparison itself is the one that PyTorch's tests run on three ranks.
pytestmark = pytest.mark.two_ranks


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(main_rank, "_logged", set())


def distributed(make_model=mlp, **options):
    return hvkit.distribute(make_model(), keras.optimizers.Adam(0.01), **options)


def on_rank(rank, function):
    if hvkit.rank() == rank:
        function()


def kind_raised_everywhere(function, *parts):
    """The kind of error, with these parts, that ``function`` raises on all ranks."""
    kind, text = error_of(function)
    assert kind in (hvkit.RanksDisagreeError, tf.errors.InvalidArgumentError), text
    assert hvkit.allgather(kind) == [kind] * hvkit.size()
    for part in parts:
        assert part in text
    return kind


@pytest.mark.parametrize(("loader", "loop"), cases(each_once([0, 1], list(LOOPS))))
def test_weights_loaded_on_one_rank_after_the_call_are_an_error_in_the_first_step(loader, loop):
    model, optimizer = distributed()
    on_rank(loader, lambda: model.set_weights(mlp(seed=7).get_weights()))
    before = weights(model)
    others = "ranks 1-2" if loader == 0 and hvkit.size() > 2 else "rank 1"
    kind = kind_raised_everywhere(
        lambda: LOOPS[loop](model, optimizer, local(regression(steps=3))),
        f"{model.layers[0].kernel.path} of {others} differs from that of rank 0 by about ",
        "load before the call, or on every rank, or with hvkit.Checkpoint",
    )
    assert kind is hvkit.RanksDisagreeError or loop == "function"
    assert identical(before, weights(model))


@pytest.mark.parametrize("loop", cases([graph_tape, eager_tape]))
def test_one_bit_is_seen_before_the_first_update(loop):
    model, optimizer = distributed()
    bias = model.layers[-1].bias
    flipped = (bias.numpy().view(np.int32) ^ np.int32([0, 0, 0, 1])).view(np.float32)
    on_rank(1, lambda: bias.assign(flipped))
    kind_raised_everywhere(
        lambda: loop(model, optimizer, local(regression(steps=1))), f"{bias.path} of rank"
    )


def test_frozen_weights_are_compared():
    model = mlp()
    model.layers[0].trainable = False
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
    kernel = model.layers[0].kernel
    on_rank(1, lambda: kernel.assign_add(tf.ones(kernel.shape)))
    kind_raised_everywhere(
        lambda: graph_tape(model, optimizer, local(regression(steps=1))),
        f"{kernel.path} of rank 1 differs",
    )


@MORE
@pytest.mark.parametrize("batch_norm", ["average", "local"])
def test_state_that_layers_keep_may_differ_between_ranks(batch_norm):
    layers = keras.layers
    inner = [layers.BatchNormalization(), layers.Dropout(0.1, seed=hvkit.rank()), layers.Dense(4)]
    model = keras.Sequential([keras.Input((8,)), *inner])
    model, optimizer = distributed(lambda: model, batch_norm=batch_norm, check_every=1)
    fit(model, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks([model.layers[-1].kernel.numpy()])


@pytest.mark.parametrize("loop", cases([graph_tape, eager_tape]))
def test_weights_changed_in_mid_training_are_an_error_within_check_every_steps(loop):
    model, optimizer = distributed(check_every=3)
    kernel = model.layers[0].kernel
    done = []

    def data():
        for step, batch in enumerate(local(regression(steps=9))):
            if step == 4:  # compared at steps 0 and 3
                on_rank(1, lambda: kernel.assign_add(tf.ones(kernel.shape)))
            yield batch
            done.append(step)

    kind_raised_everywhere(
        lambda: loop(model, optimizer, data()), f"{kernel.path} of rank 1 differs"
    )
    assert done == [0, 1, 2, 3, 4, 5]


@MORE
def test_weights_changed_inside_an_epoch_are_an_error_at_its_end():
    model, optimizer = distributed()
    kernel = model.layers[0].kernel
    ended = []

    class Change(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2:  # the next comparison inside is after four updates
                on_rank(1, lambda: kernel.assign_add(tf.ones(kernel.shape)))

        def on_epoch_end(self, epoch, logs=None):
            ended.append(epoch)

    model.compile(optimizer=optimizer, loss="mse")
    data = local(regression(steps=4))
    kind_raised_everywhere(
        lambda: refit(model, data, epochs=3, callbacks=[Change()]),
        f"{kernel.path} of rank 1 differs",
    )
    assert ended == [0]


@MORE
def test_an_optimizer_changed_on_one_rank_is_an_error_at_the_end_of_the_epoch():
    model, optimizer = distributed()
    fit(model, optimizer, local(regression(steps=2)))
    momentum = next(v for v in optimizer.variables if "momentum" in v.path)
    tiny = tf.fill(momentum.shape, 1e-30)  # without an effect on the weights
    on_rank(1, lambda: momentum.assign(tiny))
    optimizer.learning_rate = 0.0
    kind_raised_everywhere(
        lambda: refit(model, local(regression(steps=2))), "momentum of rank 1 differs"
    )


@MORE
def test_accumulation_is_compared_where_it_is_averaged():
    model = mlp()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model, optimizer = hvkit.distribute(model, optimizer, check_every=1)
    graph_tape(model, optimizer, local(regression(steps=4)))
    kernel = model.layers[0].kernel
    on_rank(1, lambda: kernel.assign_add(tf.ones(kernel.shape)))
    with pytest.raises((hvkit.RanksDisagreeError, tf.errors.InvalidArgumentError)):
        eager_tape(model, optimizer, local(regression(steps=2)))


def test_a_save_of_weights_that_differ_is_an_error_and_saves_nothing(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    eager_tape(model, optimizer, local(regression(steps=2)))
    kept = checkpoint.save(epoch=0, step=2)
    on_rank(1, lambda: model.set_weights(mlp(seed=7).get_weights()))
    kind_raised_everywhere(
        lambda: checkpoint.save(epoch=0, step=4),
        f"{model.layers[0].kernel.path} of model of rank",
    )
    assert hvkit.broadcast([each.name for each in folder.iterdir() if each.is_dir()]) == [kept.name]


def test_parts_of_a_distributed_model_are_compared_in_a_save(tmp_path):
    class Frame(keras.Model):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def train_step(self, data):
            x, y = data
            return {"loss": tape_step(self.net, self.optimizer, x, y)}

    folder = hvkit.broadcast(tmp_path)
    frame, optimizer = hvkit.distribute(Frame(), keras.optimizers.SGD(0.1))
    fit(frame, optimizer, local(regression(steps=2)))
    checkpoint = hvkit.Checkpoint(folder, net=frame.net, optimizer=optimizer)
    checkpoint.save(epoch=0, step=2)
    on_rank(1, lambda: frame.net.set_weights(mlp(seed=7).get_weights()))
    kind_raised_everywhere(
        lambda: checkpoint.save(epoch=0, step=3), f"{frame.net.layers[0].kernel.path} of net of"
    )


def test_models_that_were_not_distributed_may_differ_in_a_save(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    model, optimizer = distributed()
    eager_tape(model, optimizer, local(regression(steps=1)))
    own, its = mlp(seed=hvkit.rank()), keras.optimizers.Adam(0.01)
    eager_tape(own, its, local(regression(steps=1)))
    parts = {"model": model, "optimizer": optimizer, "own": own, "its": its}
    hvkit.Checkpoint(folder, **parts).save(epoch=0, step=1)


@MORE
def test_rounding_after_the_start_is_one_warning(capsys):
    model, optimizer = distributed(check_every=1)
    data = local(regression(steps=4))
    graph_tape(model, optimizer, data[:2])
    kernel = model.layers[0].kernel
    next_to = (kernel.numpy().view(np.int32) + 1).view(np.float32)
    on_rank(1, lambda: kernel.assign(next_to))
    graph_tape(model, optimizer, data[2:])
    fit(model, optimizer, data[2:])
    logged = capsys.readouterr().err
    assert logged.count(f"{kernel.path} of rank 1 differs") == (hvkit.rank() == 0)
    assert logged.count("rounding") == (hvkit.rank() == 0)


@pytest.mark.parametrize("loop", cases(["eager", "function"]))
def test_the_same_work_on_all_ranks_is_one_warning_with_both_causes(loop, capsys):
    data = [(x[:6], y[:6]) for x, y in regression(steps=2)]
    for _ in range(2):
        model, optimizer = distributed()
        LOOPS[loop](model, optimizer, data)
    logged = capsys.readouterr().err
    assert logged.count("all ranks computed the same gradients") == (hvkit.rank() == 0)
    if hvkit.rank() == 0:
        assert "hvkit.shard(data)" in logged
        assert "seed + hvkit.rank()" in logged


@MORE
def test_other_data_and_equal_data_in_later_steps_are_not_the_same_work(capsys):
    model, optimizer = distributed(check_every=1)
    data = regression(steps=2)
    graph_tape(model, optimizer, [*local(data[:1]), *((x[:6], y[:6]) for x, y in data[1:])])
    assert "same gradients" not in capsys.readouterr().err


@pytest.mark.parametrize("loop", cases([eager_tape, graph_tape]))
def test_without_check_every_weights_are_compared_in_updates_1_2_3_5_9(loop, monkeypatch):
    hashed, begun = [], []
    fingerprint = fingerprints.fingerprint
    monkeypatch.setattr(
        fingerprints,
        "fingerprint",
        lambda array: (hashed.append(len(begun)), fingerprint(array))[1],
    )
    model, optimizer = distributed()

    def data():
        for batch in local(regression(steps=12)):
            begun.append(batch)
            yield batch

    loop(model, optimizer, data())
    assert sorted(set(hashed)) == [1, 2, 3, 5, 9]


class OwnBatch(keras.optimizers.SGD):
    """Scales its update by something that it computes from the rank's own batch."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * (1 + hvkit.rank()), variable, learning_rate)


@pytest.mark.parametrize("loop", cases([eager_tape, graph_tape]))
def test_an_optimizer_that_uses_the_ranks_own_batch_is_an_error_after_its_first_step(loop):
    model, optimizer = hvkit.distribute(mlp(), OwnBatch(0.01))
    kind_raised_everywhere(
        lambda: loop(model, optimizer, local(regression(steps=2))), "kernel of rank"
    )
