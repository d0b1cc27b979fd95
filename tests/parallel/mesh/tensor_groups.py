"""Divides a model's layers among all ranks, and compares it with the same one in one process."""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hvkit
from hvkit.frameworks.pytorch.model_parallel.rank_groups import SameRandomNumbers
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_layers import divide
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import whole_of
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import plan_layers


def ids(batch=4, length=8):
    return torch.randint(64, (batch, length))


def vectors(batch=6):
    return torch.randn(batch, 20)


def sequences(batch=3, length=5):
    return torch.randn(batch, length, 20)


def divided(model, *args, words=None, **kwargs):
    """A copy of a model that all ranks divide; the plan, and how its parameters are divided."""
    model = copy.deepcopy(model)
    plan = plan_layers(model, args, kwargs, hvkit.size(), words)
    mesh = init_device_mesh("cpu", (hvkit.size(),))
    random = SameRandomNumbers(mesh.get_group(), torch.device("cpu"))
    return model, plan, divide(model, plan, mesh, random)


def whole(model, placements, read=lambda p: p.detach()):
    """All parameters of a divided model, whole; a collective."""
    found = {}
    for name, p in model.named_parameters():
        mine = read(p).contiguous()
        if name in placements:
            parts = [torch.empty_like(mine) for _ in range(hvkit.size())]
            dist.all_gather(parts, mine)
            mine = whole_of(parts, placements[name])
        found[name] = mine
    return found


def train(model, batches):
    """Losses, and by parameter the largest gradient of each element."""
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses, largest = [], {}
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        loss = y.square().mean() + y.flatten()[::7].mean()
        loss.backward()
        for name, p in model.named_parameters():
            seen = largest.get(name, torch.zeros_like(p))
            largest[name] = torch.maximum(seen, p.grad.abs())
        optimizer.step()
        losses.append(loss.item())
    return losses, largest


def furthest(found, model, largest):
    """Largest difference to a model's weights; not where gradients are zero but for rounding.

    AdamW makes steps of the learning rate from them, of either sign.
    """
    apart = [
        (found[name] - p.detach())[largest[name] > 1e-12].abs()
        for name, p in model.named_parameters()
    ]
    return max(float(each.max()) for each in apart if each.numel())


def trained_apart(model, placements, reference, batches):
    """The largest difference of losses, and of weights, after both have trained."""
    losses, _ = train(model, batches)
    expected, largest = train(reference, batches)
    apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    return apart, furthest(whole(model, placements), reference, largest)


def assert_computes_alike(model, placements, reference, compute):
    """What ``compute`` returns for both models, and the gradients of it, are the same.

    Args:
        compute: a function of a model that returns a tensor.
    """
    y, expected = compute(model), compute(reference)
    assert type(y) is torch.Tensor
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    for each in (y, expected):
        each.square().mean().backward()
    gradients = whole(model, placements, lambda p: p.grad)
    for name, p in reference.named_parameters():
        assert type(model.get_parameter(name).grad) is torch.Tensor
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)


def sent_in_a_pass(model, x):
    """Bytes and messages of activations of a forward and its backward pass."""
    before = hvkit.traffic().get("activations", (0, 0))
    model(x).sum().backward()
    after = hvkit.traffic()["activations"]
    return after[0] - before[0], after[1] - before[1]
