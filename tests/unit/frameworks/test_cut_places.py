"""Where a dry run finds that a model can be cut, and what crosses the cut."""

import pytest
import torch
from torch import nn

from hvkit.frameworks.pytorch.model_parallel.cut_places import ModuleOutput
from hvkit.frameworks.pytorch.model_parallel.pipeline.stages import dry_run


class Halves(nn.Module):
    def forward(self, x):
        return x.chunk(2, dim=1)


class Net(nn.Module):
    """Three layers, of which the first and the second are put together in some way."""

    def __init__(self, together):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.halves = Halves()
        self.together = together

    def forward(self, x):
        return self.third(self.together(self, self.first(x)))


def places_in(model):
    found = dry_run(model, (torch.ones(2, 4),), {}, torch.device("cpu"))
    return {place.name: place for place in found.places}


def places_of(together):
    return places_in(Net(together))


def test_an_output_of_a_module_may_skip_a_stage():
    places = places_of(lambda net, x: x + net.second(x))
    first, second = places["first"], places["second"]
    assert (first.skips, second.skips) == ((), (ModuleOutput("first", 0),))
    assert (first.nbytes, second.nbytes) == (2 * 4 * 4, 2 * 2 * 4 * 4)


def test_the_number_among_several_results_counts():
    def one_half_later(net, x):
        a, b = net.halves(x)
        return net.second(torch.cat([a, a], dim=1)) + b.repeat(1, 2)

    assert places_of(one_half_later)["second"].skips == (ModuleOutput("halves", 1),)


def activated():
    """Its last module changes in place, and returns, what the one before has returned."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True))


class Skips(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.below, self.up = activated(), activated(), nn.Linear(4, 4)

    def forward(self, x):
        down = self.down(x)
        return self.up(self.below(down) + down)


def test_the_output_that_skips_a_stage_is_that_after_all_changes_in_place():
    assert places_in(Skips())["below"].skips == (ModuleOutput("down", 0),)


def doubled_before(net, x):
    doubled = 2 * x
    return net.second(x) + doubled


def changed_through_a_view(net, x):
    x[:, 0] = 1
    return net.second(x) + x


def a_part(net, x):
    part = x[:, :1]
    return net.second(x) + part


def called_twice(net, x):
    x = net.first(x)
    return net.second(x) + x


def halves_of_one_memory(net, x):
    a, b = net.halves(x)
    return net.second(x) + torch.cat([a, b], dim=1)


@pytest.mark.parametrize(
    "together",
    [
        doubled_before,
        a_part,
        lambda net, x: net.second(x.mul_(2)) + x,
        changed_through_a_view,
        called_twice,
        halves_of_one_memory,
    ],
)
def test_nothing_else_may(together):
    assert "second" not in places_of(together)
