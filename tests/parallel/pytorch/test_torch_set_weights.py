"""PyTorch: weights that the script sets between two rounds."""

import numpy as np
import pytest
import torch
from cases import cases
from nets import alike, arrays, local, mlp, raised_everywhere, regression, sgd, train

import hvkit


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


def test_settled_finds_what_one_rank_has_set():
    model, optimizer, data = after_one_round(hvkit.DiLoCo(2))
    if hvkit.rank() == 1:
        model[0].weight.data.fill_(0.25)
    train(model, optimizer, data[:1])
    assert raised_everywhere(lambda: hvkit.settled(model).__enter__(), "0.weight, set between")


@pytest.mark.parametrize("strategy", cases([hvkit.DiLoCo(2), hvkit.LocalSGD(2)]))
def test_ranks_that_round_differently_are_alike_after_the_next_round(strategy):
    model, optimizer, data = after_one_round(strategy)
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
