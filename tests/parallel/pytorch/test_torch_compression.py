"""Gradients in 16 bits on the wire."""

import numpy as np
import pytest
import torch
from nets import arrays, local, mlp, regression, train
from ranks import largest_difference, same_on_all_ranks
from torch import nn

import hvkit


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


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_half_the_bytes_are_sent(compression, monkeypatch):
    sent = {"none": count_bytes("none", monkeypatch), "16": count_bytes(compression, monkeypatch)}
    assert sent["16"] / sent["none"] == pytest.approx(0.5, abs=0.01)


def count_bytes(compression, monkeypatch):
    """Bytes that a rank sends in one step, if its collectives run as rings."""
    import horovod.torch as hvd

    n = hvkit.size()
    total = []

    def counting(patched, name, share):
        function = getattr(hvd, name)

        def counted(tensor, *args, **kwargs):
            total.append(tensor.numel() * tensor.element_size() * share)
            return function(tensor, *args, **kwargs)

        patched.setattr(hvd, name, counted)

    model = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, compression=compression)
    with monkeypatch.context() as patched:
        counting(patched, "allreduce_async_", 2 * (n - 1) / n)
        counting(patched, "alltoall_async", (n - 1) / n)
        counting(patched, "allgather_async", n - 1)
        model(torch.ones(2, 300)).sum().backward()
    return sum(total)


def test_training_comes_close_to_uncompressed_training():
    data = regression(steps=20)
    reference = mlp()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp(hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, lr_scaling="none", compression="bf16")
    train(model, optimizer, local(data))
    assert 0 < largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 0.01
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
