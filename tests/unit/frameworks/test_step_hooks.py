"""What acts around an update runs in one order, however it was put together."""

import pytest
import torch

from hvkit.frameworks.pytorch.step_hooks import Feature, Order, UpdateHooks, attach

OUTERMOST_FIRST = ["TIMELINE", "RANKS", "NONFINITE", "DIVISION", "RATE"]


def recorded(place, events):
    """A feature that has everything, and notes when it is called."""

    def note(phase):
        def called(*args):
            events.append(f"{phase} {place.name}")
            return args[-1] if phase == "loss" else None

        return called

    phases = ("before", "gradients", "loss", "after", "failed")
    return Feature(place, **{phase: note(phase) for phase in phases})


def hooks_of(places, events, *features):
    hooks = UpdateHooks()
    for feature in (*(recorded(place, events) for place in places), *features):
        hooks.add(feature)
    return hooks


def refuse(*args):
    raise ValueError("not now")


@pytest.mark.parametrize("places", [list(Order), list(reversed(Order))])
def test_features_nest_in_the_order_of_their_places(places):
    events = []
    hooks = hooks_of(places, events)
    hooks.begin("optimizer")
    events.append("update")
    hooks.end("optimizer")
    assert events == [
        *(f"before {name}" for name in OUTERMOST_FIRST),
        *(f"gradients {name}" for name in OUTERMOST_FIRST),
        "update",
        *(f"after {name}" for name in reversed(OUTERMOST_FIRST)),
    ]


def test_after_an_update_that_raised_all_undo_theirs_once():
    events = []
    hooks = hooks_of(Order, events)
    hooks.begin("optimizer")
    events.clear()
    for _ in range(2):
        hooks.fail("optimizer", 0)
    assert events == [f"failed {name}" for name in reversed(OUTERMOST_FIRST)]


def test_a_feature_that_refuses_an_update_ends_it():
    events = []
    places = [Order.TIMELINE, Order.DIVISION]
    hooks = hooks_of(places, events, Feature(Order.RANKS, before=refuse))
    for _ in range(2):
        events.clear()
        with pytest.raises(ValueError, match="not now"):
            hooks.begin("optimizer")
        assert events == ["before TIMELINE", "failed DIVISION", "failed TIMELINE"]


def test_a_feature_that_raises_after_an_update_has_those_outside_of_it_undo_theirs():
    events = []
    places = [Order.TIMELINE, Order.NONFINITE, Order.RATE]
    hooks = hooks_of(places, events, Feature(Order.DIVISION, after=refuse))
    for _ in range(2):
        hooks.begin("optimizer")
        events.clear()
        with pytest.raises(ValueError, match="not now"):
            hooks.end("optimizer")
        hooks.fail("optimizer", 0)  # as PyTorch's port does for all that raises in a step
        assert events == ["after RATE", "failed NONFINITE", "failed TIMELINE"]


def test_gradients_of_a_closure_are_used_after_each_call_of_it():
    events = []
    hooks = hooks_of([Order.RANKS, Order.NONFINITE], events)
    called = hooks.begin("optimizer", lambda: events.append("closure") or 0.5)
    assert events == ["before RANKS", "before NONFINITE"]
    for _ in range(2):
        events.clear()
        assert called() == 0.5
        gradients, losses = ["gradients RANKS", "gradients NONFINITE"], ["NONFINITE", "RANKS"]
        assert events == ["closure", *gradients, *(f"loss {name}" for name in losses)]


def test_a_closure_that_no_feature_uses_stays_as_it_is():
    hooks = hooks_of([], [], Feature(Order.RANKS, before=lambda *_: None))

    def closure(by):
        return by

    assert hooks.begin("optimizer", closure) is closure


@pytest.mark.parametrize("place", [Order.RANKS, Order.RATE])
def test_an_optimizer_may_pass_arguments_to_its_closure(place):
    class Passes(torch.optim.SGD):
        def step(self, closure):
            return closure(3)

    optimizer = Passes([torch.nn.Parameter(torch.ones(1))], 0.1)
    features = {Order.RANKS: recorded(Order.RANKS, []), Order.RATE: noting(Order.RATE, [])}
    attach(optimizer, hooks_of([], [], features[place]))
    assert optimizer.step(lambda by: by) == 3


def test_a_place_is_for_one_feature():
    hooks = hooks_of([Order.RATE], [])
    with pytest.raises(ValueError, match="two features at RATE"):
        hooks.add(Feature(Order.RATE))


def test_updates_inside_another_belong_to_it():
    events = []
    hooks = hooks_of([Order.RANKS], events)
    hooks.begin("outer")
    assert hooks.begin("inner") is None
    hooks.end("inner")
    assert events == ["before RANKS", "gradients RANKS"]
    hooks.begin("inner")
    hooks.fail("inner", 1)  # and the outer one goes on
    hooks.end("outer")
    assert events == ["before RANKS", "gradients RANKS", "after RANKS"]


def test_an_update_inside_another_that_has_new_gradients_gets_the_hooks():
    """The outer one has computed them itself, or has failed unnoticed."""
    events, new = [], []
    hooks = hooks_of([Order.NONFINITE], events, Feature(Order.RANKS, renewed=lambda: bool(new)))
    hooks.begin("outer")
    new.append("gradient")
    events.clear()
    hooks.begin("inner")
    assert events == ["failed NONFINITE", "before NONFINITE", "gradients NONFINITE"]
    hooks.end("inner")
    hooks.end("outer")
    assert events[3:] == ["after NONFINITE"]
    assert hooks.depth == 0


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


def noting(place, events):
    """A feature closest to the update, which undoes only what it has begun."""
    begun = []

    def ends():
        if begun:
            events.append(f"{place.name} {begun.pop()} ends")

    def begins(optimizer):
        begun.append("update")
        events.append(f"{place.name} update begins")

    return Feature(place, update_begins=begins, update_ends=ends)


@pytest.fixture
def events():
    return []


@pytest.fixture
def optimizer(events):
    """An optimizer with hooks of the user's, before and after hvkit's are attached."""
    found = Noted([torch.nn.Parameter(torch.ones(1))], 0.1, events)

    def register(when):
        found.register_step_pre_hook(lambda *_: events.append(f"{when}, before"))
        found.register_step_post_hook(lambda *_: events.append(f"{when}, after"))

    hooks = hooks_of(
        [Order.RANKS], events, *(noting(p, events) for p in (Order.RATE, Order.DIVISION))
    )
    register("earlier hook")
    attach(found, hooks)
    register("later hook")
    return found


BEGINS = ["DIVISION update begins", "RATE update begins"]
ENDS = ["RATE update ends", "DIVISION update ends"]
AFTER = ["earlier hook, after", "after RANKS", "later hook, after"]


def test_a_step(optimizer, events):
    for _ in range(2):
        events.clear()
        optimizer.step()
        before = ["earlier hook, before", "before RANKS", "gradients RANKS", "later hook, before"]
        assert events == [*before, *BEGINS, "update", *ENDS, *AFTER]


def test_a_step_with_a_closure_that_sees_the_users_rate(optimizer, events):
    optimizer.step(lambda: events.append("closure") or 0.5)
    before = ["earlier hook, before", "before RANKS", "later hook, before"]
    of_closure = ["closure", "gradients RANKS", "loss RANKS"]
    assert events == [*before, *BEGINS, *ENDS, *of_closure, *BEGINS, "update", *ENDS, *AFTER]


def test_a_step_that_raises(optimizer, events):
    optimizer.fails = True
    for _ in range(2):
        events.clear()
        with pytest.raises(MemoryError):
            optimizer.step()
        assert events[4:] == [*BEGINS, "update", *ENDS, "failed RANKS"]
