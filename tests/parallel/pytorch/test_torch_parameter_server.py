"""PyTorch: ranks that train at their own pace and exchange weights with a server on rank 0."""

import functools
import gc
import time
import weakref

import numpy as np
import pytest
import torch
from cases import cases
from ranks import identical, largest_difference, same_on_all_ranks, shared_folder, wait_for
from server_log import logged
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
    served,
    sgd,
    train,
    weights,
)

import hvkit
from hvkit.strategies.parameter_server import add
from hvkit.sync import parameter_server_client


def settled_weights(model):
    with hvkit.settled(model):
        return arrays(model.state_dict().values())


@pytest.fixture
def log(monkeypatch):
    """What the server adds, on rank 0."""
    return logged(monkeypatch)


def train_unevenly(model, optimizer, data, seconds):
    """The last rank takes longer for each step."""
    for batch in data:
        if hvkit.rank() == hvkit.size() - 1:
            time.sleep(seconds)
        train(model, optimizer, [batch])


@pytest.mark.parametrize(
    "options",
    cases([{"momentum": 0.9, "weight_decay": 0.01}, {}, {"momentum": 0.9, "nesterov": True}], 2),
)
def test_staleness_0_is_synchronous(options):
    data = [(x.double(), y.double()) for x, y in local(regression())]
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ParameterServer(0)):
        make = functools.partial(torch.optim.SGD, lr=0.05, **options)
        model, optimizer = in_rounds(strategy, make, mlp().double())
        train(model, optimizer, data)
        found.append(weights(model))
        assert alike(model)
    assert largest_difference(*found) < 1e-12


def test_with_staleness_ranks_differ_until_they_settle():
    model, optimizer = served(3)
    data = local(regression())
    train_unevenly(model, optimizer, data[:10], 0.002)
    own = weights(model)
    assert not alike(model)
    with hvkit.settled(model):
        assert alike(model)
        with hvkit.settled(model):
            assert alike(model)
    # Training goes on from the rank's own weights.
    assert identical(weights(model), own)
    before = settled_weights(model)
    train(model, optimizer, data[10:])
    assert largest_difference(settled_weights(model), before) > 1e-3


def test_the_log_replayed_in_one_process_gives_the_weights_bit_for_bit(log):
    model, optimizer = served(3)
    start = np.concatenate([each.reshape(-1) for each in weights(model)])
    train_unevenly(model, optimizer, local(regression()), 0.002)
    found = settled_weights(model)
    if hvkit.rank() == 0:
        for update in log:
            add([start], update.changes, hvkit.size())
        assert len(log) == 20 * hvkit.size()
        assert np.array_equal(start, np.concatenate([each.reshape(-1) for each in found]))
    assert hvkit.rank() == 0 or not log


@pytest.mark.parametrize("staleness", [0, 2])
def test_no_rank_is_farther_ahead_than_the_bound(staleness, log):
    model, optimizer = served(staleness)
    train_unevenly(model, optimizer, local(regression()), 0.003)
    settled_weights(model)
    assert max((update.lead for update in log), default=0) <= staleness


def test_without_a_bound_a_rank_takes_all_its_steps_before_another_takes_its_second(
    log, tmp_path_factory
):
    done = shared_folder(tmp_path_factory) / "done"
    model, optimizer = served(None)
    first, *others = local(regression())
    train(model, optimizer, [first])
    if not hvkit.is_main():
        wait_for(done)
    train(model, optimizer, others)
    if hvkit.is_main():
        done.touch()
    settled_weights(model)
    # Before its last step rank 0 has taken all others, and the other rank its first.
    assert not hvkit.is_main() or max(update.lead for update in log) == len(others) - 1


@pytest.mark.parametrize("staleness", [0, 2])
def test_ranks_may_take_different_numbers_of_steps(staleness, log):
    model, optimizer = served(staleness)
    data = local(regression())
    for count in (3 + 4 * hvkit.rank(), 12 - 2 * hvkit.rank()):
        train(model, optimizer, data[:count])
        settled_weights(model)
    # A rank that waits in any collective holds up nobody.
    train(model, optimizer, data[: 2 + 3 * hvkit.rank()])
    hvkit.barrier()
    if hvkit.rank() == 0:
        taken = [update.rank for update in log]
        assert [taken.count(r) for r in range(hvkit.size())] == [
            (3 + 4 * r) + (12 - 2 * r) + (2 + 3 * r) for r in range(hvkit.size())
        ]


@pytest.mark.parametrize("staleness", [0, 3])
def test_each_step_sends_the_weights_to_the_server_and_back(staleness):
    model, optimizer = served(staleness)
    data = local(regression())
    train(model, optimizer, data[:1])
    hvkit.barrier()
    before = hvkit.traffic()
    hvkit.barrier()  # the server answers as soon as another rank goes on
    train(model, optimizer, data[1:])
    hvkit.barrier()
    after = hvkit.traffic()
    size = 4 * sum(p.numel() for p in model.parameters())
    times = 19 * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)
    assert after["weights"].bytes - before["weights"].bytes == times * size
    assert after["weights"].messages - before["weights"].messages == times
    assert after.get("gradients") == before.get("gradients")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype):
    held = [torch.linspace(-1, 1, 12).to(dtype).view(3, 4), torch.ones(3)]
    model, optimizer = served(0, lambda p: torch.optim.SGD(p, 0.5), nn.ParameterList(held))
    before = model[0].detach().clone()
    for p in model:
        p.grad = torch.full_like(p, hvkit.rank() + 1)
    optimizer.step()
    mean = (hvkit.size() + 1) / 2
    assert model[0].dtype is dtype
    assert torch.allclose(model[0], before - 0.5 * mean, rtol=1e-2, atol=1e-2)
    assert torch.allclose(model[1], torch.ones(3) - 0.5 * mean, atol=1e-6)


def test_the_server_keeps_what_16_bits_would_round_away():
    model = nn.ParameterList([torch.ones(4, dtype=torch.bfloat16)])
    # One unit in the last place of 1, which the division by the number of ranks makes smaller.
    model, optimizer = served(0, lambda p: torch.optim.SGD(p, 2.0**-7), model)
    for _ in range(hvkit.size()):
        model[0].grad = torch.full_like(model[0], -1.0 if hvkit.rank() == 0 else 0.0)
        optimizer.step()
    assert model[0].tolist() == [1 + 2.0**-7] * 4


def test_an_overflow_on_one_rank_is_a_step_without_a_change(log):
    model, optimizer = served(0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step, (x, y) in enumerate(local(regression(steps=6))):
        optimizer.zero_grad()
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if step == 3 and hvkit.rank() == 0:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        assert alike(model)
    if hvkit.rank() == 0:
        still = [not any(each.any() for each in update.changes) for update in log]
        assert still.index(True) == 3 * hvkit.size()
        assert still.count(True) == 1


def test_frozen_parameters_do_not_travel_until_they_train():
    model = mlp()
    model[0].requires_grad_(False)
    before = weights(model[0])
    model, optimizer = served(0, model=model)
    data = local(regression(steps=6))
    train(model, optimizer, data[:1])
    hvkit.barrier()  # until the server has answered all
    sent = hvkit.traffic()["weights"].bytes
    hvkit.barrier()
    train(model, optimizer, data[1:3])
    hvkit.barrier()
    size = 4 * sum(p.numel() for p in model[2].parameters())
    times = 2 * (hvkit.size() - 1 if hvkit.rank() == 0 else 1)
    assert hvkit.traffic()["weights"].bytes - sent == times * size
    assert identical(weights(model[0]), before)
    model[0].requires_grad_(True)
    train(model, optimizer, data[3:])
    assert alike(model)
    assert not identical(weights(model[0]), before)


def test_parameters_that_are_added_later_are_exchanged():
    model = mlp()
    optimizer = sgd(model[0].parameters())
    hvkit.distribute(model, optimizer, strategy=hvkit.ParameterServer(0))
    data = local(regression(steps=4))
    train(model, optimizer, data[:1])
    extra = nn.Parameter(torch.full((4,), float(hvkit.rank())))
    optimizer.add_param_group({"params": [*model[2].parameters(), extra]})
    assert extra.tolist() == [0.0] * 4
    for x, y in data[1:]:
        optimizer.zero_grad()
        F.mse_loss(model(x) + extra, y).backward()
        optimizer.step()
    assert same_on_all_ranks([*weights(model), *arrays([extra])])
    assert extra.abs().min() > 0


def test_two_optimizers_exchange_all_that_trains():
    model = mlp()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, [first, second], strategy=hvkit.ParameterServer(0))
    for step, (x, y) in enumerate(local(regression(steps=8))):
        model.zero_grad()
        backward(model, (x, y))
        # Not the same one on every rank.
        (first, second)[(step + hvkit.rank()) % 2].step()
        assert alike(model)


def test_gradients_of_several_backward_passes_add_up():
    data = local(regression(steps=6))
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ParameterServer(0)):
        model, optimizer = in_rounds(strategy, accumulate=2)
        for number, batch in enumerate(data):
            backward(model, batch)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append(weights(model))
    assert largest_difference(*found) < 1e-5


def test_row_sparse_gradients():
    table = nn.Embedding(6, 3, sparse=True)
    model, optimizer = served(0, lambda p: torch.optim.SGD(p, 0.5), table)
    before = weights(model)[0]
    model(torch.tensor([hvkit.rank()])).sum().backward()
    optimizer.step()
    expected = before.copy()
    expected[: hvkit.size()] -= 0.5 / hvkit.size()
    assert largest_difference(weights(model), [expected]) < 1e-6


def test_batch_norm_statistics_are_averaged_where_the_model_is_settled():
    layers = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4)
    model, optimizer = served(0, model=nn.Sequential(*layers))
    train(model, optimizer, local(regression(steps=3)))
    model.eval()
    own = arrays(model.buffers())
    mean = [np.mean(each, axis=0) for each in zip(*hvkit.allgather(own), strict=True)]
    assert not same_on_all_ranks(own)
    with hvkit.settled(model):
        assert alike(model)
        assert largest_difference(arrays(model.buffers())[:2], mean[:2]) < 1e-6
    assert identical(arrays(model.buffers()), own)


def test_a_model_that_is_dropped_is_freed_also_on_the_server():
    model, optimizer = served(2)
    train(model, optimizer, local(regression(steps=3)))
    held = weakref.ref(model[0].weight)
    running = parameter_server_client._client.server
    newest = max(running._models) if running else None
    del model, optimizer
    gc.collect()
    assert held() is None
    hvkit.barrier()
    hvkit.barrier()
    assert running is None or newest not in running._models
