"""Which parameters are averaged: in groups, frozen, tied, added later, in several optimizers."""

import pytest
import torch
from ranks import error_of, largest_difference, my_part, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import arrays, gradients, local, mean_over_ranks, mlp, regression, train

import hvkit


def equals_one_process(build, steps=train, data=None):
    """Train a model on all ranks, and alone on the global batches; compare the weights.

    ``build(distributed)`` returns a model and its optimizer.
    """
    data = data or regression(steps=8)
    reference, optimizer = build(lambda model, optimizer: (model, optimizer))
    steps(reference, optimizer, data)
    model, optimizer = build(lambda m, o: hvkit.distribute(m, o, lr_scaling="none"))
    steps(model, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_parameter_groups_keep_their_own_rates():
    def build(distribute):
        model = mlp()
        groups = [
            {"params": model[0].parameters(), "lr": 0.1},
            {"params": model[2].parameters(), "lr": 0.01, "momentum": 0.9},
        ]
        return distribute(model, torch.optim.SGD(groups))

    equals_one_process(build)


def test_frozen_parameters_stay_as_they_are():
    def build(distribute):
        model = mlp()
        model[0].requires_grad_(False)
        return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    before = mlp()[0].weight.clone()
    equals_one_process(build)
    model, optimizer = build(hvkit.distribute)
    train(model, optimizer, local(regression(steps=2)))
    assert torch.equal(model[0].weight, before)


def test_parameters_thawed_after_the_call_are_averaged():
    def steps(model, optimizer, data):
        train(model, optimizer, data[:4])
        model[0].requires_grad_(True)
        train(model, optimizer, data[4:])

    def build(distribute):
        model = mlp()
        model[0].requires_grad_(False)
        return distribute(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5))

    equals_one_process(build, steps)


def test_freezing_and_thawing_in_turns_comes_back_to_the_same_buckets(monkeypatch):
    from hvkit.frameworks.pytorch.gradients import bucket_layout

    made = []
    make_buckets = bucket_layout.make_buckets
    monkeypatch.setattr(
        bucket_layout, "make_buckets", lambda *args: (made.append(args[0]), make_buckets(*args))[1]
    )
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step, batch in enumerate(local(regression(steps=6))):
        model[0].requires_grad_(step % 2 == 0)
        train(model, optimizer, [batch])
    assert len(made) == 2
    assert same_on_all_ranks(arrays(model.parameters()))


@pytest.mark.parametrize("features", [8, 4], ids=["of one shape", "of different shapes"])
@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("steps", [0, 2])
def test_parameters_frozen_on_one_rank_are_an_error_not_another_mean(features, compression, steps):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, features))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, compression=compression)
    data = local(regression(steps=3))

    def one(step):
        optimizer.zero_grad()
        model(data[step][0]).square().mean().backward()
        optimizer.step()

    for step in range(steps):
        one(step)
    model[0 if hvkit.rank() == 1 else 1].requires_grad_(False)
    error, text = error_of(lambda: one(steps))
    assert error is hvkit.RanksDisagreeError
    assert "parameter 0.weight requires a gradient on rank 0 but not on rank 1" in text


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

    def one(x, y):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()

    *batches, last = local(regression(steps=5))
    for batch in batches:
        one(*batch)
        if hvkit.rank() == 1:
            with torch.no_grad():
                model[2].bias.add_(1)
    assert len(sent) == 4
    error, text = error_of(lambda: one(*last))
    assert error is hvkit.RanksDisagreeError
    assert "parameter 2.bias of rank 1 differs" in text


def test_tied_weights_are_averaged_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def build(distribute):
        torch.manual_seed(0)
        model = Tied()
        return distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))

    equals_one_process(build)


def test_parameters_added_to_the_optimizer_later_are_averaged():
    def build(distribute):
        model = mlp()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        model, optimizer = distribute(model, optimizer)
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.05})
        return model, optimizer

    equals_one_process(build)


def test_buffers_may_be_resized_after_hvkit_has_read_them():
    model = nn.BatchNorm1d(4)
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    hvkit.allreduce(model.running_mean)
    hvkit.broadcast(model.running_var)
    for buffer in model.buffers():
        buffer.resize_(8)


def test_parameters_put_into_a_group_by_hand_are_averaged():
    def build(distribute):
        model = mlp()
        optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
        model, optimizer = distribute(model, optimizer)
        torch.manual_seed(1)
        model.add_module("3", nn.Linear(4, 4))
        optimizer.param_groups[0]["params"].extend(model[3].parameters())
        return model, optimizer

    equals_one_process(build)


def test_a_new_module_added_later_starts_from_rank_0_and_is_averaged():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(hvkit.rank())
    head = nn.Linear(4, 4)
    optimizer.add_param_group({"params": head.parameters()})
    assert same_on_all_ranks(arrays(head.parameters()))
    for x, y in local(regression(steps=3)):
        optimizer.zero_grad()
        F.mse_loss(head(model(x)), y).backward()
        optimizer.step()
    assert same_on_all_ranks(arrays([*model.parameters(), *head.parameters()]))
    assert not torch.equal(head.weight.grad, torch.zeros_like(head.weight))


def test_several_optimizers_on_one_model():
    def build(distribute):
        model = mlp()
        pair = (
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            torch.optim.Adam(model[2].parameters(), lr=0.01),
        )
        return distribute(model, pair)

    def steps(model, pair, data):
        for x, y in data:
            for optimizer in pair:
                optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            for optimizer in pair:
                optimizer.step()

    equals_one_process(build, steps)


def test_two_models_trained_in_turns():
    generator, critic = mlp(1), nn.Linear(4, 1)
    generator, g_optimizer = hvkit.distribute(
        generator, torch.optim.Adam(generator.parameters(), lr=0.01)
    )
    critic, c_optimizer = hvkit.distribute(critic, torch.optim.Adam(critic.parameters(), lr=0.01))
    for x, y in local(regression(steps=5)):
        c_optimizer.zero_grad()
        (critic(generator(x).detach()).mean() - critic(y).mean()).backward()
        c_optimizer.step()
        g_optimizer.zero_grad()
        (-critic(generator(x)).mean()).backward()
        g_optimizer.step()
    assert same_on_all_ranks(arrays([*generator.parameters(), *critic.parameters()]))


@pytest.mark.parametrize("case", ["other order", "one model unused"])
def test_two_models_in_graphs_that_differ_between_ranks_never_wait_for_each_other(case):
    first, second = mlp(1), mlp(2)
    optimizers = []
    for model in (first, second):
        optimizers.append(torch.optim.SGD(model.parameters(), lr=0.1))
        hvkit.distribute(model, optimizers[-1])
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
    assert same_on_all_ranks(arrays([*first.parameters(), *second.parameters()]))


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
    x, y = regression(steps=1)[0]
    x, y = my_part(x), my_part(y)
    used = [0, 1] if hvkit.rank() == 0 else [0]
    plain = Branches()
    F.mse_loss(plain(x, used), y).backward()

    model = Branches()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
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


def test_a_rank_whose_loss_reaches_no_parameter_takes_part_in_the_step():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in local(regression(steps=4)):
        optimizer.zero_grad()
        if hvkit.rank() == 0:
            F.mse_loss(model(x), y).backward()
        else:
            torch.ones(1, requires_grad=True).sum().backward()
        optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))


def test_graphs_that_differ_at_random_never_wait_for_each_other():
    model = Branches()
    model, optimizer = hvkit.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    choice = torch.Generator().manual_seed(hvkit.rank())
    for x, y in local(regression(steps=30)):
        # At random, some ranks have a zero gradient and others have none.
        used = torch.randperm(3, generator=choice)[: 1 + torch.randint(3, (), generator=choice)]
        optimizer.zero_grad(set_to_none=bool(used[0] % 2))
        F.mse_loss(model(x, used.tolist()), y).backward()
        optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))


def test_ranks_with_different_numbers_of_steps_are_an_error():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, y = local(regression(steps=1))[0]
    F.mse_loss(model(x), y).backward()
    if hvkit.rank() == 0:
        optimizer.step()
        optimizer.zero_grad()
    with pytest.raises(hvkit.RanksDisagreeError, match="different optimizer steps"):
        F.mse_loss(model(x), y).backward()
