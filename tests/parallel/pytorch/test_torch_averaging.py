"""PyTorch: strategies that average gradients in every step."""

import itertools

import pytest
import torch
from ranks import identical, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch_nets import (
    arrays,
    distributed,
    equals_one_process,
    local,
    raised_everywhere,
    regression,
    train,
    weights,
)

import hvkit
from hvkit.frameworks.pytorch.divided_state.sharded import OwnedParameters
from hvkit.transport.traffic import Sent


def plain(parameters):
    return torch.optim.SGD(parameters, 0.05)


EVERYTHING = hvkit.DeMo(top_k=16, chunk=4, decay=0.0, sign=False)


@pytest.mark.parametrize("strategy", [hvkit.Centralized(), EVERYTHING], ids=str)
def test_it_trains_the_model_of_one_process(strategy):
    """Also decoupled momentum, if it keeps nothing back."""
    assert equals_one_process(plain, data=regression(steps=10), strategy=strategy)


def sent_in_a_step(strategy, **options):
    """Bytes of gradients that each rank sends, in rank order, and the parameters' bytes."""
    model, _ = distributed(model=nn.Linear(300, 300), strategy=strategy, **options)
    before = hvkit.traffic().get("gradients", Sent())
    model(torch.ones(2, 300)).sum().backward()
    mine = hvkit.traffic()["gradients"].bytes - before.bytes
    return hvkit.allgather(mine), sum(p.nbytes for p in model.parameters())


def test_the_rank_that_averages_for_all_sends_to_all():
    sent, size = sent_in_a_step(hvkit.Centralized())
    # The report of each step is small, and goes around the ring.
    first, *others = sent
    assert first == pytest.approx((hvkit.size() - 1) * size, rel=0.03)
    assert others == pytest.approx([size] * len(others), rel=0.03)
    rounded, _ = sent_in_a_step(hvkit.Centralized(), compression="int8")
    assert rounded[0] == pytest.approx(first * 260 / 1024, rel=0.03)


MAKE = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "own": lambda p: Own(p, 0.01),
}


class NormOfAll(torch.optim.SGD):
    """One step of a length, for all parameters together."""

    def step(self, closure=None):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(held, 0.1)
        return super().step(closure)


class Own(torch.optim.AdamW):
    """A user's class, which updates each parameter on its own."""


def large(seed=0):
    torch.manual_seed(seed)
    widths = [8, 40, 30, 20, 10, 4]
    layers = [nn.Sequential(nn.Linear(*w), nn.Tanh()) for w in itertools.pairwise(widths)]
    return nn.Sequential(*layers)


def both(make, train=train, steps=10, model=large):
    """Models and optimizers, trained with the state whole and with the state sharded."""
    found = []
    for strategy in (hvkit.Synchronous(), hvkit.ShardedOptimizer()):
        each, optimizer = distributed(make, model(), strategy=strategy)
        train(each, optimizer, local(regression(steps)))
        found += [each, optimizer]
    return found


def gives_the_same_bits(*options, **named):
    """Whether the sharded state gives the weights that the whole state gives, on every rank."""
    whole, _, model, _ = both(*options, **named)
    assert same_on_all_ranks(weights(model))
    return identical(model.parameters(), whole.parameters())


def clipped(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


@pytest.mark.parametrize("name", MAKE)
def test_a_sharded_optimizer_gives_the_same_weights_bit_for_bit(name):
    assert gives_the_same_bits(MAKE[name], clipped)


def test_a_sharded_optimizer_keeps_a_part_of_the_state():
    _, whole, model, optimizer = both(MAKE["adamw"], steps=1)
    moments = sum(t.nbytes for s in whole.state.values() for t in s.values() if t.dim())
    mine = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
    largest = max(p.nbytes for p in model.parameters())
    assert 0 < mine <= moments / hvkit.size() + 2 * largest
    assert sum(hvkit.allgather(mine)) == moments


def test_a_sharded_optimizer_sends_half_as_much_again():
    model = nn.Sequential(*[nn.Linear(100, 100) for _ in range(12)])
    strategy = hvkit.ShardedOptimizer()
    model, optimizer = distributed(torch.optim.AdamW, model, strategy=strategy)
    total = []
    for _ in range(2):  # the first step also compares the ranks
        model(torch.ones(2, 100)).sum().backward()
        optimizer.step()
        total.append(sum(sent.bytes for sent in hvkit.traffic().values()))
    mine = total[1] - total[0]
    size = sum(p.nbytes for p in model.parameters())
    mean = sum(hvkit.allgather(mine)) / hvkit.size()
    assert mean == pytest.approx(3 * (hvkit.size() - 1) / hvkit.size() * size, rel=0.03)


def test_ranks_differ_if_the_parts_are_not_sent(monkeypatch):
    monkeypatch.setattr(OwnedParameters, "send", lambda *_: None)
    model, optimizer = both(MAKE["adamw"], steps=1)[2:]
    assert not same_on_all_ranks(weights(model))
    with pytest.raises(hvkit.RanksDisagreeError, match="differ"):
        hvkit.Checkpoint("unused", model=model, optimizer=optimizer).save(epoch=0, step=1)


def test_the_state_is_saved_whole(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    whole, reference, model, optimizer = both(MAKE["adamw"])
    with hvkit.settled(model, optimizer):
        if hvkit.rank() == 0:
            assert repr(optimizer.state_dict()) == repr(reference.state_dict())
    with pytest.raises(ValueError, match=r"hvkit\.settled\(optimizer\)"):
        optimizer.state_dict()
    saved = hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=0, step=10)
    if hvkit.rank() == 0:
        plain = torch.optim.AdamW(large().parameters())
        plain.load_state_dict(torch.load(saved / "optimizer.pt"))
        assert len(plain.state) == len(list(model.parameters()))
    hvkit.barrier()

    again, resumed = distributed(torch.optim.AdamW, large(1), strategy=hvkit.ShardedOptimizer())
    hvkit.Checkpoint(folder, model=again, optimizer=resumed).restore()
    assert resumed.state.keys() < set(again.parameters())
    data = local(regression(steps=14))[10:]
    train(again, resumed, data)
    train(whole, reference, data)
    assert identical(again.parameters(), whole.parameters())


def test_a_state_from_before_the_call_is_divided():
    def warm():
        model = large()
        optimizer = MAKE["adamw"](model.parameters())
        train(model, optimizer, regression(steps=2))
        return model, optimizer

    models = []
    for strategy in (hvkit.Synchronous(), hvkit.ShardedOptimizer()):
        model, optimizer = hvkit.distribute(*warm(), strategy=strategy)
        train(model, optimizer, local(regression(steps=4)))
        models.append(model)
    assert identical(*(each.parameters() for each in models))
    assert len(optimizer.state) < len(list(model.parameters()))


def test_frozen_and_added_parameters_and_failing_steps():
    def with_changes(model, optimizer, data):
        model[0].requires_grad_(False)
        train(model, optimizer, data[:3])
        extra = nn.Parameter(torch.ones(4))
        optimizer.add_param_group({"params": [extra], "lr": 0.1})
        model[0].requires_grad_(True)
        for x, y in data[3:]:
            optimizer.zero_grad()
            F.mse_loss(model(x) * extra, y).backward()
            before = [p.grad is not None for p in model.parameters()]
            optimizer.param_groups[0]["betas"] = None
            with pytest.raises(TypeError, match="NoneType"):
                optimizer.step()
            optimizer.param_groups[0]["betas"] = (0.9, 0.999)
            assert [p.grad is not None for p in model.parameters()] == before
            optimizer.step()
        model.extra = extra

    assert gives_the_same_bits(MAKE["adamw"], with_changes)


def test_half_precision_and_scaled_gradients():
    def scaled(model, optimizer, data):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
        for step, (x, y) in enumerate(data):
            optimizer.zero_grad()
            overflow = float("inf") if step == 2 and hvkit.rank() == 0 else 1
            scaler.scale(overflow * F.mse_loss(model(x.bfloat16()).float(), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert gives_the_same_bits(MAKE["sgd"], scaled, model=lambda: large().bfloat16())


def test_parameters_of_several_dtypes_are_sent():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.few = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
            self.layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)], nn.Linear(8, 4))

        def forward(self, x):
            return self.layers(x) * self.few.sum()

    assert gives_the_same_bits(MAKE["adamw"], model=Mixed)


def refused(call, text):
    return raised_everywhere(call, text, kind=ValueError)


def test_updates_of_all_parameters_together_are_refused():
    sharded = {"strategy": hvkit.ShardedOptimizer()}
    text = "LBFGS computes its step from all parameters together"
    assert refused(lambda: distributed(torch.optim.LBFGS, **sharded), text)
    text = "NormOfAll does not update each parameter on its own"
    assert refused(lambda: distributed(lambda p: NormOfAll(p, 0.1), **sharded), text)
    _, optimizer = distributed(**sharded)
    assert refused(lambda: optimizer.step(lambda: 0.0), "call backward() before step()")


def test_decoupled_momentum_moves_each_weight_by_the_learning_rate():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.unused, self.last = nn.Conv2d(1, 3, 3), nn.Linear(2, 2), nn.Linear(3, 2)

        def forward(self, x):
            return self.last(self.conv(x).mean((2, 3)))

    torch.manual_seed(0)
    model = Net().bfloat16()
    model, optimizer = distributed(
        lambda p: torch.optim.SGD(p, 2.0**-6), model, strategy=hvkit.DeMo()
    )
    start = [p.detach().clone() for p in model.parameters()]
    x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(hvkit.rank())).bfloat16()
    model(x).square().sum().backward()
    optimizer.step()
    for (name, p), before in zip(model.named_parameters(), start, strict=True):
        moved = float((p - before).detach().abs().max())
        assert moved == pytest.approx(0 if "unused" in name else 2.0**-6, rel=0.3)
    assert same_on_all_ranks(arrays(model.parameters()))


def test_decoupled_momentum_refuses_what_it_cannot_use():
    demo = {"strategy": hvkit.DeMo()}
    table, _ = distributed(plain, nn.Embedding(4, 3, sparse=True), **demo)
    assert refused(table(torch.tensor([1])).sum().backward, "sparse=False")
    doubles, _ = distributed(plain, large().double(), **demo)
    out = doubles(torch.ones(2, 8).double())
    assert refused(out.sum().backward, "at most 32 bits")
    text = "is a compression itself"
    assert refused(lambda: distributed(plain, compression="int8", **demo), text)


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (plain, 0),
        (lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p, 0.01), 1),
        (lambda p: torch.optim.Adadelta(p, 1.0), 1),
    ],
)
def test_a_second_momentum_is_logged(make, count, capsys):
    distributed(make, strategy=hvkit.DeMo())
    logged = capsys.readouterr().err
    assert logged.count("has a momentum of its own") == (count if hvkit.rank() == 0 else 0)
