"""All ranks start from rank 0's state, and objects stay plain PyTorch."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from ranks import same_on_all_ranks
from torch import nn
from torch_nets import arrays, distributed, local, mlp, regression, train, weights

import hvkit


def test_weights_and_buffers_start_as_rank_0_has_them_bit_for_bit():
    torch.manual_seed(hvkit.rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, dtype=torch.bfloat16))
    model[0].weight.data[0, 0] = float("nan")
    model[1].running_mean.fill_(hvkit.rank())
    model[1].num_batches_tracked.fill_(5 + hvkit.rank())
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    rank_0 = hvkit.broadcast({k: v.clone() for k, v in model.state_dict().items()})
    distributed(model=model)
    for name, value in model.state_dict().items():
        ours, theirs = (t.reshape(-1).view(torch.uint8) for t in (value, rank_0[name]))
        assert torch.equal(ours, theirs), name


def test_sparse_and_expanded_buffers_start_as_rank_0_has_them():
    model = mlp()
    rank = float(hvkit.rank())
    model.register_buffer("edges", torch.eye(3).mul(rank + 1).to_sparse())
    model.register_buffer("mask", torch.full((1, 4), rank).expand(4, 4))
    model.register_buffer("last", torch.full((1,), rank).expand(4))
    model.register_buffer("all", torch.full((), rank).expand(2, 3))
    model.register_buffer("one_of_many", torch.full((4,), rank)[::4])
    model.register_buffer("conjugate", torch.full((2,), rank * 1j).conj())
    distributed(model=model)
    hvkit.average_buffers(model)
    assert torch.equal(model.edges.to_dense(), torch.eye(3))
    assert not any(each.any() for each in model.buffers() if not each.is_sparse)


@pytest.mark.parametrize("loaded_by", ["all ranks", "rank 0 alone"])
def test_optimizer_state_survives_and_is_the_same_everywhere(loaded_by):
    saved = mlp()
    saved_optimizer = torch.optim.AdamW(saved.parameters(), lr=0.02, betas=(0.8, 0.9))
    train(saved, saved_optimizer, regression(steps=3))
    state = copy.deepcopy(saved_optimizer.state_dict())

    model = mlp(seed=hvkit.rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    if loaded_by == "all ranks" or hvkit.rank() == 0:
        model.load_state_dict(saved.state_dict())
        optimizer.load_state_dict(state)
    hvkit.distribute(model, optimizer)
    ours = optimizer.state_dict()
    assert ours["param_groups"][0]["betas"] == (0.8, 0.9)
    assert ours["param_groups"][0]["lr"] == 0.02
    for number, values in state["state"].items():
        for key, value in values.items():
            assert torch.equal(ours["state"][number][key], value), (number, key)
    train(model, optimizer, local(regression(steps=2)))
    moments = [v for s in optimizer.state.values() for v in s.values()]
    assert same_on_all_ranks([*weights(model), *arrays(moments)])


def test_a_rate_that_was_computed_with_numpy_is_the_same_everywhere():
    rate = np.float32(0.1 / (1 + hvkit.rank()))
    model, optimizer = distributed(lambda p: torch.optim.AdamW(p, lr=rate))
    rate = optimizer.param_groups[0]["lr"]
    assert (type(rate), rate) == (np.float32, np.float32(0.1))
    train(model, optimizer, local(regression(steps=2)))
    assert same_on_all_ranks(weights(model))


def test_objects_are_those_passed_in_and_can_still_be_copied_and_pickled():
    model = mlp()
    optimizers = [torch.optim.Adam(model.parameters())]
    returned = hvkit.distribute(model, optimizers)
    assert returned[0] is model
    assert returned[1] is optimizers
    assert type(model) is nn.Sequential
    train(model, optimizers[0], local(regression(steps=1)))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.ones(1, 8)).sum().backward()  # not averaged: a plain model of its own
        assert type(twin) is nn.Sequential
    for optimizer in (optimizers[0], pickle.loads(pickle.dumps(optimizers[0]))):
        assert type(optimizer) is torch.optim.Adam


LOADS_PLAINLY = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("hvkit", "horovod"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import torch
checkpoint = torch.load(sys.argv[1], weights_only=True)
whole = torch.load(sys.argv[2], weights_only=False)
normalise = torch.nn.BatchNorm1d(4)
layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4), normalise
model = torch.nn.Sequential(*layers).eval()
model.load_state_dict(checkpoint["model"])
optimizer = torch.optim.Adam(model.parameters())
optimizer.load_state_dict(checkpoint["optimizer"])
same = model(torch.ones(1, 8)).tolist() == whole.eval()(torch.ones(1, 8)).tolist()
whole.train()(torch.ones(4, 8))
print(same, type(whole[3]).__name__)
"""


@pytest.mark.two_ranks
def test_saved_files_load_without_hvkit_and_horovod(tmp_path):
    """Also of layers that hvkit synchronises while it trains them."""
    model = nn.Sequential(*mlp(), nn.BatchNorm1d(4))
    model, optimizer = distributed(torch.optim.Adam, model, batch_norm="sync")
    train(model, optimizer, local(regression(steps=2)))
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "a.pt")
    torch.save(model, tmp_path / "whole.pt")
    if hvkit.rank() == 0:
        command = [sys.executable, "-c", LOADS_PLAINLY, tmp_path / "a.pt", tmp_path / "whole.pt"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.stdout == "True BatchNorm1d\n", done.stderr


def test_lazy_modules_are_refused_with_the_fix():
    with pytest.raises(ValueError, match="run one batch through the model"):
        distributed(model=nn.LazyLinear(4))
