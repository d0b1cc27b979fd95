"""What holds with every strategy: nothing outlives a model, and tensors name their device."""

import gc
import weakref

import pytest
import torch
from cases import MORE
from torch import nn
from torch_nets import (
    alike,
    alike_gradients,
    arrays,
    distributed,
    local,
    mlp,
    regression,
    sgd,
    train,
)

import hvkit

pytestmark = [pytest.mark.two_ranks, pytest.mark.usefixtures("torch_distributed")]

OPTIONS = {
    "plain": {},
    "warm-up": {"lr_scaling": "linear", "warmup_steps": 2, "check_every": 1},
    "skip": {"on_nonfinite": "skip"},
    "sync": {"batch_norm": "sync"},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "top-k": {"compression": hvkit.TopK(0.5)},
    "power-sgd": {"compression": hvkit.PowerSGD(2)},
    "sharded": {"strategy": hvkit.ShardedOptimizer()},
    "fully": {"strategy": hvkit.FullyShard()},
    "centralized": {"strategy": hvkit.Centralized()},
    "demo": {"strategy": hvkit.DeMo()},
    "rounds": {"strategy": hvkit.LocalSGD(2)},
    "rounds, top-k": {"strategy": hvkit.LocalSGD(2), "compression": hvkit.TopK(0.5)},
    "beside": {"strategy": hvkit.DiLoCo(2, overlap=1)},
    "gossip": {"strategy": hvkit.Gossip(2)},
    "elastic": {"strategy": hvkit.ElasticAveraging(2)},
    "server": {"strategy": hvkit.ParameterServer(0)},
}


def make_for(options):
    """DeMo has a momentum of its own."""
    demo = options.get("strategy") == hvkit.DeMo()
    return (lambda p: torch.optim.SGD(p, 0.01)) if demo else sgd


class Knotted(nn.Module):
    """A model to which parts and hooks of it refer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
        object.__setattr__(self.layers[1], "whole", self)
        self.layers[0].weight.register_hook(self.unchanged)

    def unchanged(self, gradient):
        return gradient

    def forward(self, x):
        return self.layers(x)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_that_a_script_drops_is_freed(options, steps):
    model, optimizer = distributed(make_for(options), Knotted(), **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    if steps:
        train(model, optimizer, local(regression(steps)))
        scheduler.step()
    held = [*map(weakref.ref, (model, optimizer, *model.parameters()))]
    with hvkit.settled(model, optimizer):
        pass
    del model, optimizer, scheduler
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_a_model_that_a_script_drops_is_freed_while_its_optimizer_lives():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    model, optimizer = distributed(model=model, strategy=hvkit.FullyShard())
    train(model, optimizer, local(regression(steps=3)))
    held = [*map(weakref.ref, model.modules())]
    del model
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    with hvkit.settled(optimizer):
        assert hvkit.rank() or len(optimizer.state_dict()["state"]) == 6


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.LocalSGD(2), hvkit.FullyShard()])
def test_models_that_trained_together_are_freed(strategy):
    whole = nn.Sequential(Knotted(), nn.Linear(4, 4))
    parts = list(whole)
    optimizer = sgd([p for part in parts for p in part.parameters()])
    hvkit.distribute(parts, optimizer, strategy=strategy)
    train(whole, optimizer, local(regression(steps=2)))
    held = [*map(weakref.ref, (*parts, optimizer, *parts[0].parameters()))]
    del whole, parts, optimizer
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


def test_gradients_are_averaged_also_when_a_script_drops_the_optimizer():
    model = nn.Linear(8, 4)
    distributed(model=model)
    gc.collect()
    model(torch.full((2, 8), 1.0 + hvkit.rank())).sum().backward()
    assert alike_gradients(model)


def test_a_parameter_that_a_script_keeps_from_a_dropped_model_has_its_own_gradients():
    model, optimizer = distributed(model=nn.Linear(8, 4))
    train(model, optimizer, local(regression(steps=1)))
    kept = model.bias
    assert alike(model)
    del model, optimizer
    gc.collect()
    kept.grad = None
    (kept * hvkit.rank()).sum().backward()
    assert kept.grad.tolist() == [hvkit.rank()] * 4


@MORE
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tensors_of_hvkit_are_where_the_models_are_whatever_the_default_device(options):
    """``torch.set_default_device``, here "meta", where nothing can be computed."""
    data, found = regression(steps=4), []
    for device in ("cpu", "meta"):
        model = mlp(hvkit.rank())
        with torch.device(device):
            model, optimizer = distributed(make_for(options), model, **options)
            train(model, optimizer, local(data))
            with hvkit.settled(model):
                found.append(arrays(model.state_dict().values()) if hvkit.is_main() else [])
    assert all((a == b).all() for a, b in zip(*found, strict=True))
