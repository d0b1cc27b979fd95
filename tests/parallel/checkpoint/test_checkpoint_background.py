"""Checkpoints that a thread writes while training goes on."""

import hashlib
import os
import threading

import keras
import numpy as np
import pytest
import torch
from ranks import error_of, shared_folder

import hvkit
from hvkit.checkpoint import manifests, store

pytestmark = pytest.mark.two_ranks


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
    write = store.write_folder

    def write_later(*args):
        if threading.current_thread() is not threading.main_thread():
            gate.wait(60)
        write(*args)

    monkeypatch.setattr(store, "write_folder", write_later)
    yield gate
    gate.set()


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
            for name in set(names) - {manifests.MANIFEST, "ranks.npz"}:
                digests = [hashlib.sha256((f / name).read_bytes()) for f in (plain, path)]
                assert digests[0].digest() == digests[1].digest(), name
    assert checkpoint.restore().step == 1
    if parts is torch_parts:
        fresh = torch.load(plain / "model.pt", weights_only=True)
        assert all(map(torch.equal, things["model"].state_dict().values(), fresh.values()))


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


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(folders, monkeypatch, capsys):
    checkpoint = hvkit.Checkpoint(folders[0], background=True, **torch_parts())
    checkpoint.save(epoch=1, step=1)
    checkpoint.wait()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "write_folder", full)
    checkpoint.save(epoch=1, step=2)
    error, text = error_of(lambda: checkpoint.save(epoch=1, step=3))
    assert error is OSError
    assert "cannot write the checkpoint: No space left on device" in text
    assert "step-000000002" in text
    monkeypatch.undo()
    checkpoint.save(epoch=1, step=4)
    checkpoint.wait()
    assert checkpoint.restore().step == 4
