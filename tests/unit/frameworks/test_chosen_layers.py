"""Plans of the user's, in words: which layers they name, and what they cannot ask for."""

import re

import pytest
import torch
from mesh_models import GPT, MLP, Encoder
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import plan_layers

IDS = torch.zeros(2, 8, dtype=torch.long)
X = torch.ones(2, 20)
COLUMN, ROW = LayerDivision("column"), LayerDivision("row")


def plan_of(model, x, words, ways=2):
    return plan_layers(model, (x,), {}, ways, words)


def test_a_plan_in_words():
    words = {"h.*.mlp.0": "colwise", "h.0.mlp.2": "rowwise", "*.c_attn": "colwise"}
    plan = plan_of(GPT(), IDS, words)
    assert plan.divisions == {
        "h.0.mlp.0": COLUMN,
        "h.1.mlp.0": COLUMN,
        "h.0.mlp.2": ROW,
        "h.0.attn.c_attn": LayerDivision("column", 3),
        "h.1.attn.c_attn": LayerDivision("column", 3),
    }
    assert plan.whole["h.1.mlp.2"] == "plan= does not name it"


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"h.*.mlp.9": "colwise"}, ValueError, "there are: wte, wpe, h.0.attn.c_attn, "),
        ({"ln_f": "colwise"}, ValueError, "'ln_f': ...} names no linear layer or emb"),
        ({"h.0.mlp.0": "columns"}, TypeError, "'columns'}: a layer is divided by 'colwise'"),
        ({"h.0.mlp.0": ["colwise"]}, TypeError, "['colwise']}: a layer is divided by 'colwise' or"),
        ({"lm_head": ColwiseParallel()}, TypeError, "a layer is divided by 'colwise' or 'rowwise'"),
        ({"lm_head": "colwise"}, ValueError, "in the same way: add 'wte': 'rowwise'"),
        ({"lm_head": "rowwise", "wte": "rowwise"}, ValueError, "same way: add 'wte': 'colwise'"),
    ],
)
def test_words_that_fit_no_layer(words, error, text):
    with pytest.raises(error, match=re.escape(text)):
        plan_of(GPT(), IDS, words)


def test_words_for_lengths_that_ranks_cannot_divide():
    with pytest.raises(ValueError, match="its 20 inputs are no multiple of 3"):
        plan_of(MLP(), X, {"0": "rowwise"}, 3)
    with pytest.raises(ValueError, match="its 32 outputs are no multiple of 3"):
        plan_of(MLP(), X, {"0": "colwise"}, 3)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other, self.last = nn.Linear(20, 16), nn.Linear(20, 16), nn.Linear(8, 4)

    def forward(self, x):
        a, b = (self.first(x) * self.other(x)).chunk(2, -1)
        return self.last(a + b)


def test_words_that_would_mix_up_shares():
    plan = plan_of(Gated(), X, {"first": "colwise", "other": "colwise"})
    assert set(plan.divisions) == {"first", "other"}
    with pytest.raises(ValueError, match="divides first and leaves other whole"):
        plan_of(Gated(), X, {"first": "colwise"})
    with pytest.raises(ValueError, match=r"cannot divide project: encoder\.layers\.0"):
        plan_of(Encoder(), torch.ones(2, 5, 20), {"project": "colwise"})


class Words(nn.Module):
    """An embedding of words, and what projects onto them."""

    def __init__(self, rows=12, tied=True, **options):
        super().__init__()
        self.words, self.project = nn.Embedding(rows, 6, **options), nn.Linear(6, rows)
        if tied:
            self.project.weight = self.words.weight

    def forward(self, x):
        return self.project(self.words(x))


def test_words_for_embeddings():
    rows, features = (LayerDivision(kind, 1, True, True) for kind in ("row", "column"))
    plan = plan_of(Words(tied=False), IDS, {"words": "rowwise"})
    assert plan.divisions == {"words": rows}
    both = {"words": "colwise", "project": "rowwise"}
    assert plan_of(Words(), IDS, both).divisions == {"words": features, "project": ROW}
    both = {"words": "rowwise", "project": "colwise"}
    with pytest.raises(ValueError, match="cannot divide words: sparse=True is about"):
        plan_of(Words(sparse=True), IDS, both)
    with pytest.raises(ValueError, match="cannot divide words: its 13 inputs are no multiple of 2"):
        plan_of(Words(13, tied=False), IDS, {"words": "rowwise"})
