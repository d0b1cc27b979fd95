"""A script may have PyTorch make tensors elsewhere by default: ``torch.set_default_device``.

Here on "meta", where nothing can be computed. hvkit's own tensors name their device.
"""

import pytest
import torch
from cases import MORE
from torch_nets import arrays, local, mlp, regression, train

import hvkit

pytestmark = pytest.mark.two_ranks

WAYS = {
    "gradients": {},
    "nonfinite": {"on_nonfinite": "skip"},
    "bf16": {"compression": "bf16"},
    "int8": {"compression": "int8"},
    "TopK": {"compression": hvkit.TopK(0.5)},
    "PowerSGD": {"compression": hvkit.PowerSGD(2)},
    "LocalSGD": {"strategy": hvkit.LocalSGD(2)},
    "LocalSGD, TopK": {"strategy": hvkit.LocalSGD(2), "compression": hvkit.TopK(0.5)},
    "DiLoCo": {"strategy": hvkit.DiLoCo(2, overlap=1)},
    "Gossip": {"strategy": hvkit.Gossip(2)},
    "ShardedOptimizer": {"strategy": hvkit.ShardedOptimizer()},
    "FullyShard": {"strategy": hvkit.FullyShard()},
    "ParameterServer": {"strategy": hvkit.ParameterServer(0)},
}

DATA = regression(steps=6)


def _trained(way, device):
    model = mlp(hvkit.rank())
    with torch.device(device):
        model, optimizer = hvkit.distribute(
            model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), **way
        )
        train(model, optimizer, local(DATA))
        with hvkit.settled(model):
            return arrays(model.state_dict().values()) if hvkit.is_main() else []


@MORE
@pytest.mark.parametrize("way", WAYS)
def test_it_changes_nothing(way, torch_distributed):
    default, elsewhere = (_trained(WAYS[way], device) for device in ("cpu", "meta"))
    assert all((a == b).all() for a, b in zip(default, elsewhere, strict=True))
