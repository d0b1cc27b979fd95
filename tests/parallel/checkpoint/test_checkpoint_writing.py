"""Rank 0 writes: in a thread while training continues, and with the states of all ranks."""

import hashlib
import os
import threading

import keras
import numpy as np
import pytest
import torch
from ranks import error_of, identical, shared_folder

import hvkit
from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.transport import engines, mailbox
from hvkit.transport.mailbox import MpiMailbox


def torch_parts():
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    hvkit.distribute(model, optimizer)
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def keras_parts():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    optimizer = keras.optimizers.Adam()
    hvkit.distribute(model, optimizer)
    model.compile(optimizer, "mse")
    x = np.ones((6, 8), np.float32)
    model.fit(x, x[:, :4], verbose=0)
    return {"model": model, "optimizer": optimizer}


@pytest.fixture
def folders(tmp_path_factory):
    return shared_folder(tmp_path_factory), shared_folder(tmp_path_factory)


@pytest.fixture
def gate(monkeypatch):
    """Lets the thread write once it is set."""
    gate = threading.Event()
    new_folder = store.new_folder

    def new_folder_later(*args):
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        return new_folder(*args)

    monkeypatch.setattr(store, "new_folder", new_folder_later)
    yield gate
    gate.set()


@pytest.mark.two_ranks
@pytest.mark.parametrize("parts", [torch_parts, keras_parts])
def test_the_files_are_those_of_the_moment_of_the_save(parts, folders, gate):
    things = parts()
    plain = hvkit.Checkpoint(folders[0], **things).save(epoch=1, step=1)
    checkpoint = hvkit.Checkpoint(folders[1], background=True, **things)
    path = checkpoint.save(epoch=1, step=1)
    assert not path.exists()
    for weight in things["model"].parameters() if parts is torch_parts else ():
        weight.data += 1
    if parts is keras_parts:
        things["model"].set_weights([w + 1 for w in things["model"].get_weights()])
    gate.set()
    checkpoint.wait()
    if hvkit.rank() == 0:
        names = sorted(file.name for file in plain.iterdir())
        assert sorted(file.name for file in path.iterdir()) == names
        if parts is torch_parts:
            for name in set(names) - {store.MANIFEST, "ranks.npz"}:
                digests = [hashlib.sha256((f / name).read_bytes()) for f in (plain, path)]
                assert digests[0].digest() == digests[1].digest(), name
    assert checkpoint.restore().step == 1
    if parts is torch_parts:
        fresh = torch.load(plain / "model.pt", weights_only=True)
        assert identical(things["model"].state_dict().values(), fresh.values())


@pytest.mark.two_ranks
def test_the_next_save_waits_and_memory_is_freed(folders, gate):
    files = len(os.listdir("/proc/self/fd"))
    checkpoint = hvkit.Checkpoint(folders[0], background=True, keep=1, **torch_parts())
    checkpoint.save(epoch=1, step=1)
    gate.set()
    path = checkpoint.save(epoch=1, step=2)
    checkpoint.wait()
    found = sorted(each.name for each in folders[0].iterdir() if not each.name.startswith("."))
    assert found == [path.name]
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # that of the lock


@pytest.mark.two_ranks
def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(folders, monkeypatch, capsys):
    checkpoint = hvkit.Checkpoint(folders[0], background=True, **torch_parts())
    checkpoint.save(epoch=1, step=1)
    checkpoint.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "new_folder", full)
    checkpoint.save(epoch=1, step=2)
    error, text = error_of(lambda: checkpoint.save(epoch=1, step=3))
    assert error is OSError
    assert "cannot write the checkpoint: No space left on device" in text
    assert "step-000000002" in text
    monkeypatch.undo()
    checkpoint.save(epoch=1, step=4)
    checkpoint.wait()
    assert checkpoint.restore().step == 4


WIDTH = 50_000
STATISTICS = 4 * WIDTH


def pytorch_statistics():
    model = torch.nn.BatchNorm1d(WIDTH)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1), batch_norm="local")
    model.running_mean.fill_(hvkit.rank())
    return model, lambda: model.running_mean.numpy()


def keras_statistics():
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.BatchNormalization()])
    hvkit.distribute(model, keras.optimizers.SGD(0.1), batch_norm="local")
    layer = model.layers[0]
    layer.moving_mean.assign(np.full(WIDTH, hvkit.rank(), np.float32))
    return model, lambda: layer.moving_mean.numpy()


@pytest.mark.parametrize("make", [pytorch_statistics, keras_statistics])
@pytest.mark.parametrize("by_mpi", [True, False])
def test_the_ranks_states_reach_rank_0_alone_in_pieces(folder, monkeypatch, make, by_mpi):
    model, statistics = make()
    checkpoint = hvkit.Checkpoint(folder, model=model)
    engine, gathered, pieces = runtime.any_engine(), [], []
    allgather, broadcast, receive = engine.allgather, engine.broadcast, MpiMailbox.receive

    def recorded(into, call, of):
        def recorded_call(*arguments):
            result = call(*arguments)
            into.append(of(arguments, result))
            return result

        return recorded_call

    def size(arguments, result):
        return result.size

    for limit in "CHUNK", "PIECE":
        monkeypatch.setattr(engines, limit, 50_000)
    monkeypatch.setattr(engine, "allgather", recorded(gathered, allgather, size))
    monkeypatch.setattr(engine, "broadcast", recorded(pieces, broadcast, size))
    monkeypatch.setattr(MpiMailbox, "receive", recorded(pieces, receive, lambda a, _: a[1].size))
    if not by_mpi:
        monkeypatch.setattr(mailbox, "can_send", lambda engine: False)
    checkpoint.save(epoch=0, step=1)
    monkeypatch.undo()

    assert sum(gathered) < STATISTICS / 10
    assert max(pieces) <= 50_000
    if by_mpi and hvkit.rank() > 0:
        assert sum(pieces) < STATISTICS / 10
    else:
        assert sum(pieces) > STATISTICS * (hvkit.size() - 1)

    model, statistics = make()
    hvkit.Checkpoint(folder, model=model).restore()
    assert statistics().tolist() == [hvkit.rank()] * WIDTH
