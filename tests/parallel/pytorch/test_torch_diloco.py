"""PyTorch: agreements that run beside training, and weights that the script sets between two."""

import numpy as np
import pytest
import torch
from cases import cases
from ranks import diloco_by_hand, identical, largest_difference, shared_folder, wait_for
from torch import nn
from torch_nets import (
    alike,
    in_rounds,
    local,
    mlp,
    raised_everywhere,
    regression,
    sgd,
    train,
    weights,
)

import hvkit
from hvkit.sync.port import syncs_of


@pytest.mark.parametrize("overlap", [0, 1, 3])
def test_three_rounds_of_diloco_equal_a_numpy_script(overlap):
    data = regression(steps=12)
    start = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    model = nn.Linear(8, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start))
    strategy = hvkit.DiLoCo(4, outer_lr=0.6, outer_momentum=0.8, overlap=overlap)
    model, optimizer = in_rounds(strategy, lambda p: torch.optim.SGD(p, 0.05), model)
    train(model, optimizer, local(data))

    by_hand = [tuple(each.numpy() for each in batch) for batch in data]
    own, anchor, due = diloco_by_hand(start, by_hand, gradient, 0.05, strategy)
    assert largest_difference(weights(model), [own[hvkit.rank()]]) < 1e-6
    assert largest_difference(due, [anchor] * hvkit.size()) < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(weights(model), [anchor]) < 1e-6


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
    found = []
    for looks in (False, True):
        model, optimizer = in_rounds(hvkit.DiLoCo(4, overlap=2), compression=compression)
        for step, batch in enumerate(local(regression(steps=12))):
            train(model, optimizer, [batch])
            if looks and step in (3, 4, 7):
                with hvkit.settled(model):
                    assert alike(model)
        found.append(weights(model))
    assert identical(*found)


def test_an_agreement_waits_for_no_other_optimizers():
    model = mlp()
    both = [sgd(layer.parameters()) for layer in (model[0], model[2])]
    hvkit.distribute(model, both, strategy=hvkit.DiLoCo(4, overlap=2))
    data = local(regression(steps=6))
    (sync,) = syncs_of(model)
    train(model, both[0], data[:4])
    train(model, both[1], data[:4])
    assert len(sync._overlapping_rounds) == 2
    train(model, both[1], data[4:6])
    assert len(sync._overlapping_rounds) == 1
    with hvkit.settled(model):
        assert alike(model)


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


def after_one_round(strategy, freeze=False):
    """A model and its optimizer that have just agreed, and batches for the second round."""
    model = mlp()
    model[0].requires_grad_(not freeze)
    model, optimizer = in_rounds(strategy, model=model)
    data = local(regression(steps=4))
    train(model, optimizer, data[:2])
    return model, optimizer, data[2:]


def set_weight(model, only_on_rank=None):
    if only_on_rank in (None, hvkit.rank()):
        model[0].weight.data.fill_(0.25)


CHOSEN = torch.full((16, 8), 0.25)
KINDS = [(hvkit.DiLoCo(2), True), (hvkit.LocalSGD(2), False), (hvkit.DiLoCo(2), False)]


def test_the_next_round_begins_where_all_ranks_set_it():
    model, optimizer, data = after_one_round(hvkit.DiLoCo(2, 1.0, 0.0))
    set_weight(model)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, data)
    assert torch.equal(model[0].weight, CHOSEN)


@pytest.mark.parametrize(("strategy", "freeze"), cases(KINDS, 2))
def test_one_rank_alone_is_named(strategy, freeze):
    model, optimizer, data = after_one_round(strategy, freeze)
    set_weight(model, only_on_rank=1)
    train(model, optimizer, data[:1])
    parts = ["parameter 0.weight, set between two rounds, of rank 1 differs", "on every rank"]
    assert raised_everywhere(lambda: train(model, optimizer, data[1:]), *parts)


@pytest.mark.parametrize("steps", [0, 1])
def test_settled_finds_what_one_rank_has_set(steps):
    model, optimizer, data = after_one_round(hvkit.DiLoCo(2))
    set_weight(model, only_on_rank=1)
    train(model, optimizer, data[:steps])
    assert raised_everywhere(lambda: hvkit.settled(model).__enter__(), "0.weight, set between")


@pytest.mark.parametrize(("strategy", "freeze"), cases(KINDS, 2))
def test_ranks_that_round_differently_are_alike_after_the_next_round(strategy, freeze):
    model, optimizer, data = after_one_round(strategy, freeze)
    for p in model.parameters():
        p.data.mul_(1 + 1e-6 * hvkit.rank())
    assert not alike(model)
    train(model, optimizer, data)
    assert alike(model)


def test_rank_0_may_look_at_other_weights_for_a_while():
    found = []
    for looks in (False, True):
        model, optimizer, data = after_one_round(hvkit.DiLoCo(2))
        if looks and hvkit.rank() == 0:
            own = [p.detach().clone() for p in model.parameters()]
            for p, value in zip(model.parameters(), own, strict=True):
                p.data.zero_()
                p.data.copy_(value)
        train(model, optimizer, data)
        found.append(weights(model))
    assert identical(*found)


def test_weights_of_16_bits_that_nobody_sets_keep_their_anchor():
    model, optimizer = in_rounds(hvkit.DiLoCo(2), model=mlp().bfloat16())
    data = [(x.bfloat16(), y.bfloat16()) for x, y in local(regression(steps=3))]
    train(model, optimizer, data)
    (sync,) = syncs_of(model)
    assert not sync._set_by_script
    anchor = sync._agreements.anchor(0)
    assert not torch.equal(anchor, anchor.bfloat16().float())


def test_a_server_is_sent_what_all_ranks_set(tmp_path_factory):
    """What ``settled`` shows and a checkpoint holds before the next step, too."""
    model, optimizer, data = after_one_round(hvkit.ParameterServer(0))
    checkpoint = hvkit.Checkpoint(shared_folder(tmp_path_factory), model=model)
    set_weight(model)
    optimizer.param_groups[0]["lr"] = 0.0
    with hvkit.settled(model):
        assert torch.allclose(model[0].weight, CHOSEN)
    checkpoint.save(epoch=0, step=2)
    for goes_back in (False, True):
        if goes_back:
            model[0].weight.data.fill_(9.0)
            checkpoint.restore()
        train(model, optimizer, data)
        with hvkit.settled(model):
            assert torch.allclose(model[0].weight, CHOSEN)
