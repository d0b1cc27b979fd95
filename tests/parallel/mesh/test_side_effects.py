"""PyTorch: forwards that do more than return something, in a pipeline and along a tensor axis."""

import functools

import pytest
import torch
from cases import MORE
from mesh_training import apart, both, differences, train, vectors
from ranks import error_of
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit.frameworks.pytorch.model_parallel.pipeline import staged_forward

pytestmark = MORE


class Net(nn.Module):
    """Five layers and a head; what happens in between is the subclass's."""

    make_layer = functools.partial(nn.Linear, 20, 20)

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(self.make_layer() for _ in range(5))
        self.head = nn.Linear(20, 10)


class ChangedInPlace(Net):
    def forward(self, x):
        first = self.layers[0](x)
        y = torch.tanh(self.layers[1](first.clone()))
        first = F.leaky_relu(first, 0.3, inplace=True)
        for layer in self.layers[2:]:
            y = torch.tanh(layer(y))
        return self.head(y + first)


class ReturnsItsInput(Net):
    def __init__(self):
        super().__init__()
        self.nothing = nn.Identity()

    def forward(self, x):
        first = self.layers[0](x)
        y = self.nothing(first)
        for layer in self.layers[1:]:
            y = torch.tanh(layer(y))
        return self.head(y + first)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 20)


class Appends(Inner):
    """Leaves its result in a list that it is given."""

    def forward(self, x, kept):
        kept.append(torch.tanh(self.layer(x)))
        return kept[-1]


class FillsAList(Net):
    make_layer = Appends

    def forward(self, x):
        kept = []
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x + kept[-3] + sum(kept))


class FillsADict(FillsAList):
    def forward(self, x):
        state = {"x": x}
        for layer in self.layers:
            self.step(layer, state)
        return self.head(state["x"])

    def step(self, layer, state):
        state["x"] = state["x"] + layer(state["x"], [])


class AddsInPlace(Inner):
    def forward(self, x):
        return x.add_(torch.tanh(self.layer(x.clone())))


class ResultsNotTaken(Net):
    make_layer = AddsInPlace

    def forward(self, x):
        x = x.clone()
        for layer in self.layers:
            layer(x)
        return self.head(x)


class TwoNames(Net):
    """A layer in a list, and inside of a block."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in self.layers)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class OwnParameter(Net):
    """A parameter of the model itself, as the positions of a vision transformer."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(20))

    def forward(self, x):
        x = x + self.positions
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


class LooksAtItsMask(Inner):
    def forward(self, x, mask):
        return torch.tanh(self.layer(x * mask if bool(mask.any()) else x))


class Masked(Net):
    make_layer = LooksAtItsMask

    def forward(self, x):
        mask = torch.ones(20)
        mask[::3] = 0
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x)


class SizesAsTensors(Net):
    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
            missing = torch.tensor([24 - x.size(1)])
            x = F.pad(x, [0, missing])[:, :20]
        return self.head(x)


class Averages(Net):
    """A buffer that follows activations, and is used in a later layer."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.register_buffer("average", torch.zeros(20))

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        if self.training:
            now = x.detach().mean(0)
            if self.way == "replaced":
                self.average = self.average * 0.5 + now
            elif self.way == "data":
                self.average.data = self.average * 0.5 + now
            else:
                self.average.mul_(0.5).add_(now)
        for layer in self.layers[1:]:
            x = torch.tanh(layer(x))
        return self.head(x + self.average)


NETS = [
    ChangedInPlace,
    ReturnsItsInput,
    FillsAList,
    FillsADict,
    ResultsNotTaken,
    TwoNames,
    OwnParameter,
    Masked,
    SizesAsTensors,
]


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("make", NETS)
def test_a_pipeline_trains_the_model_of_one_process(make, schedule):
    assert max(differences(make, vectors(3), schedule=schedule)) < 1e-11


@pytest.mark.parametrize("way", ["replaced", "data", "in place"])
def test_a_buffer_that_depends_on_activations(way):
    """Where one stage writes it and reads it; the file has its last value."""
    make = functools.partial(Averages, way)
    assert apart(train, make, vectors(4), microbatches=1) < 1e-11


class ReadsMore(nn.Module):
    """Does something else with what lies between two layers when it is told to."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(20, 32), nn.Linear(32, 10)

    def forward(self, x, use=None):
        y = torch.tanh(self.wide(x))
        return self.narrow(y if use is None else use(y))


USES = [
    lambda y: torch.cat([y.chunk(2, -1)[0], y.chunk(2, -1)[1] * 0], -1),
    lambda y: torch.cat(y.split([20, 12], -1)[::-1], -1),
    lambda y: y.cumsum(-1),
    lambda y: y.logcumsumexp(-1),
    lambda y: torch.stack(y.unbind(-1)[::-1], -1),
    lambda y: y[:, torch.arange(31, -1, -1)],
    lambda y: y + (y[y > 0.5]).sum(),
]


@pytest.mark.parametrize("use", USES)
def test_a_later_call_may_use_a_divided_activation_otherwise(use):
    (reference, _), (model, _) = both(ReadsMore, mesh=hvkit.Mesh(tensor=2), microbatches=None)
    x, _ = vectors(1)[0]
    model(x)
    for each in (reference, model):
        each(x, use).square().mean().backward()
    assert float((model(x, use) - reference(x, use)).abs().max()) < 1e-12
    rows = reference.wide.weight.grad.chunk(2)[hvkit.rank()]
    assert float((model.wide.weight.grad - rows).abs().max()) < 1e-12


def test_a_wrong_result_of_the_first_batch_is_an_error(monkeypatch):
    """Compared with the model before it is divided, also without micro-batches."""
    monkeypatch.setattr(
        staged_forward, "with_tensors", lambda structure, tensors: tensors[0] * 1.01
    )
    _, (model, _) = both(OwnParameter, microbatches=1)
    kind, text = error_of(lambda: model(vectors(1)[0][0]))
    assert kind is ValueError
    assert "in a pipeline the model gives another result than without" in text
