"""The order of all that happens in a step of PyTorch's optimizers."""

import pytest
import torch

from hvkit.frameworks.pytorch.step_hooks import UpdateHooks, attach
from hvkit.sync.update_hooks import Feature, Order


class Noted(torch.optim.SGD):
    """Notes its updates, or raises in them."""

    fails = False

    def __init__(self, params, lr, events):
        super().__init__(params, lr=lr)
        self.events = events

    def step(self, closure=None):
        if closure is not None:
            closure()
        self.events.append("update")
        if self.fails:
            raise MemoryError("in the update")


class NotedRate:
    def __init__(self, events):
        self.events = events
        self.multiplied = False

    def multiply(self, optimizer):
        self.events.append("multiply")
        self.multiplied = True

    def restore(self):
        if self.multiplied:
            self.events.append("restore")
        self.multiplied = False


def noted(events, *, of_user):
    """An optimizer with hooks of the user's, before and after hvkit's are attached."""
    optimizer = Noted([torch.nn.Parameter(torch.ones(1))], 0.1, events)

    def register(when):
        optimizer.register_step_pre_hook(lambda *_: events.append(f"{when}, before"))
        optimizer.register_step_post_hook(lambda *_: events.append(f"{when}, after"))

    hooks = UpdateHooks()
    rate = NotedRate(events)
    hooks.add(Feature(Order.RATE, update_begins=rate.multiply, update_ends=rate.restore))
    hooks.add(
        Feature(
            Order.RANKS,
            before=lambda *_: events.append("before"),
            gradients=lambda _: events.append("gradients"),
            after=lambda _: events.append("after"),
            failed=lambda _: events.append("failed"),
        )
    )
    if of_user:
        register("earlier hook")
    attach([optimizer], hooks)
    if of_user:
        register("later hook")
    return optimizer


def test_a_step():
    events = []
    optimizer = noted(events, of_user=True)
    for _ in range(2):
        events.clear()
        optimizer.step()
        assert events == [
            "earlier hook, before",
            "before",
            "gradients",
            "later hook, before",
            "multiply",
            "update",
            "restore",
            "earlier hook, after",
            "after",
            "later hook, after",
        ]


def test_a_step_with_a_closure():
    events = []
    optimizer = noted(events, of_user=False)
    optimizer.step(lambda: events.append("closure") or 0.5)
    assert events == [
        "before",
        "multiply",
        "restore",
        "closure",
        "gradients",
        "multiply",
        "update",
        "restore",
        "after",
    ]


def test_a_step_that_raises():
    events = []
    optimizer = noted(events, of_user=False)
    optimizer.fails = True
    for _ in range(2):
        events.clear()
        with pytest.raises(MemoryError):
            optimizer.step()
        assert events == ["before", "gradients", "multiply", "update", "restore", "failed"]
