"""What acts around an update runs in one order, however it was put together."""

import pytest

from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.sync.update_hooks import Feature, Order


def recorded(place, events):
    """A feature that has everything, and notes when it is called."""

    def note(phase):
        def called(*args):
            events.append(f"{phase} {place.name}")
            return args[-1] if phase == "loss" else None

        return called

    phases = ("before", "gradients", "loss", "after", "failed")
    return Feature(place, **{phase: note(phase) for phase in phases})


def hooks_of(places, events):
    hooks = UpdateHooks()
    for place in places:
        hooks.add(recorded(place, events))
    return hooks


OUTERMOST_FIRST = ["TIMELINE", "RANKS", "NONFINITE", "DIVISION", "RATE"]


def test_the_places():
    assert [place.name for place in Order] == OUTERMOST_FIRST


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


def test_after_an_update_that_raised():
    events = []
    hooks = hooks_of(Order, events)
    hooks.begin("optimizer")
    events.clear()
    hooks.fail("optimizer", 0)
    assert events == [f"failed {name}" for name in reversed(OUTERMOST_FIRST)]
    hooks.fail("optimizer", 0)  # known already
    assert len(events) == len(OUTERMOST_FIRST)


def test_a_feature_that_refuses_an_update_ends_it():
    events = []
    hooks = hooks_of([Order.TIMELINE, Order.DIVISION], events)

    def refuse(optimizer, closure):
        raise ValueError("not now")

    hooks.add(Feature(Order.RANKS, before=refuse))
    for _ in range(2):
        events.clear()
        with pytest.raises(ValueError, match="not now"):
            hooks.begin("optimizer")
        assert events == ["before TIMELINE", "failed DIVISION", "failed TIMELINE"]


def test_a_feature_that_raises_after_an_update_has_those_outside_of_it_undo_theirs():
    events = []
    hooks = hooks_of([Order.TIMELINE, Order.NONFINITE, Order.RATE], events)

    def refuse(optimizer):
        raise ValueError("no mean")

    hooks.add(Feature(Order.DIVISION, after=refuse))
    for _ in range(2):
        hooks.begin("optimizer")
        events.clear()
        with pytest.raises(ValueError, match="no mean"):
            hooks.end("optimizer")
        hooks.fail("optimizer", 0)  # as PyTorch's port does for all that raises in a step
        assert events == ["after RATE", "failed NONFINITE", "failed TIMELINE"]


def test_what_is_closest_to_an_update_nests_as_well():
    events = []
    hooks = UpdateHooks()
    assert not hooks.act_in_updates
    for place in (Order.RATE, Order.DIVISION):
        begins, ends = f"{place.name} begins", f"{place.name} ends"
        hooks.add(
            Feature(
                place,
                update_begins=lambda optimizer, text=begins: events.append(text),
                update_ends=lambda text=ends: events.append(text),
            )
        )
    assert hooks.act_in_updates
    hooks.begin_update("optimizer")
    hooks.end_update()
    assert events == ["DIVISION begins", "RATE begins", "RATE ends", "DIVISION ends"]


def test_gradients_of_a_closure_are_used_after_each_call_of_it():
    events = []
    hooks = hooks_of([Order.RANKS, Order.NONFINITE], events)

    def closure():
        events.append("closure")
        return 0.5

    called = hooks.begin("optimizer", closure)
    assert events == ["before RANKS", "before NONFINITE"]
    for _ in range(2):
        events.clear()
        assert called() == 0.5
        assert events == [
            "closure",
            "gradients RANKS",
            "gradients NONFINITE",
            "loss NONFINITE",
            "loss RANKS",
        ]


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
    hooks = hooks_of([Order.NONFINITE], events)
    hooks.add(Feature(Order.RANKS, renewed=lambda: bool(new)))
    hooks.begin("outer")
    new.append("gradient")
    events.clear()
    hooks.begin("inner")
    assert events == ["failed NONFINITE", "before NONFINITE", "gradients NONFINITE"]
    hooks.end("inner")
    hooks.end("outer")
    assert events[3:] == ["after NONFINITE"]
    assert hooks.depth == 0


def test_a_place_is_for_one_feature():
    hooks = hooks_of([Order.RATE], [])
    with pytest.raises(ValueError, match="two features at RATE"):
        hooks.add(Feature(Order.RATE))
