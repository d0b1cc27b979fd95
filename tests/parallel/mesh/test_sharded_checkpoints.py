"""PyTorch: checkpoints into which each rank of a mesh writes its own part."""

import functools
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import MORE, cases
from mesh_models import GPT
from mesh_training import (
    MESHES,
    adamw,
    assert_equal,
    data_for,
    difference,
    distributed,
    held_by_rank,
    tokens,
    train,
    whole_state,
)
from ranks import error_of
from torch.distributed.tensor import DTensor

import hvkit
from hvkit.checkpoint import saving, store
from hvkit.cli import main
from hvkit.frameworks.pytorch.model_parallel.slices import Slicing

make_gpt = functools.partial(GPT, layers=2, dropout=0.1)


def begin(folder, name, make=make_gpt, *, sharded=True):
    model, optimizer = distributed(make(), **MESHES[name])
    parts = {"model": model, "optimizer": optimizer}
    return model, optimizer, hvkit.Checkpoint(folder, **parts, sharded=sharded)


def states_of(model, optimizer):
    """The whole state of both on rank 0."""
    with hvkit.settled(model, optimizer):
        if hvkit.rank() == 0:
            return [model.state_dict(), optimizer.state_dict()]
    return []


def assert_same(found, expected):
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
        assert found.dtype == expected.dtype
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, each in expected.items():
            assert_same(found[key], each)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for mine, theirs in zip(found, expected, strict=True):
            assert_same(mine, theirs)
    else:
        assert found == expected


@pytest.mark.parametrize(
    ("earlier", "later", "trained_before"),
    cases(
        [
            ("GPipe", "tensor", 0),
            ("GPipe", "shard", 1),
            ("tensor", "GPipe", 1),
            ("tensor", "none", 0),
            ("shard", "1F1B", 0),
            ("shard", "tensor", 1),
        ],
        first=2,
    ),
)
def test_any_mesh_reads_what_another_has_written(earlier, later, trained_before, folder):
    model, optimizer, checkpoint = begin(folder, earlier)
    train(model, optimizer, data_for(earlier, tokens(2)))
    checkpoint.save(epoch=0, step=2)
    expected = states_of(model, optimizer)
    model, optimizer, checkpoint = begin(folder, later)
    x, y = data_for(later, tokens(1))[0]
    train(model, optimizer, [(x, y)] * trained_before)
    assert checkpoint.restore().step == 2
    with torch.no_grad():
        model.eval()(x)  # divides it
    assert_same(states_of(model, optimizer), expected)
    assert difference(whole_state(model), expected[0] if expected else {}) == 0.0


@pytest.mark.parametrize("mesh", cases(["GPipe", "tensor", "shard", "none"]))
def test_joined_files_are_those_of_a_checkpoint_that_is_not_sharded(mesh, folder, monkeypatch):
    monkeypatch.setattr(saving, "_LARGE", 1024)
    model, optimizer, sharded = begin(folder / "sharded", mesh, Net)
    train(model, optimizer, data_for(mesh, tokens(1)))
    sharded.save(epoch=0, step=1)
    parts = {"model": model, "optimizer": optimizer}
    expected = hvkit.Checkpoint(folder / "whole", **parts).save(epoch=0, step=1)
    found = folder / "joined" / expected.name
    if hvkit.rank() == 0:
        assert main(["join-checkpoint", str(folder / "sharded"), str(folder / "joined")]) == 0
        assert {f.name for f in found.parent.iterdir()} == {".lock", found.name}
        assert {f.name for f in found.iterdir()} == {f.name for f in expected.iterdir()}
        for name in ("model.pt", "optimizer.pt"):
            mine, theirs = torch.load(found / name), torch.load(expected / name)
            assert_same(mine, theirs)
            assert (found / name).stat().st_size < 1.1 * (expected / name).stat().st_size
        model_file = torch.load(found / "model.pt")
        assert model_file._metadata == torch.load(expected / "model.pt")._metadata
        assert model_file["wte.weight"].data_ptr() == model_file["lm_head.weight"].data_ptr()
        assert model_file["_extra_state"] == {"answer": 42}
        for name in (file.name for file in expected.glob("*.npz")):
            mine, theirs = np.load(found / name), np.load(expected / name)
            assert mine.files == theirs.files
            assert all(np.array_equal(mine[key], theirs[key]) for key in theirs.files)
    hvkit.allgather(0)
    states = states_of(model, optimizer)
    model, optimizer, checkpoint = begin(folder / "joined", mesh, Net, sharded=False)
    assert checkpoint.restore().step == 1
    with torch.no_grad():
        model(data_for(mesh, tokens(1))[0][0])  # divides it
    assert_same(states_of(model, optimizer), states)


class Net(GPT):
    """Tied weights, a buffer, and a state that is no tensor."""

    def __init__(self):
        super().__init__(layers=2, dropout=0.1)
        self.register_buffer("seen", torch.arange(5))

    def get_extra_state(self):
        return {"answer": 42}

    def set_extra_state(self, state):
        assert state == {"answer": 42}


def sent():
    return sum(each.bytes for each in hvkit.traffic().values())


@MORE
def test_no_rank_holds_more_than_its_part(folder, monkeypatch):
    model, optimizer, checkpoint = begin(folder, "tensor")
    train(model, optimizer, data_for("tensor", tokens(1)))

    def refuse(*args, **kwargs):
        raise AssertionError("a tensor is put together")

    monkeypatch.setattr(Slicing, "gather", refuse)
    monkeypatch.setattr(DTensor, "full_tensor", refuse)
    monkeypatch.setattr(dist, "send_object_list", refuse)
    monkeypatch.setattr(dist, "all_gather", refuse)
    before = sent()
    at = checkpoint.save(epoch=0, step=1)
    assert sent() - before < 10_000  # sums and names; the weights are 230,000 bytes
    mine = [at / f"{name}-of-rank-{hvkit.rank():05}.pt" for name in ("model", "optimizer")]
    own = held_by_rank(model, optimizer)
    assert sum(file.stat().st_size for file in mine) < 1.2 * sum(t.nbytes for t in own.values())
    assert not (at / "model.pt").exists()


@MORE
def test_a_rank_that_cannot_write_leaves_the_earlier_checkpoint(folder, monkeypatch):
    model, optimizer, checkpoint = begin(folder, "GPipe")
    data = data_for("GPipe", tokens(2))
    train(model, optimizer, data[:1])
    checkpoint.save(epoch=0, step=1)
    train(model, optimizer, data[1:])

    def full(self, *args, **kwargs):
        raise OSError(28, "No space left on device")

    last = hvkit.rank() == hvkit.size() - 1
    with monkeypatch.context() as patch:
        if last:
            patch.setattr("hvkit.checkpoint.saving.write_states", full)
        kind, text = error_of(lambda: checkpoint.save(epoch=0, step=2))
    assert issubclass(kind, OSError)
    assert "No space left" in text
    hvkit.allgather(0)  # until rank 0 has deleted what there was
    assert [each.name for each in folder.iterdir() if each.is_dir()] == ["step-000000001"]
    checkpoint.save(epoch=0, step=2)
    assert checkpoint.restore().step == 2


def test_a_kill_at_any_moment_leaves_the_earlier_checkpoint(folder, monkeypatch):
    model, optimizer, checkpoint = begin(folder / "run", "GPipe")
    train(model, optimizer, data_for("GPipe", tokens(1)))
    checkpoint.save(epoch=0, step=1)
    write = store.Manifest.write

    def leave_behind(*args):
        """Copy what a kill would leave behind, before there is a manifest and after it."""
        shutil.copytree(folder / "run", folder / "before")
        write(*args)
        shutil.copytree(folder / "run", folder / "after")

    monkeypatch.setattr(store.Manifest, "write", leave_behind)
    checkpoint.save(epoch=0, step=2)
    hvkit.allgather(0)
    for name in ("before", "after"):
        hidden = folder / name / ".saving-step-000000002"
        assert (hidden / "model-of-rank-00001.pt").exists()
        left = hvkit.Checkpoint(folder / name, model=model, optimizer=optimizer, sharded=True)
        assert left.restore().step == 1
    assert checkpoint.restore().step == 2


@MORE
def test_ranks_that_do_not_agree_about_it_are_told(folder):
    model, _, _ = begin(folder, "GPipe")
    checkpoint = hvkit.Checkpoint(folder, model=model, sharded=hvkit.rank() == 1)
    kind, text = error_of(functools.partial(checkpoint.save, epoch=0, step=1))
    assert kind is hvkit.RanksDisagreeError
    assert "sharded=True on rank 1, but sharded=False on rank 0" in text


@MORE
@pytest.mark.parametrize("sharded", [True, False])
def test_a_model_that_no_rank_holds_reads_its_part(sharded, folder):
    model, optimizer, checkpoint = begin(folder, "GPipe", sharded=sharded)
    data = data_for("GPipe", tokens(4))
    train(model, optimizer, data[:2])
    at = checkpoint.save(epoch=0, step=2)
    train(model, optimizer, data[2:])
    undisturbed = held_by_rank(model, optimizer)
    assert not sharded or len(store.read(at).parts["model"]["shares"]) == 2

    def make():
        with hvkit.deferred_init():
            return make_gpt()

    model, optimizer, checkpoint = begin(folder, "GPipe", make, sharded=sharded)
    assert checkpoint.restore().step == 2
    assert all(p.is_meta for p in model.parameters()) or not sharded
    train(model, optimizer, data[2:])
    assert_equal(held_by_rank(model, optimizer), undisturbed)


@MORE
def test_a_model_without_weights_is_not_saved(folder):
    with hvkit.deferred_init():
        model = make_gpt()
    model, _ = distributed(model)
    for sharded in (True, False):
        checkpoint = hvkit.Checkpoint(folder, model=model, sharded=sharded)
        _, text = error_of(functools.partial(checkpoint.save, epoch=0, step=0))
        assert "no weights before its first batch" in text


@MORE
def test_a_strategy_that_has_parts_of_its_own_is_refused(folder):
    model = torch.nn.Linear(2, 2)
    hvkit.distribute(model, adamw(model), strategy=hvkit.FullyShard())
    with pytest.raises(ValueError, match=r"use mesh=hvkit.Mesh\(shard=...\)"):
        hvkit.Checkpoint(folder, model=model, sharded=True)
