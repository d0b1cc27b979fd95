"""PyTorch: strategies that let ranks train alone for a round, and then agree on weights."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from ranks import as_vector, gossip_matrix, identical, largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import (
    alike,
    arrays,
    backward,
    in_rounds,
    local,
    mlp,
    regression,
    sgd,
    train,
    train_with_closure,
    weights,
)

import hvkit
from hvkit.communication.exchanges import Mean
from hvkit.strategies.strategy import Rounds


@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(5), hvkit.DiLoCo(5)])
def test_ranks_differ_in_a_round_and_are_alike_after_it(strategy):
    model, optimizer = in_rounds(strategy)
    data = local(regression(steps=10))
    train(model, optimizer, data[:3])
    assert not alike(model)
    train(model, optimizer, data[3:5])
    assert alike(model)
    train(model, optimizer, data[5:])
    assert alike(model)


@pytest.mark.parametrize("topology", ["ring", "complete"])
def test_gossip_without_gradients_multiplies_by_its_matrix_in_each_step(topology):
    model, optimizer = in_rounds(hvkit.Gossip(topology=topology), torch.optim.SGD)
    train(model, optimizer, local(regression(steps=1)))  # the ranks begin alike
    with torch.no_grad():
        for p in model.parameters():
            p.add_(hvkit.rank())
    everyone = hvkit.allgather(as_vector(weights(model)))
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, local(regression(steps=3)))
    matrix = np.linalg.matrix_power(gossip_matrix(topology, hvkit.size()), 3)
    assert np.abs(as_vector(weights(model)) - matrix[hvkit.rank()] @ everyone).max() < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        assert np.abs(as_vector(weights(model)) - np.mean(everyone, axis=0)).max() < 1e-6


def test_elastic_averaging_pulls_to_the_centre():
    model, optimizer = in_rounds(
        hvkit.ElasticAveraging(1, pull=0.5), lambda parameters: torch.optim.SGD(parameters, lr=1)
    )
    size, rank, mean = hvkit.size(), hvkit.rank(), (hvkit.size() - 1) / 2
    centre = weights(model)
    for p in model.parameters():
        p.grad = torch.full_like(p, -rank)
    optimizer.step()
    expected = [c + rank * (1 - 0.5 / size) for c in centre]
    assert largest_difference(weights(model), expected) < 1e-6
    with hvkit.settled(model):
        assert alike(model)
        shown = [c + 0.5 * mean + 0.5 * (mean * (1 - 0.5 / size) - 0.5 * mean) for c in centre]
        assert largest_difference(weights(model), shown) < 1e-6


@pytest.mark.parametrize(
    "strategy",
    [
        hvkit.Synchronous(),
        hvkit.Centralized(),
        hvkit.ShardedOptimizer(),
        hvkit.LocalSGD(3),
        hvkit.DiLoCo(3, outer_lr=1, outer_momentum=0),
        hvkit.Gossip(2),
    ],
)
def test_ranks_with_the_same_data_train_as_one_process(strategy):
    """With accumulated and clipped gradients, and a schedule."""
    found = []
    for distribute in (True, False):
        model = mlp()
        optimizer = sgd(model.parameters())
        if distribute:
            hvkit.distribute(model, optimizer, strategy=strategy, accumulate=2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step, (x, y) in enumerate(regression(steps=12), 1):
            (F.mse_loss(model(x), y) / 2).backward()
            if step % 2 == 0:
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        found.append(weights(model))
    assert largest_difference(*found) < 1e-6


@dataclass(frozen=True)
class Middle(Rounds):
    """Written as a user would: ranks go half the way to the mean, and remember it."""

    def begin(self, weights):
        return {"mean": weights + 0}

    @property
    def same_weights(self):
        return False

    def agree(self, weights, state, group):
        mean = yield Mean(weights)
        return (weights + mean) * 0.5, {"mean": mean}

    def settle(self, weights, state, group):
        return (yield Mean(weights))


def test_a_strategy_that_is_not_part_of_hvkit():
    model, optimizer = in_rounds(Middle(2))
    train(model, optimizer, local(regression(steps=1)))
    apart = torch.stack(hvkit.allgather(model[0].weight.detach().clone())).std()
    train(model, optimizer, local(regression(steps=1)))
    own = hvkit.allgather(model[0].weight.detach().clone())
    assert 0 < torch.stack(own).std() < 2 * apart
    with hvkit.settled(model):
        assert alike(model)
        assert torch.allclose(model[0].weight, torch.stack(own).mean(0), atol=1e-6)


def bytes_sent(model, optimizer, data):
    """What training sends, by its purpose."""
    before = hvkit.traffic()
    train(model, optimizer, data)
    return {
        purpose: sent.bytes - (before[purpose].bytes if purpose in before else 0)
        for purpose, sent in hvkit.traffic().items()
    }


RING, EACH_OTHER = 2 * (hvkit.size() - 1) / hvkit.size(), hvkit.size() - 1


@pytest.mark.parametrize(
    ("strategy", "compression", "purpose", "times"),
    [
        (hvkit.LocalSGD(5), "none", "weights", 3 * 4 * RING),
        (hvkit.LocalSGD(5), "bf16", "weights", 3 * 2 * RING),
        (hvkit.Gossip(5, topology="complete"), "none", "weights", 3 * 4 * EACH_OTHER),
        (hvkit.Synchronous(), "none", "gradients", 15 * 4 * RING),
    ],
)
def test_a_round_sends_the_weights_once(strategy, compression, purpose, times):
    """In 15 steps, three rounds; the default sends gradients in each, and a report."""
    model, optimizer = in_rounds(strategy, compression=compression)
    data = local(regression(steps=20))
    train(model, optimizer, data[:5])
    sent = bytes_sent(model, optimizer, data[5:])
    count = sum(p.numel() for p in model.parameters())
    other = "gradients" if purpose == "weights" else "weights"
    assert sent[purpose] == pytest.approx(times * count, rel=0.03 if purpose == "weights" else 0.3)
    assert sent.get(other, 0) == 0
    assert purpose == "gradients" or sent.get("checks", 0) == 0


def test_an_overflow_on_one_rank_does_not_shift_its_rounds():
    model, optimizer = in_rounds(hvkit.LocalSGD(3))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(local(regression(steps=9))):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if step in (0, 5) and hvkit.rank() == 0:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert alike(model) == (step % 3 == 2)


def test_frozen_parameters_stay_as_they_are():
    model = mlp()
    model[0].requires_grad_(False)
    before = weights(model[0])
    model, optimizer = in_rounds(hvkit.LocalSGD(2), model=model)
    sent = bytes_sent(model, optimizer, local(regression(steps=4)))
    assert identical(weights(model[0]), before)
    trained = sum(p.numel() for p in model[2].parameters())
    assert sent["weights"] == 2 * (2 * 4 * trained * (hvkit.size() - 1) // hvkit.size())


@pytest.mark.parametrize("set_to_none", [True, False], ids=["stays", "moved by momentum"])
def test_a_parameter_that_is_frozen_in_the_middle_of_a_round_is_agreed_on(set_to_none):
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=4))
    train(model, optimizer, data[:1])
    model[0].requires_grad_(False)
    for batch in data[1:2] if set_to_none else data[1:]:
        optimizer.zero_grad(set_to_none)
        backward(model, batch)
        optimizer.step()
    assert alike(model)


def test_batch_norm_statistics_are_averaged_at_each_agreement():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))
    model, optimizer = in_rounds(hvkit.LocalSGD(2), model=model)
    data = local(regression(steps=4))
    train(model, optimizer, data[:3])
    model.eval()
    own = arrays(model.buffers())
    with hvkit.settled(model):
        assert alike(model)
    assert identical(arrays(model.buffers()), own)
    model.train()
    train(model, optimizer, data[3:])
    assert alike(model)


def test_compressed_rounds_keep_the_statistics_exact():
    layer = nn.BatchNorm1d(8, momentum=1.0)
    _, optimizer = in_rounds(hvkit.LocalSGD(1), model=layer, compression="int8")
    x = torch.randn(64, 8) * torch.tensor([100.0, *[0.1] * 7])
    for _ in range(2):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
    assert layer.running_var == pytest.approx(x.var(0).detach(), rel=0.1)


def test_each_optimizer_has_its_own_rounds():
    model = mlp()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, [first, second], strategy=hvkit.LocalSGD(2))
    for step, batch in enumerate(local(regression(steps=8))):
        model.zero_grad()
        backward(model, batch)
        first.step()
        if step % 2:
            second.step()
        assert alike(model[0]) == (step % 2 == 1)
        assert alike(model[2]) == (step % 4 in (3, 0))


def test_two_optimizers_of_the_same_parameters_end_their_rounds_in_turn():
    model = mlp()
    both = [torch.optim.SGD(model.parameters(), 0.05) for _ in range(2)]
    hvkit.distribute(model, both, strategy=hvkit.LocalSGD(4))
    data = local(regression(steps=12))
    for step, batch in enumerate(data):
        train(model, both[step % 3 == 0], [batch])
    with hvkit.settled(model):
        assert alike(model)
    for optimizer in (both[0], both[1], both[0]):
        train(model, optimizer, data[:4])
    assert alike(model)


def test_parameters_that_are_added_later_are_agreed_on():
    model = mlp()
    optimizer = sgd(model[0].parameters())
    hvkit.distribute(model, optimizer, strategy=hvkit.DiLoCo(2))
    data = local(regression(steps=5))
    train(model, optimizer, data[:1])
    optimizer.add_param_group({"params": model[2].parameters()})
    extra = nn.Parameter(torch.full((4,), float(hvkit.rank())))
    optimizer.add_param_group({"params": [extra]})
    assert extra.tolist() == [0.0] * 4
    for x, y in data[1:4]:
        optimizer.zero_grad()
        F.mse_loss(model(x) + extra, y).backward()
        optimizer.step()
    assert alike(model)
    assert same_on_all_ranks(arrays([extra]))


def test_a_skipped_step_takes_new_parameters_along():
    model = mlp()
    optimizer = sgd(model[0].parameters())
    hvkit.distribute(model, optimizer, strategy=hvkit.LocalSGD(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(local(regression(steps=2))):
        if step == 1:
            optimizer.param_groups.append(
                {**optimizer.param_groups[0], "params": [*model[2].parameters()]}
            )
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if step == 1 and hvkit.rank() == 0:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
    assert alike(model)


def test_an_optimizer_inside_another_counts_once():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base):
            super().__init__(base.param_groups, {})
            self.base, self.param_groups = base, base.param_groups

        def step(self, closure=None):
            return self.base.step(closure)

    model, optimizer = in_rounds(hvkit.LocalSGD(2), lambda p: Lookahead(sgd(p)))
    data = local(regression(steps=4))
    for step, batch in enumerate(data):
        train(model, optimizer, [batch])
        assert alike(model) == (step % 2 == 1)
    # The script may step the optimizer inside.
    train(model, optimizer.base, data[:2])
    assert alike(model)


def test_a_step_that_fails_does_not_count():
    model, optimizer = in_rounds(hvkit.LocalSGD(2))
    data = local(regression(steps=2))
    train(model, optimizer, data[:1])
    model[0].weight.grad = torch.zeros(16, 8).to_sparse()
    optimizer.param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    optimizer.param_groups[0]["weight_decay"] = 0
    train(model, optimizer, data[1:])
    assert alike(model)


def test_closures_stay_local():
    model, optimizer = in_rounds(hvkit.LocalSGD(2), torch.optim.LBFGS)
    data = local(regression(steps=2))
    train_with_closure(model, optimizer, data[:1])
    assert not alike(model)
    train_with_closure(model, optimizer, data[1:])
    assert alike(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64])
def test_other_dtypes(dtype):
    model = nn.ParameterList([torch.linspace(-1, 1, 12).to(dtype).view(3, 4)])
    model, optimizer = in_rounds(hvkit.LocalSGD(1), lambda p: torch.optim.SGD(p, 0.5), model)
    before = model[0].detach().clone()
    model[0].grad = torch.full_like(model[0], hvkit.rank() + 1)
    optimizer.step()
    mean = (hvkit.size() + 1) / 2
    assert model[0].dtype is dtype
    assert torch.allclose(model[0], before - 0.5 * mean, rtol=1e-2)
