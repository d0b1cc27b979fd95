"""PyTorch: ``model.generate()`` between two training steps in a mesh."""

import copy

import pytest
import torch
from cases import MORE
from mesh_models import GPT
from mesh_training import (
    adamw,
    difference,
    of_this_rank,
    tokens,
    train,
    whole_state,
    with_gradients,
)
from ranks import error_of
from torch import nn

import hvkit

pytestmark = [MORE, pytest.mark.skipif(hvkit.size() != 2, reason="for two ranks")]


class Translator(nn.Module):
    """Its ``generate`` calls the encoder once, and the decoder for each token."""

    def __init__(self):
        super().__init__()
        self.encoder = GPT(layers=2, tied=False)
        self.rest = GPT(layers=2, tied=False)
        self.lstm = nn.LSTM(64, 16, batch_first=True)
        self.mix = nn.Linear(16, 64)

    def forward(self, ids):
        return self.rest(ids) + self.mix(self.lstm(self.encoder(ids))[0]).mean(1, keepdim=True)

    @torch.no_grad()
    def generate(self, ids, count):
        state = self.mix(self.lstm(self.encoder(ids))[0]).mean(1)
        for _ in range(count):
            logits = self.rest(ids)[:, -1] + state
            ids = torch.cat([ids[:, 1:], logits.argmax(-1, keepdim=True)], 1)
        return ids


@pytest.mark.parametrize("axis", ["pipeline", "tensor", "shard"])
def test_inside_settled_each_rank_generates_as_one_process(axis):
    reference = Translator()
    model, calls = copy.deepcopy(reference), []
    its, own = adamw(reference), adamw(model)
    options = {"microbatches": 1} if axis == "pipeline" else {}
    model, own = hvkit.distribute(model, own, mesh=hvkit.Mesh(**{axis: 2}), **options)
    model.rest.register_forward_hook(lambda *_: calls.append(1))
    data = tokens(2, rows=4, length=8)
    mine = of_this_rank(data, 1 if axis == "shard" else 2)
    for half in (slice(0, 1), slice(1, 2)):
        train(reference, its, data[half])
        train(model, own, mine[half])
        calls.clear()
        with hvkit.settled(model, own):
            found = model.generate(data[0][0], 3)
        assert torch.equal(found, reference.generate(data[0][0], 3))
        assert len(calls) == 3
    found = whole_state(model, own)
    counted = with_gradients(reference, its)
    assert difference(found, reference.state_dict(), counted) < 1e-11


def test_outside_a_pipelines_error_names_the_way():
    model = Translator()
    model, own = hvkit.distribute(model, adamw(model), mesh=hvkit.Mesh(pipeline=2))
    train(model, own, of_this_rank(tokens(1, rows=4, length=8), 2))
    kind, text = error_of(lambda: model.generate(tokens(1, 4, 8)[0][0], 3))
    assert kind is ValueError, text
    assert "inside `with hvkit.settled(model):`" in text


def test_outside_a_sharded_models_parts_gather_their_weights():
    reference = Translator()
    model = copy.deepcopy(reference)
    model, own = hvkit.distribute(model, adamw(model), mesh=hvkit.Mesh(shard=2))
    data = tokens(1, rows=4, length=8)
    train(reference, adamw(reference), data)
    train(model, own, of_this_rank(data, 1))
    assert torch.equal(model.generate(data[0][0], 3), reference.generate(data[0][0], 3))


class TakesCache(nn.Sequential):
    def forward(self, x, past_key_values=None, use_cache=False):
        return super().forward(x)


def test_a_cache_of_all_layers_is_refused_by_a_pipeline():
    model = TakesCache(nn.Linear(8, 8), nn.Linear(8, 8))
    model, _ = hvkit.distribute(model, adamw(model), mesh=hvkit.Mesh(pipeline=2))
    x = torch.ones(8, 8)
    model(x, past_key_values=None, use_cache=False)
    kind, text = error_of(lambda: model(x, past_key_values=object()))
    assert kind is ValueError
    assert "past_key_values= is a cache" in text
