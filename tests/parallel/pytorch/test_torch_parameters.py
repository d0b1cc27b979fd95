"""Which parameters are averaged: in groups, frozen, tied, added later, in several optimizers."""

import pytest
import torch
from cases import pairwise
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import (
    alike_gradients,
    backward,
    distributed,
    gradients,
    local,
    mean_over_ranks,
    mlp,
    raised_everywhere,
    regression,
    train,
    weights,
)

import hvkit


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


def in_groups(distribute):
    model = mlp()
    groups = [
        {"params": model[0].parameters(), "lr": 0.1},
        {"params": model[2].parameters(), "lr": 0.01, "momentum": 0.9},
    ]
    return distribute(model, torch.optim.SGD(groups))


def frozen(distribute):
    model = mlp()
    model[0].requires_grad_(False)
    return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


def tied(distribute):
    model = Tied()
    return distribute(model, sgd(model.parameters()))


def in_a_later_group(distribute):
    model = mlp()
    model, optimizer = distribute(model, sgd(model[0].parameters()))
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
    return model, optimizer


def put_into_a_group_by_hand(distribute):
    model = mlp()
    model, optimizer = distribute(model, sgd(model[0].parameters()))
    torch.manual_seed(1)
    model.add_module("3", nn.Linear(4, 4))
    optimizer.param_groups[0]["params"].extend(model[3].parameters())
    return model, optimizer


def in_two_optimizers(distribute):
    model = mlp()
    adam = torch.optim.Adam(model[2].parameters(), lr=0.01)
    return distribute(model, (sgd(model[0].parameters()), adam))


def train_with_all(model, optimizers, data):
    for batch in data:
        model.zero_grad()
        backward(model, batch)
        for optimizer in optimizers:
            optimizer.step()


def frozen_in_turns(model, optimizer, data):
    for step, batch in enumerate(data):
        model[0].requires_grad_(step % 3 != 0)
        train(model, optimizer, [batch])


@pytest.mark.parametrize(
    ("build", "steps"),
    [
        (in_groups, train),
        (frozen, train),
        (frozen, frozen_in_turns),
        (tied, train),
        (in_a_later_group, train),
        (put_into_a_group_by_hand, train),
        (in_two_optimizers, train_with_all),
    ],
)
def test_weights_are_those_of_one_process(build, steps):
    data = regression(steps=8)
    reference, optimizer = build(lambda model, optimizer: (model, optimizer))
    start = weights(reference)
    steps(reference, optimizer, data)
    model, optimizer = build(hvkit.distribute)
    steps(model, optimizer, local(data))
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5
    stays = (weights(model)[0] == start[0]).all()
    assert stays == (build is frozen and steps is train)


@pytest.mark.parametrize(
    ("features", "compression", "steps"), pairwise([8, 4], ["none", "bf16"], [0, 2])
)
def test_parameters_frozen_on_one_rank_are_an_error_not_another_mean(features, compression, steps):
    """Of one shape, where each rank would send as much, or of different ones."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, features))
    model, optimizer = distributed(model=model, compression=compression)

    def one(batch):
        optimizer.zero_grad()
        model(batch[0]).square().mean().backward()
        optimizer.step()

    *first, last = local(regression(steps=steps + 1))
    for batch in first:
        one(batch)
    model[0 if hvkit.rank() == 1 else 1].requires_grad_(False)
    text = "parameter 0.weight requires a gradient on rank 0 but not on rank 1"
    assert raised_everywhere(lambda: one(last), text)


def test_steps_are_counted_once_for_optimizers_that_share_a_backward_pass_or_call_their_parent(
    monkeypatch,
):
    class Wrapped(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = mlp()
    optimizers = [Wrapped(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    hvkit.distribute(model, optimizers, check_every=4)
    sent = []
    hvd = hvkit.runtime.engine("torch").hvd
    send = hvd.allreduce_async_
    monkeypatch.setattr(hvd, "allreduce_async_", lambda *a, **k: sent.append(k) or send(*a, **k))
    *batches, last = local(regression(steps=5))
    for batch in batches:
        train_with_all(model, optimizers, [batch])
        if hvkit.rank() == 1:
            with torch.no_grad():
                model[2].bias.add_(1)
    assert len(sent) == 4
    text = "parameter 2.bias of rank 1 differs"
    assert raised_everywhere(lambda: train_with_all(model, optimizers, [last]), text)


def test_buffers_may_be_resized_after_hvkit_has_read_them():
    model, _ = distributed(model=nn.BatchNorm1d(4))
    hvkit.allreduce(model.running_mean)
    hvkit.broadcast(model.running_var)
    for buffer in model.buffers():
        buffer.resize_(8)


def test_a_new_module_added_later_starts_from_rank_0_and_is_averaged():
    model, optimizer = distributed()
    torch.manual_seed(hvkit.rank())
    head = nn.Linear(4, 4)
    optimizer.add_param_group({"params": head.parameters()})
    assert same_on_all_ranks(weights(head))
    train(nn.Sequential(model, head), optimizer, local(regression(steps=3)))
    assert same_on_all_ranks([*weights(model), *weights(head)])
    assert head.weight.grad.any()


@pytest.mark.parametrize("case", ["other order", "one model unused"])
def test_two_models_in_graphs_that_differ_between_ranks_never_wait_for_each_other(case):
    models, optimizers = zip(
        *(distributed(model=mlp(seed), check_every=1) for seed in (1, 2)), strict=True
    )
    first, second = models
    for x, y in local(regression(steps=4)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if hvkit.rank() == 0:
            out = first(x) + second(x)
        else:
            out = second(x) + first(x) if case == "other order" else first(x)
        F.mse_loss(out, y).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert same_on_all_ranks([*weights(first), *weights(second)])


class Branches(nn.Module):
    """A trunk that every step uses, and three heads that a step may use or not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(8, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x, used):
        hidden = torch.tanh(self.trunk(x))
        return sum(self.heads[i](hidden) for i in used)


def test_a_parameter_that_some_ranks_did_not_use_counts_as_zero_there():
    """Head 0 is used by all ranks, head 1 by rank 0 alone, head 2 by none."""
    x, y = local(regression(steps=1))[0]
    used = [0, 1] if hvkit.rank() == 0 else [0]
    plain = Branches()
    F.mse_loss(plain(x, used), y).backward()
    model, _ = distributed(model=Branches())
    for _ in range(2):  # the second time, the buckets are known to the engine
        model.zero_grad()
        F.mse_loss(model(x, used), y).backward()
        for name, gradient in gradients(model).items():
            own = plain.get_parameter(name).grad
            if name.startswith("heads.2"):
                assert gradient is None
                continue
            expected = mean_over_ranks(torch.zeros_like(gradient) if own is None else own)
            torch.testing.assert_close(gradient, expected)


def test_graphs_that_differ_at_random_never_wait_for_each_other():
    """Or reach no parameter at all, in every fifth step of a rank other than 0."""
    model, optimizer = distributed(torch.optim.Adam, Branches())
    choice = torch.Generator().manual_seed(hvkit.rank())
    for step, (x, y) in enumerate(local(regression(steps=20))):
        # At random, some ranks have a zero gradient and others have none.
        used = torch.randperm(3, generator=choice)[: 1 + torch.randint(3, (), generator=choice)]
        optimizer.zero_grad(set_to_none=bool(used[0] % 2))
        if step % 5 == 4 and hvkit.rank():
            torch.ones(1, requires_grad=True).sum().backward()
        else:
            F.mse_loss(model(x, used.tolist()), y).backward()
        optimizer.step()
    assert same_on_all_ranks(weights(model))


def test_ranks_with_different_numbers_of_steps_are_an_error():
    model, optimizer = distributed()
    batch = local(regression(steps=1))[0]
    backward(model, batch)
    if hvkit.rank() == 0:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(hvkit.RanksDisagreeError, match="different optimizer steps"):
        backward(model, batch)


@pytest.mark.parametrize("first", ["an accumulated pass", "a pass that fails"])
def test_parameters_that_thaw_between_two_passes_are_averaged(first):
    model = mlp()
    model[0].requires_grad_(False)
    accumulate = 2 if first == "an accumulated pass" else 1
    model, optimizer = distributed(model=model, accumulate=accumulate)
    (x, y), *_ = local(regression(steps=1))
    if first == "an accumulated pass":
        backward(model, (x, y))
    else:
        hook = model[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, (x.requires_grad_(), y))
        hook.remove()
        optimizer.zero_grad()
    model[0].requires_grad_(True)
    backward(model, (x, y))
    assert alike_gradients(model)
    optimizer.step()
    assert same_on_all_ranks(weights(model))


def test_a_group_of_parameters_may_come_between_two_accumulated_passes():
    model, extra = mlp(), nn.Parameter(torch.ones(4))
    model, optimizer = hvkit.distribute(model, sgd(model[0].parameters()), accumulate=2)
    (x, y), *_ = local(regression(steps=1))
    backward(model, (x, y))
    optimizer.add_param_group({"params": [extra]})
    (F.mse_loss(model(x), y) + extra.sum() * (1 + hvkit.rank())).backward()
    optimizer.step()
    assert same_on_all_ranks([extra.detach().numpy(), *weights(model[0])])
