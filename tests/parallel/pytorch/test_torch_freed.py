"""Nothing of hvkit's outlives a model and its optimizer that the script drops."""

import gc
import weakref

import pytest
import torch
from ranks import same_on_all_ranks
from torch import nn
from torch_nets import alike, arrays, local, regression, sgd, train

import hvkit

pytestmark = [pytest.mark.two_ranks, pytest.mark.usefixtures("torch_distributed")]


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


OPTIONS = {
    "plain": {},
    "warm-up": {"lr_scaling": "linear", "warmup_steps": 2, "check_every": 1},
    "skip": {"on_nonfinite": "skip", "batch_norm": "sync"},
    "residuals": {"compression": hvkit.TopK(0.1)},
    "sharded": {"strategy": hvkit.ShardedOptimizer()},
    "fully": {"strategy": hvkit.FullyShard()},
    "centralized": {"strategy": hvkit.Centralized()},
    "demo": {"strategy": hvkit.DeMo()},
    "rounds": {"strategy": hvkit.LocalSGD(2), "compression": "int8"},
    "beside": {"strategy": hvkit.DiLoCo(2, overlap=1)},
    "gossip": {"strategy": hvkit.Gossip(2)},
    "elastic": {"strategy": hvkit.ElasticAveraging(2)},
    "server": {"strategy": hvkit.ParameterServer(1)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_that_a_script_drops_is_freed(options):
    model = Knotted()
    # DeMo has a momentum of its own.
    plain = options.get("strategy") == hvkit.DeMo()
    optimizer = torch.optim.SGD(model.parameters(), 0.01) if plain else sgd(model.parameters())
    model, optimizer = hvkit.distribute(model, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    train(model, optimizer, local(regression(steps=3)))
    scheduler.step()
    held = [*map(weakref.ref, (model, optimizer, *model.parameters()))]
    with hvkit.settled(model, optimizer):
        pass
    del model, optimizer, scheduler
    gc.collect()
    assert [each() for each in held] == [None] * len(held)


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
    hvkit.distribute(model, sgd(model.parameters()))
    gc.collect()
    model(torch.full((2, 8), 1.0 + hvkit.rank())).sum().backward()
    assert same_on_all_ranks(arrays([model.weight.grad]))


def test_a_parameter_that_a_script_keeps_from_a_dropped_model_has_its_own_gradients():
    model = nn.Linear(8, 4)
    model, optimizer = hvkit.distribute(model, sgd(model.parameters()))
    train(model, optimizer, local(regression(steps=1)))
    kept = model.bias
    assert alike(model)
    del model, optimizer
    gc.collect()
    kept.grad = None
    (kept * hvkit.rank()).sum().backward()
    assert kept.grad.tolist() == [hvkit.rank()] * 4
