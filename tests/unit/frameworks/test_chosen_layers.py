"""Layers that are divided without a partner: of a vocabulary, or named by ``plan=``."""

import re

import pytest
import torch
from mesh_models import GPT, MLP, Encoder
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision, Placement
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import placements_of, plan_layers

IDS = torch.zeros(3, 5, dtype=torch.long)
X = torch.ones(2, 20)
COLUMN, ROW = LayerDivision("column"), LayerDivision("row")
LOGITS = LayerDivision("column", by_itself=True)
ROWS, FEATURES = (LayerDivision(kind, 1, True, True) for kind in ("row", "column"))


class Words(nn.Module):
    """Two embeddings, of words and of places, and what projects onto words."""

    def __init__(self, rows=12, features=6, tied=True, use=lambda m, x: m.project(x), **options):
        super().__init__()
        self.words = nn.Embedding(rows, features, **options)
        self.places = nn.Embedding(4, features)
        self.project = nn.Linear(features, rows)
        self.use = use
        if tied:
            self.project.weight = self.words.weight

    def forward(self, x):
        return self.use(self, self.words(x) + self.places(x))


def plan_of(model, x=IDS, words=None, ways=2):
    return plan_layers(model, (x,), {}, ways, words)


@pytest.mark.parametrize(
    ("options", "words", "project"),
    [
        ({}, ROWS, LOGITS),
        ({"tied": False}, FEATURES, LOGITS),
        ({"rows": 13}, FEATURES, ROW),
        ({"rows": 13, "tied": False}, FEATURES, ROW),
        ({"features": 5, "tied": False}, ROWS, LOGITS),
        ({"tied": False, "padding_idx": 0}, FEATURES, LOGITS),
        ({"tied": False, "use": lambda m, x: F.linear(x, m.project.weight)}, FEATURES, None),
        ({"tied": False, "max_norm": 1.0}, None, LOGITS),
    ],
)
def test_embeddings_and_projections(options, words, project):
    expected = {n: d for n, d in {"words": words, "project": project}.items() if d}
    plan = plan_of(Words(**options))
    assert plan.divisions == expected
    assert {*plan.whole} == {"words", "places", "project"} - {*expected}


def loss(change=lambda y: y.flatten(0, 1), target=lambda y: torch.zeros(15).long(), **options):
    def use(m, x):
        y = m.project(x)
        return F.cross_entropy(change(y), target(y), **options)

    return use


@pytest.mark.parametrize(
    ("use", "division"),
    [
        (loss(), COLUMN),
        (loss(reduction="sum", ignore_index=3), COLUMN),
        (loss(lambda y: y.transpose(1, 2), lambda y: torch.zeros(3, 5).long()), COLUMN),
        (
            loss(lambda y: y[:, 1:].contiguous().view(-1, 12), lambda y: torch.zeros(12).long()),
            COLUMN,
        ),
        (lambda m, x: (m.project(x), loss()(m, x)), COLUMN),
        (lambda m, x: (m.project(x).argmax(-1), loss()(m, x)), LOGITS),
        (loss(label_smoothing=0.1), LOGITS),
        (loss(weight=torch.ones(12)), LOGITS),
        pytest.param(
            loss(reduce=False), LOGITS, marks=pytest.mark.filterwarnings("ignore:size_average")
        ),
        (loss(target=lambda y: torch.ones(15, 12)), LOGITS),
        (loss(target=lambda y: y.flatten(0, 1).detach()), LOGITS),
        (loss(lambda y: y.transpose(1, 2), lambda y: torch.ones(3, 12, 5)), LOGITS),
        (loss(lambda y: y.flip(-1).flatten(0, 1)), LOGITS),
    ],
)
def test_logits_that_may_stay_divided_up_to_their_loss(use, division):
    assert plan_of(Words(use=use)).divisions == {"words": ROWS, "project": division}


class Doubled(nn.Embedding):
    def forward(self, x):
        return F.embedding(x, self.weight) * 2


class Transposed(nn.Linear):
    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(x.shape)


def changed(change, *args, **options):
    model = Words(*args, **options)
    change(model)
    return model


def doubled(model):
    model.words = Doubled(12, 6)


def doubled_and_tied(model):
    doubled(model)
    model.words.weight = model.project.weight


def with_another_of_its_bias(model):
    model.other = nn.Linear(6, 12)
    model.other.bias = model.project.bias
    model.use = lambda m, x: (m.project(x), m.other(x))


def with_attention_of_its_bias(model):
    model.other = nn.MultiheadAttention(6, 2, batch_first=True)
    model.other.in_proj_bias = nn.Parameter(torch.zeros(18))
    model.project.bias = model.other.in_proj_bias
    model.use = lambda m, x: (m.project(x), m.other(x, x, x))


def projecting_by_the_transposed(model):
    model.project = Transposed(6, 6)
    model.project.weight = model.words.weight


@pytest.mark.parametrize(
    ("model", "layer", "why"),
    [
        (Words(max_norm=1.0), "words", "max_norm=1.0 is about whole rows"),
        (Words(sparse=True), "words", "sparse=True is about whole rows"),
        (Words(scale_grad_by_freq=True), "words", "scale_grad_by_freq=True is about whole rows"),
        (Words(13, 5), "words", "neither its 13 rows nor its 5 features are a multiple of 2"),
        (Words(use=lambda m, x: F.linear(x, m.words.weight)), "words", "also used in linear()"),
        (Words(use=lambda m, x: x), "words", "project, which has the same weight, stays whole"),
        (changed(doubled_and_tied), "project", "it shares a parameter with words"),
        (changed(with_another_of_its_bias), "project", "a parameter is also that of other"),
        (
            changed(with_attention_of_its_bias, 18),
            "project",
            "also used in multi_head_attention_forward()",
        ),
    ],
)
def test_layers_that_share_a_weight_stay_whole_together(model, layer, why):
    plan = plan_of(model)
    assert not plan.divisions
    assert why in plan.whole[layer]


def test_products_that_are_no_lookups_or_projections():
    assert "besides the product" in plan_of(changed(doubled, tied=False)).whole["words"]
    plan = plan_of(changed(projecting_by_the_transposed, 6), IDS[:, :4])
    assert plan.whole["project"] == "it multiplies by the weight of an embedding, transposed"


def test_an_embedding_with_two_names():
    """As in Hugging Face's T5, whose encoder and decoder hold one embedding."""
    model = Words()
    model.first = nn.Sequential(model.words)
    assert plan_of(model).divisions == {"words": ROWS, "project": LOGITS}
    assert not any(p.is_meta for p in model.parameters())


def test_embeddings_and_projections_of_one_weight():
    model = Words(use=lambda m, x: m.project(x) + m.again(m.others(x.argmax(-1))))
    model.others, model.again = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
    model.others.weight = model.again.weight = model.words.weight
    plan = plan_of(model)
    of_words = {"words": ROWS, "others": ROWS, "project": LOGITS, "again": LOGITS}
    assert plan.divisions == of_words
    of_weights = {"words.weight": Placement(0), "project.bias": Placement(0)}
    assert placements_of(model, plan.divisions) == of_weights


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
        plan_of(MLP(), X, {"0": "rowwise"}, ways=3)
    with pytest.raises(ValueError, match="its 32 outputs are no multiple of 3"):
        plan_of(MLP(), X, {"0": "colwise"}, ways=3)


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


def test_words_for_embeddings():
    def divided(model, **words):
        return plan_of(model, words=words).divisions

    assert divided(Words(tied=False), words="rowwise") == {"words": ROWS}
    both = {"words": "colwise", "project": "rowwise"}
    assert divided(Words(), **both) == {"words": FEATURES, "project": ROW}
    with pytest.raises(ValueError, match="cannot divide words: sparse=True is about"):
        divided(Words(sparse=True), words="rowwise", project="colwise")
    with pytest.raises(ValueError, match="cannot divide words: its 13 inputs are no multiple of 2"):
        divided(Words(13, tied=False), words="rowwise")
