"""Gradients in fewer bits on the wire."""

import numpy as np
import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch_nets import arrays, local, mlp, regression, train

import hvkit
from hvkit.communication.traffic import Sent


def gradient_of(mine, compression, dtype=torch.float32):
    """A parameter's gradient after the ranks have averaged these."""
    weight = nn.Parameter(torch.zeros(mine.shape, dtype=dtype))
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD([weight], lr=1.0)
    hvkit.distribute(model, optimizer, compression=compression)
    (weight * mine).sum().backward()
    return weight.grad


@pytest.mark.parametrize(("compression", "digits"), [("fp16", 11), ("bf16", 8)])
@pytest.mark.parametrize("length", [1, 7, 1001])
def test_means_are_right_to_the_bits_of_the_format_and_the_same_everywhere(
    compression, digits, length
):
    everyone = torch.randn(hvkit.size(), length, generator=torch.Generator().manual_seed(0))
    mean = gradient_of(everyone[hvkit.rank()], compression)
    # Half a unit in the last place for sending, and as much again for the means.
    bound = 2.0**-digits * (everyone.abs().mean(0) + everyone.mean(0).abs())
    assert ((mean - everyone.mean(0)).abs() <= bound).all()
    assert same_on_all_ranks([mean.numpy()])


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_the_sum_does_not_overflow(compression):
    mean = gradient_of(torch.full((3,), 60000.0), compression)
    assert mean.numpy() == pytest.approx(60000, rel=2**-7)


def test_bf16_keeps_the_range_of_float32():
    mean = gradient_of(torch.tensor([1e30, 1e-30]), "bf16")
    assert mean.numpy() == pytest.approx([1e30, 1e-30], rel=2**-7)


def test_double_precision_travels_as_it_is():
    value = torch.tensor([1 + 1e-12], dtype=torch.float64)
    mean = gradient_of(value, "fp16", dtype=torch.float64)
    assert mean.item() == pytest.approx(value.item(), rel=1e-15)


@pytest.mark.parametrize(
    ("compression", "share"), [("fp16", 1 / 2), ("bf16", 1 / 2), ("int8", 0.26)]
)
def test_a_part_of_the_bytes_is_sent(compression, share):
    assert sent_in_a_step(compression) / sent_in_a_step("none") == pytest.approx(share, abs=0.01)


def sent_in_a_step(compression):
    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, compression=compression)
    before = hvkit.traffic().get("gradients", Sent())
    model(torch.ones(2, 300)).sum().backward()
    return hvkit.traffic()["gradients"].bytes - before.bytes


def test_eight_bits_are_within_half_a_scale_twice():
    generator = torch.Generator().manual_seed(0)
    everyone = torch.randn(hvkit.size(), 1001, generator=generator)
    mean = gradient_of(everyone[hvkit.rank()], "int8")
    scale = everyone.abs().max() / 127
    assert (mean - everyone.mean(0)).abs().max() <= scale
    assert same_on_all_ranks([mean.numpy()])


@pytest.mark.parametrize(("compression", "bound"), [("bf16", 0.01), ("int8", 0.03)])
def test_training_comes_close_to_uncompressed_training(compression, bound):
    data = regression(steps=20)
    reference = mlp()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp(hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, lr_scaling="none", compression=compression)
    train(model, optimizer, local(data))
    assert (
        0 < largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < bound
    )
    assert same_on_all_ranks(arrays(model.parameters()))


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_rows_of_sparse_gradients_are_compressed_too(compression):
    table = nn.Embedding(50, 3, sparse=True)
    nn.init.constant_(table.weight, 1.0)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    hvkit.distribute(table, optimizer, compression=compression)
    table(torch.tensor([hvkit.rank(), 49])).square().sum().backward()
    assert table.weight.grad.is_sparse
    dense = table.weight.grad.to_dense().numpy()
    assert dense[0] == pytest.approx(np.full(3, 2 / hvkit.size()), rel=2**-7)
    assert dense[49] == pytest.approx(np.full(3, 2.0))


def test_autocast_and_compression_go_together():
    model = mlp(hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, compression="bf16")
    for x, y in local(regression(steps=3)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))
