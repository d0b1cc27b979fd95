"""PyTorch: compressions that keep for later steps what they have not sent."""

import numpy as np
import pytest
import torch
from ranks import error_of, largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, convnet, local, mlp, regression, train

import hvkit
from hvkit.communication.traffic import Sent
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressionState


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.05, momentum=0.9)


def trained(compression, data, make=mlp, **options):
    model = make(hvkit.rank())
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, compression=compression, **options)
    train(model, optimizer, local(data))
    return model


def test_top_k_of_everything_is_the_default():
    expected = arrays(trained("none", regression()).parameters())
    found = arrays(trained(hvkit.TopK(1), regression()).parameters())
    if hvkit.size() == 2:
        assert all(map(np.array_equal, found, expected))
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.LocalSGD(1), hvkit.DeMo()])
def test_complex_parameters_travel_as_pairs_of_numbers(strategy):
    model = nn.ParameterList([torch.randn(40, 30, dtype=torch.complex64), torch.randn(5)])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    own = strategy == hvkit.DeMo()
    compression = "none" if own else hvkit.TopK(1.0)
    hvkit.distribute(model, optimizer, strategy=strategy, compression=compression)
    before = model[0].detach().clone()
    (model[0] * (hvkit.rank() + 1)).abs().square().sum().backward()
    optimizer.step()
    assert same_on_all_ranks(arrays(torch.view_as_real(p) if p.is_complex() else p for p in model))
    factor = np.mean([(rank + 1) ** 2 for rank in range(hvkit.size())])
    if not own:
        assert torch.allclose(model[0], before * (1 - 0.1 * factor), atol=1e-4)
    assert not torch.equal(model[0], before)


def test_many_columns_come_close_to_the_default():
    data = regression(shape=(1, 8, 8), steps=10)
    expected = arrays(trained("none", data, convnet).parameters())
    found = arrays(trained(hvkit.PowerSGD(3), data, convnet).parameters())
    fewer = arrays(trained(hvkit.PowerSGD(1), data, convnet).parameters())
    assert 0 < largest_difference(found, expected) < largest_difference(fewer, expected)


@pytest.mark.parametrize("compression", [hvkit.TopK(0.05), hvkit.PowerSGD(1)])
@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.LocalSGD(2)])
def test_ranks_are_alike_and_the_loss_falls(compression, strategy):
    data = regression(steps=1) * 40
    model = trained(compression, data, strategy=strategy)
    assert same_on_all_ranks(arrays(model.parameters()))
    x, y = data[0]
    assert F.mse_loss(model(x), y) < 0.8 * F.mse_loss(mlp(0)(x), y)


def test_without_the_residual_the_gradients_are_not_all_used(monkeypatch):
    """The same value is largest in every step; only the residual lets the other through."""

    def weight_after_steps():
        weight = nn.Parameter(torch.zeros(4))
        optimizer = torch.optim.SGD([weight], 1.0)
        hvkit.distribute(nn.ParameterList([weight]), optimizer, compression=hvkit.TopK(0.25))
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
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    hvkit.distribute(model, optimizer, compression=hvkit.TopK(0.25))
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
    expected = trained(hvkit.TopK(0.1), twice)
    model = mlp(hvkit.rank())
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, compression=hvkit.TopK(0.1), accumulate=2)
    for i, (x, y) in enumerate(local(data)):
        (F.mse_loss(model(x), y) / 2).backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    found = largest_difference(arrays(model.parameters()), arrays(expected.parameters()))
    assert found < 1e-4


def test_a_second_backward_pass_before_the_step_is_an_error():
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, compression=hvkit.TopK(0.1))
    (x, y), *_ = local(regression())
    F.mse_loss(model(x), y).backward()
    error, text = error_of(lambda: F.mse_loss(model(x), y).backward())
    assert error is ValueError, text
    assert "accumulate=" in text
    assert "TopK(ratio=0.1)" in text


@pytest.mark.parametrize(
    "options",
    [
        {"compression": hvkit.PowerSGD(2)},
        {"compression": hvkit.TopK(0.1)},
        {"strategy": hvkit.DeMo()},
    ],
)
def test_loss_scaling_is_refused(options):
    model = mlp()
    optimizer = sgd(model.parameters())
    hvkit.distribute(model, optimizer, **options)
    scaler = torch.amp.GradScaler("cpu")
    (x, y), *_ = local(regression())
    scaler.scale(F.mse_loss(model(x), y)).backward()
    error, text = error_of(lambda: scaler.step(optimizer))
    assert error is ValueError
    assert "GradScaler" in text


@pytest.mark.parametrize(
    ("compression", "share"),
    [(hvkit.TopK(0.01), 0.01 * hvkit.size()), (hvkit.PowerSGD(2), 2 * 1000 / 500**2)],
)
def test_a_part_of_the_bytes_is_sent(compression, share):
    model = nn.Linear(500, 500, bias=False)
    hvkit.distribute(model, sgd(model.parameters()), compression=compression)
    before = hvkit.traffic().get("gradients", Sent())
    model(torch.ones(2, 500)).sum().backward()
    sent = hvkit.traffic()["gradients"].bytes - before.bytes
    ring = 2 * (hvkit.size() - 1) / hvkit.size() * 4 * 500**2
    assert sent / ring == pytest.approx(share, rel=0.03)
