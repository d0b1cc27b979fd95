"""PyTorch: a script's own lines on divided parameters and gradients see the whole."""

import copy
import io

import pytest
import torch
from cases import MORE, cases
from mesh_models import GPT
from mesh_training import (
    cross_entropy,
    difference,
    distributed,
    of_this_rank,
    part_size,
    tokens,
    vectors,
    whole_state,
)
from torch import nn

import hvkit

LAYOUTS = {
    "tensor": {"mesh": hvkit.Mesh(tensor=2)},
    "shard": {"mesh": hvkit.Mesh(shard=2)},
    "FullyShard": {"mesh": None, "strategy": hvkit.FullyShard()},
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def in_loop(model):
    """Lines that people write between ``backward()`` and ``step()``."""
    for p in model.parameters():
        g = p.grad
        if p.dim() > 1:
            p.grad -= p.grad.mean(1, keepdim=True)  # gradient centralisation
            scale = p.detach().norm(dim=1, keepdim=True) / g.norm(dim=1, keepdim=True)
            g.mul_((scale * 0.01).clamp(max=1))  # adaptive clipping
            g[0] = 0.0
            g[1].mul_(2)
            for row in g:
                row.div_(row.norm() + 1)
        limit = torch.quantile(g.abs(), 0.9)
        g.clamp_(-limit, limit)
        g.div_(g.abs().max() + g.flatten().sort().values[-2])
        g.view(-1)[3:].add_(g.std())
    gradients = [p.grad for p in model.parameters()]
    norms = torch._foreach_norm(gradients)
    torch._foreach_div_(gradients, [norm + 1 for norm in norms])
    torch.nn.utils.clip_grad_value_(list(model.parameters()), 0.05)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.99)
            p.sub_(p.sign() * 1e-4)
            p.div_(p.norm(dim=-1, keepdim=True).clamp(min=1))
            p[..., 0] *= 0.9
            p.data[-1].mul_(0.5)
            p.data = p.data - p.data.mean() * 0.01


PENALTIES = [
    lambda p: p.pow(2).sum(),
    lambda p: (p - p.mean(0)).pow(2).sum(),
    lambda p: p.norm() + p.abs().max(),
    lambda p: p.flatten().sort().values[:3].sum(),
    lambda p: p[0].pow(2).sum() + torch.quantile(p, 0.3),
    lambda p: (p @ p.T - 1).pow(2).mean() if p.dim() > 1 else p.std(),
    lambda p: (p / p.norm()).pow(3).sum(),
]


def in_loss(model):
    return 1e-2 * sum(penalty(p) for penalty in PENALTIES for p in model.parameters())


class Momentum:
    """An optimizer of a script's own, with normalised steps, and an average of the weights."""

    def __init__(self):
        self.momenta, self.average = {}, {}

    @torch.no_grad()
    def __call__(self, model):
        for p in model.parameters():
            momentum = self.momenta.setdefault(p, torch.zeros_like(p))
            momentum.mul_(0.9).add_(p.grad)
            p.add_(momentum, alpha=-0.1 / float(momentum.norm()))
            average = self.average.setdefault(p, copy.deepcopy(p.detach()))
            average.lerp_(p, 0.1)
            p.copy_(p + 0.01 * (average - p))


def steps(model, optimizer, data, after=None, penalty=None):
    """Some steps; their losses."""
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        if penalty:
            loss = loss + penalty(model)
        loss.backward()
        if after:
            after(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def apart(layout, prepare=lambda model: None, after=lambda: None, penalty=None):
    """How far weights and losses are from those of one process.

    Args:
        layout: a name in ``LAYOUTS``.
        prepare: called with each model first.
        after: makes what is called with the model before each step of the optimizer.
        penalty: is added to the loss.
    """
    data = tokens(3, 8)
    reference = GPT(layers=1)
    with torch.no_grad():  # no norm is zero
        for p in reference.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    model = copy.deepcopy(reference)
    prepare(reference)
    prepare(model)
    expected = steps(reference, sgd(reference), data, after(), penalty)
    model, own = distributed(model, sgd, microbatches=None, **LAYOUTS[layout])
    mine = of_this_rank(data, 2 if layout == "tensor" else 1)
    found = steps(model, own, mine, after(), penalty)
    losses = [abs(hvkit.average(a) - b) for a, b in zip(found, expected, strict=True)]
    return max(*losses, difference(whole_state(model, own), reference.state_dict()))


def change_complete_gradients(model):
    def change(p):
        p.grad.sub_(p.grad.mean(0)).add_(p.grad.max())

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(change)


def change_gradients(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient - gradient.mean(0) + gradient.max())


LINES = {
    "in the loop": {"after": lambda: in_loop},
    "penalties in the loss": {"penalty": in_loss},
    "an optimizer of the script's own": {"after": Momentum},
    "hooks": {"prepare": change_gradients},
    "hooks on complete gradients": {"prepare": change_complete_gradients},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lines", cases(LINES))
def test_lines_of_a_script_see_whole_parameters(lines, layout):
    assert apart(layout, **LINES[lines]) < 1e-12


@pytest.fixture(params=["tensor", "shard"])
def divided(request):
    """A model after a step, one of its parameters, and the whole of it."""
    model, own = distributed(GPT(layers=1), sgd, microbatches=None, **LAYOUTS[request.param])
    steps(model, own, tokens(1))
    state = hvkit.broadcast(whole_state(model))
    return model, model.h[0].mlp[0].weight, state["h.0.mlp.0.weight"]


def test_it_has_the_shape_and_values_of_the_whole(divided):
    _, p, whole = divided
    assert p.shape == whole.shape
    assert p.numel() == whole.numel() > part_size(p)
    assert isinstance(p, torch.nn.Parameter)
    assert torch.equal(p, whole)
    assert (p.detach().numpy() == whole.numpy()).all()
    assert str(p.data) == str(whole) or hasattr(p, "to_local")


def test_copies_and_files_are_whole(divided):
    _, p, whole = divided
    file = io.BytesIO()
    torch.save({"parameter": p, "value": p.detach()}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["parameter"], whole)
    assert torch.equal(loaded["value"], whole)
    assert torch.equal(hvkit.allreduce(p.detach()), whole)
    assert torch.equal(hvkit.broadcast([p])[0], whole)
    assert all(torch.equal(each, whole) for each in hvkit.allgather(p))
    twin = copy.deepcopy(p)
    twin.data.zero_()
    assert torch.equal(p, whole)
    assert part_size(twin) == part_size(p)


def test_views_stay_up_to_date(divided):
    _, p, _ = divided
    flat = p.data.view(-1)
    with torch.no_grad():
        p.add_(1)
    assert torch.equal(flat, p.detach().flatten())
    flat[5] = 7
    assert p.flatten()[5] == 7


def test_in_place_changes_of_a_leaf_are_refused_as_in_one_process(divided):
    _, p, _ = divided
    with pytest.raises(RuntimeError, match="leaf Variable"):
        p[0] = 0.0
    with pytest.raises(RuntimeError, match="write into a clone"):
        p[0].zero_()


def test_a_hook_on_what_is_computed_from_a_parameter_is_refused(divided):
    """It would see a part of the gradient."""
    _, p, _ = divided
    with pytest.raises(ValueError, match="register the hook on the parameter"):
        (2 * p).register_hook(print)


@MORE
def test_gradients_of_gradients(divided):
    model, p, whole = divided
    x, y = tokens(1)[0]
    if not hasattr(p, "to_local"):  # PyTorch does not give a fully_shard's parameters those
        (gradient,) = torch.autograd.grad(cross_entropy(model(x), y), [p])
        assert gradient.shape == p.shape
    found = []
    for each in (p, whole.requires_grad_()):
        (once,) = torch.autograd.grad(each.pow(3).mean(0).norm(), [each], create_graph=True)
        found += torch.autograd.grad(once.pow(2).sum(), [each])
    assert torch.allclose(*found, rtol=1e-12)


class Pairs(nn.Module):
    """Layers in two pairs, with a norm between them."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 32)]
        self.layers = nn.Sequential(*layers, nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


@MORE
def test_a_penalty_on_gradients_is_that_of_one_process():
    """Its gradients go back through the exchanges of a backward pass."""
    models = Pairs(), Pairs()
    models[1].load_state_dict(models[0].state_dict())
    distributed(models[1], mesh=hvkit.Mesh(tensor=2), microbatches=None)
    x, found = vectors(1, shape=(6,))[0][0], []
    for model in models:
        loss = model(x).square().mean()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        (loss + sum(each.square().sum() for each in gradients)).backward()
        found.append([p.grad.clone() for p in parameters])
    for own, expected in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-14)
