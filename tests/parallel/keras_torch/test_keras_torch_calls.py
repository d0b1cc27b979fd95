"""Checkpoints, monitors, and the calls on data and tensors."""

import shutil

import keras
import numpy as np
import pytest
import torch
from cases import cases
from keras import layers
from keras_models import (
    eager_tape,
    gradients_of,
    joined,
    local,
    mlp,
    mse,
    refit,
    regression,
    seeded,
    unbuilt,
    values,
    weights,
)
from monitored import Monitored
from ranks import identical, same_on_all_ranks, shared_folder

import hvkit

STRATEGIES = {
    "top k": {"compression": hvkit.TopK(0.5)},
    "sharded": {"strategy": hvkit.ShardedOptimizer()},
    "diloco": {"strategy": hvkit.DiLoCo(every=3)},
}


def with_dropout(seed=0):
    seeded(seed)
    inner = [layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.2)]
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(4)])


def made(make=with_dropout, optimizer=None, **options):
    model, optimizer = hvkit.distribute(make(), optimizer or keras.optimizers.Adam(0.01), **options)
    if not model.built:
        model.build((None, 8))
    return model, optimizer


def state(model, optimizer):
    return values([*model.variables, *optimizer.variables])


@pytest.mark.parametrize(
    ("name", "make"),
    cases(
        [("top k", with_dropout), ("diloco", unbuilt), ("sharded", with_dropout), ("diloco", mlp)],
        2,
    ),
)
def test_a_resumed_loop_ends_with_the_same_bits(name, make, tmp_path_factory):
    """Also where the model is built after ``hvkit.distribute``, and in the middle of a round."""
    folder, data = shared_folder(tmp_path_factory), local(regression(steps=8))
    model, optimizer = made(make, **STRATEGIES[name])
    eager_tape(model, optimizer, data[:4])
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=0, step=4)
    eager_tape(model, optimizer, data[4:])
    seeded(1 + hvkit.rank())
    resumed, its_optimizer = made(lambda: make(1 + hvkit.rank()), **STRATEGIES[name])
    assert hvkit.Checkpoint(folder, model=resumed, optimizer=its_optimizer).restore().step == 4
    eager_tape(resumed, its_optimizer, data[4:])
    assert identical(state(resumed, its_optimizer), state(model, optimizer))


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_a_fit_resumed_in_the_middle_of_an_epoch_ends_with_the_same_bits(shuffle, tmp_path_factory):
    folder, data = shared_folder(tmp_path_factory), local(regression(steps=6))

    def trained(resumed_at):
        model, optimizer = made()
        checkpoint = hvkit.Checkpoint(folder, keep=None, model=model, optimizer=optimizer)
        begun = checkpoint.restore()
        assert begun.step == resumed_at
        model.compile(optimizer, "mse")
        options = {"epochs": 3, "initial_epoch": begun.epoch, "shuffle": shuffle}
        refit(model, data, callbacks=[checkpoint.callback(every=4)], **options)
        return state(model, optimizer)

    whole = trained(resumed_at=0)
    if hvkit.is_main():  # as after a kill in the second epoch
        for each in folder.glob("step-*"):
            if int(each.name.removeprefix("step-")) > 8:
                shutil.rmtree(each)
    hvkit.allgather(None)
    assert identical(trained(resumed_at=8), whole)


def test_a_checkpoint_holds_what_the_next_epoch_begins_with(tmp_path_factory):
    """Averages are in the model until then, and the rate falls after the callback's own turn."""
    folder, data = shared_folder(tmp_path_factory), local(regression(steps=4))

    def trained(epochs, name):
        model = mlp(hvkit.rank())
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
        hvkit.distribute(model, optimizer)
        rate = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0)
        checkpoint = hvkit.Checkpoint(folder / name, model=model, optimizer=optimizer, rate=rate)
        begun = checkpoint.restore()
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        callbacks = [swap, checkpoint.callback(), rate]
        model.compile(optimizer, "mse")
        refit(model, data, epochs=epochs, initial_epoch=begun.epoch, callbacks=callbacks)
        return state(model, optimizer)

    whole = trained(4, "whole")
    trained(2, "stopped")
    assert identical(trained(4, "stopped"), whole)


def test_the_state_of_a_sharded_optimizer_is_divided():
    model, optimizer = made(strategy=hvkit.ShardedOptimizer())
    eager_tape(model, optimizer, local(regression(steps=2)))

    def held(things):
        return sum(each.nbytes for each in values(things))

    own = held(optimizer.variables)
    # Adam keeps two numbers of each weight.
    assert sum(hvkit.allgather(own)) < 1.5 * 2 * held(model.trainable_variables)
    with hvkit.settled(model, optimizer):
        assert not hvkit.is_main() or held(optimizer.variables) > 1.5 * own


def test_a_monitor_records_fit(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    with hvkit.Monitor(folder, every=2) as monitor:
        model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05), monitor=monitor)
        model.compile(optimizer, "mse")
        found = refit(model, local(regression(steps=4)), epochs=2).history
    if hvkit.is_main():
        run = Monitored.read(folder)
        assert [each["step"] for each in run.records] == [2, 4, 6, 8]
        assert all(each["gradient_norm"] > 0 for each in run.records)
        assert all(each["learning_rate"] == pytest.approx(0.05) for each in run.records)
        # The mean over the steps of a record, not Keras's over the epoch so far.
        means = [each["loss"] for each in run.records[:2]]
        assert np.mean(means) == pytest.approx(found["loss"][0], rel=1e-5)


def test_average_buffers_reaches_the_variables_of_layers():
    layer = layers.BatchNormalization()
    layer.build((None, 3))
    layer.moving_mean.assign([float(hvkit.rank())] * 3)
    hvkit.average_buffers(layer)
    assert layer.moving_mean.numpy() == pytest.approx((hvkit.size() - 1) / 2)


def test_noise_that_each_rank_draws_is_averaged():
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05))
    x, y = local(regression(steps=1))[0]
    own = model.trainable_variables
    _, gradients = gradients_of(lambda: mse(y, model(x)), own)
    for gradient in gradients:
        gradient.add_(float(hvkit.rank()))
    hvkit.reduce_gradients(model)
    optimizer.apply(gradients, own)
    assert same_on_all_ranks(weights(model))


def test_gradients_flow_through_allgather():
    mine = torch.ones(2, requires_grad=True)
    everyone = torch.cat(hvkit.allgather(mine))
    (everyone * torch.arange(len(everyone))).sum().backward()
    start = 2.0 * hvkit.rank()
    assert mine.grad.tolist() == [hvkit.size() * start, hvkit.size() * (start + 1)]


class Squares(keras.utils.PyDataset):
    def __len__(self):
        return 7

    def __getitem__(self, index):
        x = np.full((4, 8), index, "float32")
        return x, x[:, :4] ** 2 / 10


@pytest.mark.parametrize("kind", ["arrays", "loader", "dataset"])
def test_fit_takes_sharded_data(kind):
    x, y = joined(regression(steps=4))
    tensors = torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    model, optimizer = hvkit.distribute(mlp(hvkit.rank()), keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse")
    if kind == "arrays":
        data = hvkit.shard((x, y))
    elif kind == "loader":
        data = [hvkit.shard(torch.utils.data.DataLoader(tensors, 6, shuffle=True))]
    else:
        data = [hvkit.shard(Squares())]
    batch_size = 6 if kind == "arrays" else None
    model.fit(*data, batch_size=batch_size, epochs=2, verbose=0)
    assert same_on_all_ranks(weights(model))
    steps = -(-len(Squares()) // hvkit.size()) if kind == "dataset" else 4
    assert int(optimizer.iterations) == 2 * steps
