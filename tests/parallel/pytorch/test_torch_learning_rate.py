"""The learning rate is the user's everywhere but inside the update."""

import copy
import warnings

import pytest
import torch
from torch_nets import local, mlp, regression
from twin import (
    RATE,
    SETTERS,
    Twin,
    compare,
    identical,
    multiplied,
    new_gradients,
    rates_of,
    sgd,
    tensor_sgd,
)

import hvkit

pytestmark = pytest.mark.two_ranks


@pytest.mark.parametrize(
    ("setter", "made", "warmup", "make"),
    [
        (setter, *how)
        for setter in SETTERS
        for how in [("before", 4, sgd), ("after", 0, tensor_sgd)]
    ],
)
def test_schedulers_see_the_users_rate_and_updates_use_the_multiplied(setter, made, warmup, make):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", r".*optimizer\.step")  # that it was called too late
        compare(make, **{made: SETTERS[setter]}, warmup=warmup)


@pytest.mark.parametrize(
    ("scaling", "warmup"), [("none", 0), ("none", 4), ("sqrt", 0), ("sqrt", 4)]
)
def test_the_other_rules(scaling, warmup):
    compare(sgd, after=SETTERS["StepLR"], scaling=scaling, warmup=warmup)


def groups_of(model):
    return [{"params": model[0].parameters()}, {"params": model[2].parameters()}]


def of_all(make, lr=0.01, **options):
    return lambda model: make(model.parameters(), lr=copy.deepcopy(lr), **options)


OPTIMIZERS = {
    "two groups": lambda m: torch.optim.SGD(
        [groups_of(m)[0] | {"lr": 0.3}, groups_of(m)[1]], lr=0.1
    ),
    "two groups, one tensor": lambda m: torch.optim.SGD(groups_of(m), lr=torch.tensor(0.1)),
    "foreach": of_all(torch.optim.Adam, foreach=True),
    "fused": of_all(torch.optim.Adam, fused=True),
    "fused, tensor": of_all(torch.optim.Adam, torch.tensor(0.01), fused=True),
    "SGD fused": of_all(torch.optim.SGD, fused=True),
    "weight decay": of_all(torch.optim.AdamW, weight_decay=0.1),
    "Rprop": of_all(torch.optim.Rprop),
    "ASGD": of_all(torch.optim.ASGD),
    "Adafactor": of_all(torch.optim.Adafactor),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_groups(name):
    compare(OPTIMIZERS[name], after=SETTERS["StepLR"], warmup=4)


def test_a_rate_that_requires_a_gradient_is_replaced_not_changed_in_place():
    """Writing to it would change values that autograd has kept."""
    model = mlp()
    optimizer = sgd(model, torch.tensor(RATE, requires_grad=True))
    twin = Twin(model, tensor_sgd)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    rate = optimizer.param_groups[0]["lr"]
    penalty = rate.square()  # keeps the rate for its gradient
    new_gradients(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [multiplied(optimizer.param_groups[0], hvkit.size())], optimizer.param_groups)
    assert identical(model, twin.model)
    assert optimizer.param_groups[0]["lr"] is rate
    penalty.backward()
    assert rate.grad == 2 * rate


def test_a_tensor_that_the_script_holds_sets_the_rate_on_every_rank():
    model = mlp()
    rate = torch.tensor(0.7 + hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    assert rate == torch.tensor(0.7)  # rank 0's
    twin = Twin(model, sgd)
    rate.fill_(0.25)
    new_gradients(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [0.25 * hvkit.size()], optimizer.param_groups)
    assert identical(model, twin.model)
    assert rate == 0.25


@pytest.mark.parametrize("kind", ["float", "own", "shared"])
def test_groups_added_later_keep_the_users_rate(kind):
    model, shared = mlp(), torch.tensor(RATE)
    rate = {"float": RATE, "own": torch.tensor(RATE), "shared": shared}[kind]
    optimizer = torch.optim.SGD(model[0].parameters(), lr=shared)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    optimizer.add_param_group({"params": model[2].parameters(), "lr": rate})
    before = [p.detach().clone() for p in model.parameters()]
    for batch in local(regression(steps=3)):
        new_gradients(model, batch)
        optimizer.step()
        assert rates_of(optimizer) == [pytest.approx(RATE)] * 2
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - RATE * hvkit.size() * p.grad)
            old.copy_(p.detach())


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_saved_rates_are_the_users_whenever_they_are_loaded(loaded, tmp_path):
    model, optimizer = compare(sgd, after=SETTERS["StepLR"], warmup=4)
    rate = optimizer.param_groups[0]["lr"]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == rate < RATE
    model = mlp()
    optimizer = sgd(model, 0.7)
    if loaded == "before":
        optimizer.load_state_dict(state)
    twin = Twin(model, sgd)
    twin.optimizer.load_state_dict(copy.deepcopy(state))
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    if loaded == "after":
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == rate
    new_gradients(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [rate * hvkit.size()], optimizer.param_groups)
    assert identical(model, twin.model)


def test_a_copy_of_the_optimizer_is_a_plain_one():
    model = mlp()
    optimizer = sgd(model)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    twin = copy.deepcopy(optimizer)
    (p, *_) = twin.param_groups[0]["params"]
    before, p.grad = p.detach().clone(), torch.ones_like(p)
    twin.step()
    assert torch.equal(p, before - RATE)


def test_rank_0_logs_the_rate_that_a_step_uses(capfd):
    """``describe`` has its own test."""
    model, n = mlp(), hvkit.size()
    groups = groups_of(model)
    # The first warms up, by a scheduler of the user's.
    groups[0]["lr"], groups[0]["initial_lr"], groups[1]["lr"] = 0.0, 0.5, torch.tensor(0.25)
    hvkit.distribute(model, torch.optim.Adam(groups), lr_scaling="sqrt")
    line = (
        f"hvkit: {n} ranks; learning rate 0.5, 0.25; steps use {0.5 * n**0.5:g}, "
        f'{0.25 * n**0.5:g} (lr_scaling="sqrt")\n'
    )
    assert capfd.readouterr().err == (line if hvkit.is_main() else "")
