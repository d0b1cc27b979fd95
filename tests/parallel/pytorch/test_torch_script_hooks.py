"""Hooks of the script on parameters see what they see in one process."""

import itertools

import pytest
import torch
from cases import pairwise
from ranks import largest_difference
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F
from torch_nets import (
    alike,
    backward,
    distributed,
    local,
    mlp,
    raised_everywhere,
    regression,
    sgd,
    train,
    weights,
)

import hvkit
from hvkit.frameworks.pytorch.divided_state.fully_shard import DividedModels
from hvkit.watch.calls import current_call

pytestmark = [pytest.mark.two_ranks, pytest.mark.usefixtures("torch_distributed")]


def double(steps=6):
    return [(x.double(), y.double()) for x, y in regression(steps=steps)]


def normalised(gradient):
    return gradient / gradient.norm()


def clamped_in_place(gradient):
    gradient.clamp_(-0.01, 0.01)


def normalise_stored(parameter):
    parameter.grad = normalised(parameter.grad)


def hook(model, kind):
    for p in model.parameters():
        if kind == "stored":
            p.register_post_accumulate_grad_hook(normalise_stored)
        else:
            p.register_hook(normalised)
        if kind == "two":
            p.register_hook(clamped_in_place)


def train_in_passes(model, optimizer, data, passes, to_none=True):
    for first in range(0, len(data), passes):
        optimizer.zero_grad(set_to_none=to_none)
        for batch in data[first : first + passes]:
            backward(model, batch)
        optimizer.step()


STRATEGIES = {
    "averaged": {},
    "in buckets of several passes": {"accumulate": 2},
    "sharded optimizer": {"strategy": hvkit.ShardedOptimizer()},
    "centralized": {"strategy": hvkit.Centralized()},
    "fully": {"strategy": hvkit.FullyShard()},
}


@pytest.mark.parametrize(
    ("strategy", "kind", "before"),
    pairwise(list(STRATEGIES), ["normalised", "two", "stored"], [True, False]),
)
def test_a_hook_changes_the_mean_over_ranks(strategy, kind, before):
    options = STRATEGIES[strategy]
    passes = [1] if strategy == "fully" and kind != "stored" else [1, 2]
    for number in passes:
        reference, model = mlp().double(), mlp().double()
        hook(reference, kind)
        train_in_passes(reference, sgd(reference.parameters()), double(), number)
        if before:
            hook(model, kind)
        model, optimizer = hvkit.distribute(model, sgd(model.parameters()), **options)
        if not before:
            hook(model, kind)
        train_in_passes(model, optimizer, local(double()), number, to_none=strategy == "fully")
        with hvkit.settled(model):
            state = model.state_dict() if hvkit.is_main() else {}
        for name, value in state.items():
            torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_parameters_sees_means(mode):
    seen = []
    for on_ranks in (False, True):
        model, norms = mlp().double(), []

        def note(gradients, norms=norms):
            each = gradients if isinstance(gradients, list) else [gradients]
            norms.append([g.norm().item() for g in each])

        register_multi_grad_hook(list(model.parameters()), note, mode=mode)
        optimizer, data = sgd(model.parameters()), double()
        if on_ranks:
            model, optimizer = hvkit.distribute(model, optimizer)
            data = local(data)
        train_in_passes(model, optimizer, data, 2)
        seen.append(norms)
    assert len(seen[0]) == len(seen[1])
    torch.testing.assert_close(torch.tensor(seen[1]), torch.tensor(seen[0]))


def test_a_hook_sees_a_parameter_that_only_another_rank_uses():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(8, 4).double(), nn.Linear(8, 4).double()

        def forward(self, x, both):
            return self.first(x) + (self.second(x) if both else 0)

    (x, y), *_ = double()
    model = Sometimes()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    model.second.weight.register_hook(normalised)
    for _ in range(2):  # the second adds to what the first has left
        F.mse_loss(model(x, both=hvkit.rank() == 1), y).backward()
    torch.testing.assert_close(model.second.weight.grad.norm(), torch.tensor(2.0).double())
    optimizer.step()
    assert alike(model)


def test_a_hook_sees_the_mean_on_a_rank_without_a_backward_pass():
    model, optimizer = distributed()
    hook(model, "two")
    for x, y in local(regression(steps=3)):
        optimizer.zero_grad()
        if hvkit.rank() == 0:
            F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert max(p.grad.abs().max() for p in model.parameters()) <= 0.01
    assert alike(model)


def test_noise_of_hooks_is_the_same_on_all_ranks_and_new_in_each_step():
    torch.manual_seed(hvkit.rank())
    model, optimizer = distributed()
    drawn = []

    def noisy(gradient):
        drawn.append(torch.randn_like(gradient))
        return gradient + drawn[-1]

    model[0].weight.register_hook(noisy)
    train(model, optimizer, local(regression(steps=5)))
    assert alike(model)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(drawn))


def test_a_hook_may_be_removed_and_sees_autograd_grad():
    model, _ = distributed()
    first = model[0].weight
    handle = first.register_hook(lambda gradient: gradient * 0)
    x, y = local(regression(steps=1))[0]
    (own,) = torch.autograd.grad(F.mse_loss(model(x), y), [first])
    assert not own.any()
    handle.remove()
    F.mse_loss(model(x), y).backward()
    assert first.grad.any()


def reductions(model, optimizer, steps=2):
    before = hvkit.traffic()["gradients"].messages
    train_in_passes(model, optimizer, local(regression(steps=2 * steps)), 2)
    return hvkit.traffic()["gradients"].messages - before


def test_a_removed_hook_costs_nothing():
    model, optimizer = distributed(accumulate=2)
    train_in_passes(model, optimizer, local(regression(steps=2)), 2)
    without = reductions(model, optimizer)
    handle = model[0].weight.register_hook(normalised)
    assert reductions(model, optimizer) == 2 * without
    handle.remove()
    assert reductions(model, optimizer) == without


def test_a_hook_on_one_rank_alone_works_or_is_named():
    (model, optimizer), seen = distributed(), []
    if hvkit.rank() == 1:
        model[0].weight.register_hook(seen.append)
    train(model, optimizer, local(regression(steps=3)))
    assert len(seen) == 3 * hvkit.rank()
    assert alike(model)
    model, optimizer = distributed(accumulate=2)
    if hvkit.rank() == 1:
        model[0].weight.register_hook(normalised)
    named = "rank 1 has registered the hook normalised on parameter 0.weight, and rank 0 has none"
    assert raised_everywhere(lambda: reductions(model, optimizer), named, "accumulate=2")


def test_a_wrong_shape_is_an_error():
    model, _ = distributed()
    model[0].bias.register_hook(lambda gradient: gradient.sum())
    text = "parameter 0.bias must return None or a tensor of the gradient's shape (16,)"
    assert raised_everywhere(model(torch.ones(2, 8)).sum().backward, text, kind=RuntimeError)


@pytest.mark.parametrize("why", ["create_graph=True", "accumulate=2", "torch.autograd.grad"])
def test_own_gradients_are_named_where_hooks_must_see_them(why, capsys):
    options = {"accumulate": 2, "compression": hvkit.TopK(0.5)} if "accumulate" in why else {}
    model, _ = distributed(**options)
    model[0].weight.register_hook(normalised)
    loss = model(torch.randn(2, 8)).sum()
    if "autograd" in why:
        torch.autograd.grad(loss, list(model.parameters()))
    else:
        loss.backward(create_graph="graph" in why)
    logged = capsys.readouterr().err
    named = "registered on parameter 0.weight sees each rank's own gradient, not their mean, where"
    assert (named in logged and why in logged) == hvkit.is_main()


def test_divided_parameters_refuse_what_they_cannot_do():
    model, _ = distributed(strategy=hvkit.FullyShard())
    with pytest.raises(ValueError, match="would never be called"):
        register_multi_grad_hook(list(model.parameters()), print)
    model, _ = distributed(strategy=hvkit.FullyShard())
    model[0].weight.register_hook(normalised)
    batch = local(regression(steps=1))[0]
    backward(model, batch)
    text = "the hook that the script has registered on parameter 0.weight"
    assert raised_everywhere(lambda: backward(model, batch), text, kind=ValueError)


def test_the_wait_of_a_hook_on_a_divided_parameter_names_it(monkeypatch):
    calls, gather = [], DividedModels.full_gradient
    monkeypatch.setattr(
        DividedModels,
        "full_gradient",
        lambda *given: calls.append(current_call()) or gather(*given),
    )
    model, optimizer = distributed(strategy=hvkit.FullyShard())
    model[0].weight.register_hook(normalised)
    train(model, optimizer, local(regression(steps=1)))
    assert calls == ["the script's hook on parameter 0.weight"]


def test_each_rank_trains_on_its_own_between_rounds():
    own = mlp()
    model, optimizer = distributed(strategy=hvkit.LocalSGD(100))
    for each, its in ((own, sgd(own.parameters())), (model, optimizer)):
        hook(each, "normalised")
        train(each, its, local(regression(steps=3)))
    assert largest_difference(weights(model), weights(own)) == 0
