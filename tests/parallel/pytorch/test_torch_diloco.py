"""PyTorch: DiLoCo, also with agreements that run beside training."""

import numpy as np
import pytest
import torch
from ranks import diloco_by_hand, largest_difference, shared_folder, wait_for
from torch import nn
from torch_nets import alike, arrays, in_rounds, local, mlp, regression, sgd, train

import hvkit
from hvkit.sync.distributed_objects import keepers_of


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_three_rounds_of_diloco_equal_a_numpy_script(overlap):
    data = regression(steps=12)
    start = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    model = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start))
    strategy = hvkit.DiLoCo(4, outer_lr=0.6, outer_momentum=0.8, overlap=overlap)
    hvkit.distribute(
        model, optimizer := torch.optim.SGD(model.parameters(), 0.05), strategy=strategy
    )
    train(model, optimizer, local(data))

    by_hand = [tuple(each.numpy() for each in batch) for batch in data]
    own, anchor, due = diloco_by_hand(start, by_hand, gradient, 0.05, strategy)
    assert largest_difference(arrays([model.weight]), [own[hvkit.rank()]]) < 1e-6
    assert largest_difference(due, [anchor] * hvkit.size()) < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(arrays([model.weight]), [anchor]) < 1e-6


def gradient(weights, inputs, targets):
    return 2 / targets.size * (inputs @ weights.T - targets).T @ inputs


def test_an_agreement_runs_beside_training(tmp_path_factory):
    """Rank 0 is two steps ahead when the others end their round."""
    ahead = shared_folder(tmp_path_factory) / "ahead"
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=3), model=model)
    data = local(regression(steps=8))
    if hvkit.rank() == 0:
        train(model, optimizer, data[:6])
        ahead.touch()
    else:
        train(model, optimizer, data[:3])
        wait_for(ahead)
        train(model, optimizer, data[3:6])
    train(model, optimizer, data[6:])
    with hvkit.settled(model):
        assert alike(model)


@pytest.mark.parametrize("compression", ["int8", hvkit.PowerSGD(4)])
def test_settled_beside_an_agreement_leaves_no_trace(compression):
    strategy = hvkit.DiLoCo(4, overlap=2)
    data = local(regression(steps=12))
    found = []
    for looks in (False, True):
        model, optimizer = in_rounds(strategy, compression=compression)
        for step, batch in enumerate(data):
            train(model, optimizer, [batch])
            if looks and step in (3, 4, 7):
                with hvkit.settled(model):
                    assert alike(model)
        found.append(arrays(model.parameters()))
    assert all(map(np.array_equal, *found))


@pytest.mark.parametrize("strategy", [hvkit.DiLoCo(4, overlap=2), hvkit.ElasticAveraging(4)])
def test_weights_that_the_script_writes_to_count_as_a_change(strategy):
    model, optimizer = in_rounds(strategy)
    for batch in local(regression(steps=12)):
        train(model, optimizer, [batch])
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
    with hvkit.settled(model):
        assert alike(model)
        assert all(p.abs().max() < 0.4 for p in model.parameters())


def test_an_agreement_waits_for_no_other_optimizers():
    model = mlp()
    both = [sgd(layer.parameters()) for layer in (model[0], model[2])]
    hvkit.distribute(model, both, strategy=hvkit.DiLoCo(4, overlap=2))
    data = local(regression(steps=12))
    (keeper,) = keepers_of(model)
    train(model, both[0], data[:4])
    train(model, both[1], data[:4])
    assert len(keeper._running) == 2
    train(model, both[1], data[4:6])
    assert len(keeper._running) == 1
    with hvkit.settled(model):
        assert alike(model)
