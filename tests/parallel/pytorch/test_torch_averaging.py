"""PyTorch: strategies that average gradients in every step."""

import pytest
import torch
from nets import arrays, local, mlp, regression, train
from ranks import largest_difference, same_on_all_ranks
from torch import nn

import hvkit
from hvkit.traffic import Sent


def trained(strategy, make=torch.optim.SGD, dtype=torch.float32, steps=20, **options):
    model = mlp(seed=hvkit.rank()).to(dtype)
    optimizer = make(model.parameters(), 0.05)
    hvkit.distribute(model, optimizer, strategy=strategy, **options)
    train(model, optimizer, [(x.to(dtype), y.to(dtype)) for x, y in local(regression(steps))])
    return model


def sent_in_a_step(strategy, **options):
    """Bytes of gradients that each rank sends, in rank order, and the parameters' bytes."""
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, strategy=strategy, **options)
    before = hvkit.traffic().get("gradients", Sent())
    model(torch.ones(2, 300)).sum().backward()
    mine = hvkit.traffic()["gradients"].bytes - before.bytes
    return hvkit.allgather(mine), sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_rank_that_averages_for_all_gives_the_weights_of_a_ring(dtype):
    ring = arrays(trained(hvkit.Synchronous(), dtype=dtype).parameters())
    found = arrays(trained(hvkit.Centralized(), dtype=dtype).parameters())
    assert largest_difference(found, ring) < 2e-6
    assert same_on_all_ranks(found)


def test_the_rank_that_averages_for_all_sends_to_all():
    sent, size = sent_in_a_step(hvkit.Centralized())
    # The report of each step is small, and goes around the ring.
    first, *others = sent
    assert first == pytest.approx((hvkit.size() - 1) * size, rel=0.03)
    assert others == pytest.approx([size] * len(others), rel=0.03)
    rounded, _ = sent_in_a_step(hvkit.Centralized(), compression="int8")
    assert rounded[0] == pytest.approx(first * 260 / 1024, rel=0.03)
