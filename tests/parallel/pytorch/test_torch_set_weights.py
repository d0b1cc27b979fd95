"""PyTorch: weights that the script sets between two rounds."""

import numpy as np
import pytest
import torch
from cases import cases
from ranks import shared_folder
from torch_nets import alike, arrays, local, mlp, raised_everywhere, regression, sgd, train

import hvkit
from hvkit.sync.distributed_objects import keepers_of


def after_one_round(strategy, freeze=False):
    """A model and its optimizer that have just agreed, and batches for the second round."""
    model = mlp()
    model[0].requires_grad_(not freeze)
    hvkit.distribute(model, optimizer := sgd(model.parameters()), strategy=strategy)
    data = local(regression(steps=4))
    train(model, optimizer, data[:2])
    return model, optimizer, data[2:]


@pytest.mark.parametrize("through_data", cases([True, False]))
def test_the_next_round_begins_there(through_data):
    model, optimizer, data = after_one_round(hvkit.DiLoCo(2, 1.0, 0.0))
    weight = model[0].weight.data if through_data else model[0].weight
    with torch.no_grad():
        weight.fill_(0.25)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, data)
    assert torch.equal(model[0].weight, torch.full((16, 8), 0.25))


@pytest.mark.parametrize(
    ("strategy", "freeze"),
    cases([(hvkit.DiLoCo(2), True), (hvkit.LocalSGD(2), False), (hvkit.DiLoCo(2), False)], 2),
)
def test_one_rank_alone_is_named(strategy, freeze):
    model, optimizer, data = after_one_round(strategy, freeze)
    if hvkit.rank() == 1:
        model[0].weight.data.fill_(0.25)
    train(model, optimizer, data[:1])
    parts = ["parameter 0.weight, set between two rounds, of rank 1 differs", "on every rank"]
    assert raised_everywhere(lambda: train(model, optimizer, data[1:]), *parts)


@pytest.mark.parametrize("steps", [0, 1])
def test_settled_finds_what_one_rank_has_set(steps):
    model, optimizer, data = after_one_round(hvkit.DiLoCo(2))
    if hvkit.rank() == 1:
        model[0].weight.data.fill_(0.25)
    train(model, optimizer, data[:steps])
    assert raised_everywhere(lambda: hvkit.settled(model).__enter__(), "0.weight, set between")


@pytest.mark.parametrize(
    ("strategy", "freeze"),
    cases([(hvkit.DiLoCo(2), False), (hvkit.DiLoCo(2), True), (hvkit.LocalSGD(2), False)], 2),
)
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
            own = arrays(model.parameters())
            torch.nn.utils.vector_to_parameters(
                torch.zeros(8 * 16 + 16 + 16 * 4 + 4), model.parameters()
            )
            for p, value in zip(model.parameters(), own, strict=True):
                p.data.copy_(torch.from_numpy(value))
        train(model, optimizer, data)
        found.append(arrays(model.parameters()))
    assert all(map(np.array_equal, *found))


def test_weights_of_16_bits_that_nobody_sets_keep_their_anchor():
    model = mlp().bfloat16()
    hvkit.distribute(model, optimizer := sgd(model.parameters()), strategy=hvkit.DiLoCo(2))
    data = [(x.bfloat16(), y.bfloat16()) for x, y in local(regression(steps=3))]
    train(model, optimizer, data)
    (keeper,) = keepers_of(model)
    assert not keeper._set_by_script
    anchor = keeper._state.anchor(0)
    assert not torch.equal(anchor, anchor.bfloat16().float())


def test_a_server_is_sent_what_all_ranks_set(tmp_path_factory):
    """What ``settled`` shows and a checkpoint holds before the next step, too."""
    model, optimizer, data = after_one_round(hvkit.ParameterServer(0))
    checkpoint = hvkit.Checkpoint(shared_folder(tmp_path_factory), model=model)
    model[0].weight.data.fill_(0.25)
    chosen = torch.full((16, 8), 0.25)
    optimizer.param_groups[0]["lr"] = 0.0
    with hvkit.settled(model):
        assert torch.allclose(model[0].weight, chosen)
    checkpoint.save(epoch=0, step=2)
    for goes_back in (False, True):
        if goes_back:
            model[0].weight.data.fill_(9.0)
            checkpoint.restore()
        train(model, optimizer, data)
        with hvkit.settled(model):
            assert torch.allclose(model[0].weight, chosen)
