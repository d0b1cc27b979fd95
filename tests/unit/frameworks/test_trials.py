"""Which optimizers ranks can divide is decided by what they do to a few small parameters."""

import pytest
import torch
from torch import nn

from hvkit.frameworks.pytorch.divided_state.trials import why_not_by_element, why_not_by_parameter


class Plain(torch.optim.Optimizer):
    """Signs of gradients; ``scale`` gives the factor of a parameter's step."""

    scale = staticmethod(lambda p, held, steps: 1.0)

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr})
        self.settings = {"first": self.param_groups[0]["params"][0]}

    def step(self, closure=None):
        (group,) = self.param_groups
        held = [p for p in group["params"] if p.grad is not None]
        for p in held:
            steps = self.state[p]["steps"] = self.state[p].get("steps", 0) + 1
            self.change(p, group["lr"] * self.scale(p, held, steps))

    def change(self, p, length):
        p.data.add_(p.grad.sign() * length)


def scaled(scale):
    return type("Scaled", (Plain,), {"scale": staticmethod(scale)})


NormOfAll = scaled(lambda p, held, steps: 1 / sum(each.grad.norm() for each in held))
NormOfOne = scaled(lambda p, held, steps: 1 / p.grad.norm())
LateNormOfAll = scaled(
    lambda p, held, steps: 1 / sum(each.grad.norm() for each in held) if steps > 5 else 1.0
)


class CountsAll(Plain):
    """Keeps a number in its groups that all parameters change, and uses it much later."""

    def change(self, p, length):
        super().change(p, length)
        self.param_groups[0]["seen"] = self.param_groups[0].get("seen", 0) + p.numel()


class Averages(Plain):
    """Shows other weights in evaluation, as schedule-free optimizers do."""

    def train(self):
        pass

    def eval(self):
        for p in self.state:
            p.data.mul_(0.5)


class Noisy(Plain):
    def change(self, p, length):
        p.data.add_(torch.randn_like(p) * length)


class WithClosure(Plain):
    def step(self, closure):
        closure()


class Broken(Plain):
    def change(self, p, length):
        p.data.mul_(1 / 0)


def optimizer_of(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(6, 4), nn.Linear(4, 1))
    return kind(model.parameters(), lr=0.1)


DEPENDS = "its update of one parameter depends on others, or is random"
PARTS = "its update of one part of a parameter depends on others, or is random"


class OwnAdagrad(torch.optim.Adagrad):
    """It has a state before its first step."""


@pytest.mark.parametrize(
    ("kind", "by_parameter", "by_element"),
    [
        (torch.optim.AdamW, "", ""),
        (Plain, "", ""),
        (OwnAdagrad, "", ""),
        (NormOfOne, "", PARTS),
        (torch.optim.Adafactor, "", PARTS),
        (NormOfAll, DEPENDS, PARTS),
        (LateNormOfAll, DEPENDS, PARTS),
        (Noisy, DEPENDS, PARTS),
        (CountsAll, "'seen' from all parameters together", "'seen' from all"),
        (Averages, "eval() changes only weights whose state a rank holds", ""),
        (torch.optim.SparseAdam, "", "whole tensors only"),
        (WithClosure, "its step() needs a closure", "its step() needs a closure"),
        (Broken, "failed with ZeroDivisionError: ", "failed with ZeroDivisionError"),
    ],
)
def test_optimizers_are_divided_only_if_a_trial_shows_that_they_can_be(
    kind, by_parameter, by_element
):
    for why_not, expected in (
        (why_not_by_parameter, by_parameter),
        (why_not_by_element, by_element),
    ):
        found = why_not(optimizer_of(kind))
        assert expected in found
        assert bool(expected) == bool(found)


def test_a_trial_changes_nothing():
    calls = []
    noisy, optimizer = optimizer_of(Noisy), optimizer_of(Averages)
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameters = optimizer.param_groups[0]["params"]
    before = [p.detach().clone() for p in parameters]
    random = torch.get_rng_state()
    assert why_not_by_parameter(noisy)
    assert why_not_by_parameter(optimizer)
    assert all(map(torch.equal, parameters, before))
    assert all(p.grad is None for p in parameters)
    assert optimizer.param_groups[0]["params"][0] is optimizer.settings["first"]
    assert torch.equal(torch.get_rng_state(), random)
    assert not optimizer.state
    assert not calls
    assert scheduler.last_epoch == 0


def test_an_optimizer_that_has_trained_is_tried_with_its_state():
    optimizer = optimizer_of(type("OwnAdamW", (torch.optim.AdamW,), {}))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = {p: {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    assert why_not_by_parameter(optimizer) == why_not_by_element(optimizer) == ""
    for p, state in optimizer.state.items():
        assert all(torch.equal(value, before[p][key]) for key, value in state.items())
