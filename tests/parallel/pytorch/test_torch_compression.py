"""Gradients in fewer bits on the wire, and what compressions keep for later steps."""

import numpy as np
import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import (
    arrays,
    backward,
    distributed,
    equals_one_process,
    local,
    raised_everywhere,
    regression,
    train,
    weights,
)

import hvkit
from hvkit.sync.compression_state import CompressionState
from hvkit.transport.traffic import Sent


def plain(parameters, lr=1.0):
    return torch.optim.SGD(parameters, lr)


def gradient_of(mine, compression, dtype=torch.float32):
    """A parameter's gradient after the ranks have averaged these."""
    weight = nn.Parameter(torch.zeros(mine.shape, dtype=dtype))
    distributed(model=nn.ParameterList([weight]), compression=compression)
    (weight * mine).sum().backward()
    return weight.grad


@pytest.mark.parametrize(("compression", "digits"), [("fp16", 11), ("bf16", 8)])
def test_means_are_right_to_the_bits_of_the_format_and_the_same_everywhere(compression, digits):
    everyone = torch.randn(hvkit.size(), 1001, generator=torch.Generator().manual_seed(0))
    everyone[:, 0] = 60_000  # whose sum float16 does not hold
    everyone[:, 1] = 1e30 if compression == "bf16" else 1  # what float32 holds, bfloat16 does
    mean = gradient_of(everyone[hvkit.rank()], compression)
    # Half a unit in the last place for sending, and as much again for the means.
    bound = 2.0**-digits * (everyone.abs().mean(0) + everyone.mean(0).abs())
    assert ((mean - everyone.mean(0)).abs() <= bound).all()
    assert same_on_all_ranks([mean.numpy()])


def test_double_precision_travels_as_it_is():
    value = torch.tensor([1 + 1e-12], dtype=torch.float64)
    mean = gradient_of(value, "fp16", dtype=torch.float64)
    assert mean.item() == pytest.approx(value.item(), rel=1e-15)


def test_eight_bits_are_within_half_a_scale_twice():
    everyone = torch.randn(hvkit.size(), 1001, generator=torch.Generator().manual_seed(0))
    mean = gradient_of(everyone[hvkit.rank()], "int8")
    assert (mean - everyone.mean(0)).abs().max() <= everyone.abs().max() / 127
    assert same_on_all_ranks([mean.numpy()])


@pytest.mark.parametrize(
    ("compression", "within"),
    [("bf16", 0.01), ("int8", 0.03), (hvkit.TopK(1), 1e-5), (hvkit.PowerSGD(16), 1e-3)],
)
def test_training_comes_close_to_one_process(compression, within):
    """Top-k of everything, and as many columns as gradients have, leave nothing out."""
    options = {"within": within, "compression": compression}
    assert equals_one_process(data=regression(steps=10), **options)


@pytest.mark.parametrize(
    ("compression", "share"),
    [
        ("fp16", 1 / 2),
        ("bf16", 1 / 2),
        ("int8", 0.26),
        (hvkit.TopK(0.01), 0.01 * hvkit.size()),
        (hvkit.PowerSGD(2), 2 * 1000 / 500**2),
    ],
)
def test_a_part_of_the_bytes_is_sent(compression, share):
    model, _ = distributed(model=nn.Linear(500, 500, bias=False), compression=compression)
    before = hvkit.traffic().get("gradients", Sent())
    model(torch.ones(2, 500)).sum().backward()
    sent = hvkit.traffic()["gradients"].bytes - before.bytes
    ring = 2 * (hvkit.size() - 1) / hvkit.size() * 4 * 500**2
    assert sent / ring == pytest.approx(share, rel=0.03)


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_rows_of_sparse_gradients_are_compressed_too(compression):
    table = nn.Embedding(50, 3, sparse=True)
    nn.init.constant_(table.weight, 1.0)
    distributed(plain, table, compression=compression)
    table(torch.tensor([hvkit.rank(), 49])).square().sum().backward()
    assert table.weight.grad.is_sparse
    dense = table.weight.grad.to_dense().numpy()
    assert dense[0] == pytest.approx(np.full(3, 2 / hvkit.size()), rel=2**-7)
    assert dense[49] == pytest.approx(np.full(3, 2.0))


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.LocalSGD(1), hvkit.DeMo()])
def test_complex_parameters_travel_as_pairs_of_numbers(strategy):
    own = strategy == hvkit.DeMo()
    compression = "none" if own else hvkit.TopK(1.0)
    model = nn.ParameterList([torch.randn(40, 30, dtype=torch.complex64), torch.randn(5)])
    model, optimizer = distributed(
        lambda p: plain(p, 0.05), model, strategy=strategy, compression=compression
    )
    before = model[0].detach().clone()
    (model[0] * (hvkit.rank() + 1)).abs().square().sum().backward()
    optimizer.step()
    assert same_on_all_ranks(arrays(torch.view_as_real(p) if p.is_complex() else p for p in model))
    factor = np.mean([(rank + 1) ** 2 for rank in range(hvkit.size())])
    if not own:
        assert torch.allclose(model[0], before * (1 - 0.1 * factor), atol=1e-4)
    assert not torch.equal(model[0], before)


def test_without_the_residual_the_gradients_are_not_all_used(monkeypatch):
    """The same value is largest in every step; only the residual lets the other through."""

    def weight_after_steps():
        weight = nn.Parameter(torch.zeros(4))
        model = nn.ParameterList([weight])
        _, optimizer = distributed(plain, model, compression=hvkit.TopK(0.25))
        for _ in range(8):
            optimizer.zero_grad()
            (weight * torch.tensor([4.0, 1.0, 0.0, 0.0])).sum().backward()
            optimizer.step()
        return weight[1].item()

    assert weight_after_steps() < 0
    monkeypatch.setattr(CompressionState, "commit", lambda self, _: self.pending.clear())
    assert weight_after_steps() == 0


def test_a_parameter_without_gradient_keeps_its_residual():
    model = nn.ParameterList([torch.zeros(4), torch.zeros(4)])
    model, optimizer = distributed(plain, model, compression=hvkit.TopK(0.25))
    slope = torch.tensor([1.0, 2.0, 3.0, 4.0])
    (slope * (model[0] + 10 * model[1])).sum().backward()
    optimizer.step()
    before = model[1].detach().clone()
    for _ in range(3):
        optimizer.zero_grad()
        (model[0] * 1e-3).sum().backward()
        optimizer.step()
    assert torch.equal(model[1], before)
    optimizer.zero_grad()
    (model[0] + 0 * model[1]).sum().backward()
    optimizer.step()
    assert not torch.equal(model[1], before)


def test_accumulated_gradients():
    data = regression(steps=8)
    twice = [tuple(map(torch.cat, zip(*data[i : i + 2], strict=True))) for i in range(0, 8, 2)]
    expected, its = distributed(compression=hvkit.TopK(0.1))
    train(expected, its, local(twice))
    model, optimizer = distributed(compression=hvkit.TopK(0.1), accumulate=2)
    for i, (x, y) in enumerate(local(data)):
        (F.mse_loss(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert largest_difference(weights(model), weights(expected)) < 1e-4


def test_a_second_backward_pass_before_the_step_is_an_error():
    model, _ = distributed(compression=hvkit.TopK(0.1))
    batch = local(regression(steps=1))[0]
    backward(model, batch)
    parts = ["accumulate=", "TopK(ratio=0.1)"]
    assert raised_everywhere(lambda: backward(model, batch), *parts, kind=ValueError)


@pytest.mark.parametrize(
    "options",
    [{"compression": hvkit.TopK(0.1)}, {"strategy": hvkit.DeMo()}],
)
def test_loss_scaling_is_refused(options):
    model, optimizer = distributed(**options)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 8)).sum()).backward()
    assert raised_everywhere(lambda: scaler.step(optimizer), "GradScaler", kind=ValueError)
