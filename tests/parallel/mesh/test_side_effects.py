"""PyTorch: forwards that do more than return something, in a pipeline and along a tensor axis."""

import functools

import pytest
import torch
from cases import MORE
from mesh_training import both, differences, of_this_rank, train, vectors, whole_state
from ranks import error_of
from torch import nn
from torch.nn import functional as F

import hvkit

pytestmark = MORE


def layers(count):
    return nn.ModuleList(nn.Linear(20, 20) for _ in range(count))


class Net(nn.Module):
    """Five layers and a head; what happens in between is the subclass's."""

    def __init__(self):
        super().__init__()
        self.layers, self.head = layers(5), nn.Linear(20, 10)


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


class Appends(nn.Module):
    """Leaves its result in a list that it is given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x, kept):
        x = torch.tanh(self.layer(x))
        kept.append(x)
        return x


class FillsAList(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Appends() for _ in range(5))

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


class AddsInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x):
        return x.add_(torch.tanh(self.layer(x.clone())))


class ResultsNotTaken(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(AddsInPlace() for _ in range(5))

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


class LooksAtItsMask(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(20, 20)

    def forward(self, x, mask):
        return torch.tanh(self.layer(x * mask if bool(mask.any()) else x))


class Masked(Net):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(LooksAtItsMask() for _ in range(5))

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


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize(
    "make",
    [
        ChangedInPlace,
        ReturnsItsInput,
        FillsAList,
        FillsADict,
        ResultsNotTaken,
        TwoNames,
        OwnParameter,
        Masked,
        SizesAsTensors,
    ],
)
def test_a_pipeline_trains_the_model_of_one_process(make, schedule):
    assert max(differences(make, vectors(6), schedule=schedule)) < 1e-11


@pytest.mark.parametrize("way", ["replaced", "data", "in place"])
def test_a_buffer_that_depends_on_activations(way):
    """Where one stage writes it and reads it; the file has its last value."""
    make = functools.partial(Averages, way)
    (reference, its), (model, own) = both(make, microbatches=1)
    data = vectors(4)
    train(reference, its, data)
    train(model, own, of_this_rank(data))
    found = whole_state(model)
    if hvkit.size() == 2 and hvkit.is_main():
        for name, expected in reference.state_dict().items():
            assert float((found[name] - expected).abs().max()) < 1e-11, name


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
def test_what_a_later_call_does_to_a_divided_activation(use):
    (reference, _), (model, _) = both(ReadsMore, mesh=hvkit.Mesh(tensor=2), microbatches=None)
    x, _ = vectors(1)[0]
    mine = of_this_rank([(x,)])[0][0]
    model(mine)
    for each, batch in ((reference, x), (model, mine)):
        each(batch, use).square().mean().backward()
    assert float((model(mine, use) - reference(mine, use)).abs().max()) < 1e-12
    found = model.wide.weight.grad
    rows = reference.wide.weight.grad.chunk(2)[hvkit.rank() % 2]
    if hvkit.size() == 2:
        assert float((found - rows).abs().max()) < 1e-12


def test_a_wrong_result_of_the_first_batch_is_an_error(monkeypatch):
    """Compared with the model before it is divided, also without micro-batches."""
    from hvkit.frameworks.pytorch.model_parallel.pipeline import staged_forward

    monkeypatch.setattr(
        staged_forward, "with_tensors", lambda structure, tensors: tensors[0] * 1.01
    )
    _, (model, _) = both(OwnParameter, microbatches=1)
    kind, text = error_of(lambda: model(of_this_rank(vectors(1))[0][0]))
    assert kind is ValueError
    assert "in a pipeline the model gives another result than without" in text
