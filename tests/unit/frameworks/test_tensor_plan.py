"""Which layers can be divided among ranks, and why others cannot."""

import pytest
import torch
from mesh_models import (
    CNN,
    GPT,
    MLP,
    Encoder,
    EncoderDecoder,
    Llama,
    ResNet,
    SkipNet,
    gpt_of_conv1d,
)
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor import streams
from hvkit.frameworks.pytorch.model_parallel.tensor.layers import placements_of
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import Division, Placement
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import agreed, prove


@pytest.fixture(autouse=True)
def _small_activations(monkeypatch):
    """Are divided along the sequence, too."""
    monkeypatch.setattr(streams, "SMALLEST", 0)


IDS = torch.zeros(2, 8, dtype=torch.long)
COLUMN, ROW = Division("column"), Division("row")
LOGITS = Division("column", by_itself=True)
ROWS, FEATURES = (Division(kind, 1, True, True) for kind in ("row", "column"))
FEW = "its 16 rows are fewer than its 32 features"


class Between(nn.Module):
    """Two layers, and what a test does between them."""

    def __init__(self, between, width=8, out=8):
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(out, 4)
        self.scale = nn.Parameter(torch.ones(width))
        self.between = between

    def forward(self, x):
        return self.second(self.between(self, self.first(x)))


def plan_of(between, ways=2, width=8, out=8):
    return prove(Between(between, width, out), (torch.ones(3, 5, 4),), {}, ways)


def reason(between, layer="first", **options):
    plan = plan_of(between, **options)
    assert not plan.divisions
    assert plan.share == 0
    return plan.whole[layer]


def test_a_gpt_with_one_product_for_queries_keys_and_values():
    plan = prove(GPT(), (IDS,), {}, 2)
    assert plan.divisions == {
        f"h.{i}.{name}": division
        for i in range(2)
        for name, division in {
            "attn.c_attn": Division("column", 3),
            "attn.c_proj": ROW,
            "mlp.0": COLUMN,
            "mlp.2": ROW,
        }.items()
    } | {"wte": ROWS, "lm_head": LOGITS}
    assert plan.whole == {"wpe": FEW}
    assert plan.regions == ("h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp")
    assert plan.share == pytest.approx(0.97, abs=0.005)
    assert "10 of 11 linear layers and embeddings divided, 97% of all weights" in str(plan)
    (stream,) = plan.streams
    assert set(stream.begins) == {n for n, d in plan.divisions.items() if d.kind == "row"}
    assert set(stream.ends) == {n for n, d in plan.divisions.items() if d.kind == "column"}
    assert "between wte and lm_head activations" in str(plan)


@pytest.mark.parametrize(
    ("make", "shape", "divided"),
    [
        (Llama, IDS, 16),
        (lambda: Llama(head_norm=True), IDS, 16),
        (lambda: GPT(fused=False, dropout=0.1), IDS, 10),
        (gpt_of_conv1d, IDS, 10),
        (Encoder, torch.ones(2, 5, 20), 8),
        (lambda: Encoder().eval(), torch.ones(2, 5, 20), 8),
        (MLP, torch.ones(2, 20), 2),
        (SkipNet, torch.ones(2, 20), 2),
        (CNN, torch.ones(2, 1, 16, 16), 2),
        (ResNet, torch.ones(2, 1, 16, 16), 0),
    ],
)
def test_models_as_people_write_them(make, shape, divided):
    model = make()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    assert len(prove(model, (shape,), {}, 4).divisions) == divided
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "x", "streams"),
    [
        (lambda: GPT(dropout=0.1, tied=False), IDS, [("h.0.attn.c_proj", "lm_head")]),
        (gpt_of_conv1d, IDS, [("wte", "lm_head")]),
        (Llama, IDS, [("layers.0.o_proj", "lm_head")]),
        (
            Encoder,
            torch.ones(2, 5, 20),
            [("encoder.layers.0.self_attn.out_proj", "encoder.layers.1.linear1")],
        ),
        (
            EncoderDecoder,
            IDS,
            [
                (
                    "layers.encoder.layers.0.self_attn.out_proj",
                    "layers.decoder.layers.1.multihead_attn",
                ),
                ("layers.decoder.layers.0.self_attn.out_proj", "head"),
            ],
        ),
        (MLP, torch.ones(2, 20), []),
        (SkipNet, torch.ones(2, 20), []),
    ],
)
def test_where_activations_are_divided_along_the_sequence(make, x, streams):
    plan = prove(make(), (x,), {}, 2)
    assert [(each.begins[0], each.ends[-1]) for each in plan.streams] == streams
    assert not plan.whole_streams


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].cos()


def _zeroed(x):
    x[:, 0] = 0
    return x


def _first_zeroed(x):
    x.view(-1, 32)[0].zero_()
    return x


class BetweenBlocks(GPT):
    """What a test does to the result of each block."""

    def __init__(self, between):
        super().__init__()
        self.between = between

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.h:
            x = self.between(block, x)
        return self.lm_head(self.ln_f(x))


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda block, x: block(x), ""),
        (lambda block, x: checkpoint(block, x, use_reentrant=False), ""),
        (lambda block, x: block(x).mul_(2), ""),
        (lambda block, x: block(x) - x.mean(1, keepdim=True), ""),
        (lambda block, x: _zeroed(block(x)), "__setitem__() writes into them"),
        (lambda block, x: _first_zeroed(block(x)), "zero_() writes into a view of them"),
        (lambda block, x: F.dropout(block(x), 0.1, inplace=True), "dropout() writes into them"),
        (lambda block, x: Sine.apply(block(x)), "sin() is called in a function that computes in"),
        (
            lambda block, x: checkpoint(lambda x: block(x) * 2, x, use_reentrant=False),
            "mul() is called in a function that computes in backward, too",
        ),
        (
            lambda block, x: block(x).roll(1, 1).view(2, 8, 32),
            "parts would send more, since roll() needs the whole sequence",
        ),
    ],
)
def test_what_ends_the_division_along_the_sequence(between, why):
    plan = prove(BetweenBlocks(between), (IDS,), {}, 2)
    assert len(plan.divisions) == 10
    assert bool(plan.streams) == (not why)
    assert why in "".join(plan.whole_streams)


def test_parts_of_small_activations_do_not_pay(monkeypatch):
    monkeypatch.undo()
    plan = prove(GPT(), (IDS,), {}, 2)
    assert "they have at most 0.00205 MB, and parts pay from 8 MB" in str(plan)
    assert prove(GPT(length=32768), (torch.zeros(2, 32768, dtype=torch.long),), {}, 2).streams


def test_blocks_that_are_compiled_take_whole_activations():
    model = GPT()
    for block in model.h:
        block.compile(backend="eager")
    with torch.compiler.set_stance("force_eager"):
        plan = prove(model, (IDS,), {}, 2)
    assert not plan.streams
    assert "h.0, which takes them, is compiled" in str(plan)


def test_what_one_mode_alone_divides_along_the_sequence_stays_whole():
    model = BetweenBlocks(lambda block, x: block(x) if model.training else _zeroed(block(x)))
    plan, other = (prove(model.train(mode), (IDS,), {}, 2) for mode in (True, False))
    assert (len(plan.streams), len(other.streams)) == (1, 0)
    assert agreed(model, plan, other).streams == ()


def test_queries_and_keys_that_4_heads_and_2_ranks_can_divide_8_ranks_cannot():
    plan = prove(Llama(heads=8, kv_heads=4), (IDS,), {}, 8)
    of_blocks = {n for n in plan.divisions if n.startswith("layers")}
    assert {n.split(".")[2] for n in of_blocks} == {"gate", "up", "down"}
    assert "that 8 ranks could divide" in plan.whole["layers.0.k_proj"]


def test_multihead_attention_names_its_heads():
    plan = prove(Encoder(heads=4), (torch.ones(2, 5, 20),), {}, 8)
    assert plan.whole["encoder.layers.0.self_attn"] == "its 4 heads are no multiple of the 8 ranks"
    assert plan.divisions["encoder.layers.0.linear1"] == COLUMN


def divided_dims(model, x=IDS):
    placements = placements_of(model, prove(model, (x,), {}, 2))
    return {name: (placement.dim, placement.parts) for name, placement in placements.items()}


def test_how_parameters_are_divided():
    dims = divided_dims(gpt_of_conv1d())
    assert dims["h.0.attn.c_attn.weight"] == (1, 3)
    assert dims["h.0.attn.c_attn.bias"] == (0, 3)
    assert dims["h.0.attn.c_proj.weight"] == (0, 1)
    assert "h.0.attn.c_proj.bias" not in dims
    dims = divided_dims(Encoder(), torch.ones(2, 5, 20))
    assert dims["encoder.layers.0.self_attn.in_proj_weight"] == (0, 3)
    assert dims["encoder.layers.0.self_attn.out_proj.weight"] == (1, 1)
    assert "encoder.layers.0.self_attn.out_proj.bias" not in dims


@pytest.mark.parametrize(
    "between",
    [
        lambda m, x: F.gelu(x) * torch.sigmoid(x),
        lambda m, x: x + torch.ones(8),
        lambda m, x: x * m.scale,
        lambda m, x: x.relu_().mul_(2),
        lambda m, x: x.view(3, 5, 4, 2).transpose(1, 2).softmax(-1).transpose(1, 2).flatten(2),
        lambda m, x: x.view(15, 8).view(3, 5, 8),
        lambda m, x: x.unflatten(-1, (1, 4, 2)).squeeze(2).reshape(3, 5, 8),
        lambda m, x: x[:, None, :, :][:, 0, 1:, ...],
        lambda m, x: x.permute(2, 0, 1).permute(1, 2, 0),
        lambda m, x: torch.where(x > 0, x, 0.1 * x),
        lambda m, x: F.layer_norm(x.view(3, 5, 4, 2), (2,)).view(3, 5, 8),
        lambda m, x: torch.cat([x, x], dim=1),
        lambda m, x: x.mean(1),
        lambda m, x: x.to(torch.ones(1, dtype=torch.float64)).to("cpu").float(),
    ],
)
def test_what_a_divided_activation_may_go_through(between):
    assert plan_of(between).divisions == {"first": COLUMN, "second": ROW}


@pytest.mark.parametrize(
    "between",
    [
        lambda m, x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]),
        lambda m, x: F.gelu(x).split(8, 2)[0],
        lambda m, x: x.transpose(1, 2).chunk(2, dim=1)[1].transpose(1, 2),
    ],
)
def test_shares_of_a_product(between):
    assert plan_of(between, width=16).divisions["first"] == Division("column", 2)


def test_shares_that_a_view_separates():
    def between(m, x):
        q, k, v = x.view(3, 5, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(3, 5, 8)

    assert plan_of(between, width=24).divisions["first"] == Division("column", 3)


@pytest.mark.parametrize(
    ("between", "why"),
    [
        (lambda m, x: x.flip(-1), "flip() has no rule"),
        (lambda m, x: F.dropout(x, inplace=True), "dropout() in place changes"),
        (lambda m, x: F.layer_norm(x, (8,)), "layer_norm() combines elements along the divided"),
        (lambda m, x: x.softmax(-1), "softmax() combines elements along the divided dimension"),
        (lambda m, x: x - x.mean(), "mean() combines all elements"),
        (lambda m, x: x.view(3, 5, 2, 4).transpose(2, 3).reshape(3, 5, 8), "reshape()"),
        (lambda m, x: x.view(3, 40)[:, :8], "view() from (3, 5, 8) to (3, 40) leaves no dimension"),
        (
            lambda m, x: x[..., torch.tensor([0] * 8)],
            "__getitem__() takes the divided dimension apart",
        ),
        (lambda m, x: torch.cat([x[..., 4:], x[..., :4]], -1), "takes the divided dimension apart"),
        (lambda m, x: torch.cat([x, torch.ones(3, 1, 8)], 1), "one that is whole"),
        (lambda m, x: torch.zeros(3, 5, 8).add_(x), "writes a divided activation into one"),
        (lambda m, x: x.transpose(1, 2)[:, :, :4].repeat(1, 1, 2), "repeat() has no rule"),
        (lambda m, x: x + x.view(3, 5, 2, 4).transpose(1, 2).reshape(3, 5, 8), "reshape() from"),
        (lambda m, x: x + m.first(x[..., :4]), "takes the divided dimension apart"),
    ],
)
def test_what_ends_a_proof(between, why):
    assert why in reason(between)


def test_a_share_of_a_share():
    assert "divides a share of a product in shares" in reason(
        lambda m, x: x.chunk(2, -1)[0].chunk(2, -1)[0], width=32
    )


def test_shares_of_a_product_with_what_is_whole():
    assert "share of a product" in reason(lambda m, x: (x * m.scale).chunk(2, -1)[0], width=16)


def test_uses_in_different_shares():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 16), nn.Linear(8, 4)
            self.third = nn.Linear(4, 4)

        def forward(self, x):
            x = self.first(x)
            return self.second(x.chunk(2, -1)[0]) + self.third(x.chunk(4, -1)[0])

    plan = prove(Two(), (torch.ones(3, 4),), {}, 2)
    assert plan.whole["first"] == "its output is used in 2 and in 4 shares"
    assert not plan.divisions


def test_shares_of_different_lengths():
    why = reason(lambda m, x: x.split([8, 4, 4], -1)[0], width=16)
    assert "cuts the product into [8, 4, 4]" in why


def test_outputs_that_are_no_multiple_of_the_ranks():
    assert reason(lambda m, x: x, ways=3) == "its 8 outputs are no multiple of the 3 ranks"


def test_a_weight_used_elsewhere():
    assert "also used in square()" in reason(lambda m, x: x + m.first.weight.square().sum())
    assert "also used in shape()" in reason(lambda m, x: x * m.first.weight.shape[0])


def test_a_layer_that_does_more_than_multiply():
    class Lora(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = nn.Sequential(Lora(4, 8), nn.ReLU(), nn.Linear(8, 4))
    assert "is not a product alone" in prove(model, (torch.ones(2, 4),), {}, 2).whole["0"]


class Heads(nn.Linear):
    def forward(self, x):
        return super().forward(x).view(*x.shape[:-1], 4, -1)


class Scaled(nn.Linear):
    def forward(self, x, unused=None):
        return super().forward(x)


def test_layers_of_a_class_of_its_own():
    class Net(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.first, self.second = first, nn.Linear(8, 4)

        def forward(self, x):
            return self.second(self.first(x, *extra).flatten(1))

    x, extra = torch.ones(2, 4), ()
    why = prove(Net(Heads(4, 8)), (x,), {}, 2).whole["first"]
    assert why == "its forward returns the product in another shape"
    assert len(prove(Net(Scaled(4, 8)), (x,), {}, 2).divisions) == 2
    extra = (None,)
    why = prove(Net(Scaled(4, 8)), (x,), {}, 2).whole["first"]
    assert why == "its forward takes or returns more than one tensor"


def test_a_weight_computed_from_others():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Linear(8, 4))
    assert not prove(model, (torch.ones(2, 4),), {}, 2).divisions


def test_layers_that_share_a_weight():
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    model[0].weight = model[2].weight
    plan = prove(model, (torch.ones(2, 20),), {}, 2)
    assert plan.whole == {f"{i}": f"it shares a parameter with {2 - i}" for i in (0, 2)}


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


def plan_of_words(ways=2, **options):
    return prove(Words(**options), (torch.zeros(3, 5, dtype=torch.long),), {}, ways)


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
    plan = plan_of_words(**options)
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
    assert plan_of_words(use=use).divisions == {"words": ROWS, "project": division}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0 is about whole rows"),
        ({"sparse": True}, "sparse=True is about whole rows"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True is about whole rows"),
        ({"rows": 13, "features": 5}, "neither its 13 rows nor its 5 features are a multiple of 2"),
        (
            {"use": lambda m, x: F.linear(x, m.words.weight)},
            "its weight or bias is also used in linear()",
        ),
        ({"use": lambda m, x: x}, "project, which has the same weight, stays whole: the forward"),
    ],
)
def test_an_embedding_that_stays_whole(options, why):
    plan = plan_of_words(**options)
    assert not plan.divisions
    assert why in plan.whole["words"]


def test_an_embedding_of_a_class_of_its_own():
    class Scaled(nn.Embedding):
        def forward(self, x):
            return F.embedding(x, self.weight) * 2

    model, x = Words(tied=False), torch.zeros(3, 5, dtype=torch.long)
    model.words = Scaled(12, 6)
    assert "is not a product alone" in prove(model, (x,), {}, 2).whole["words"]
    model.words.weight = model.project.weight
    plan = prove(model, (x,), {}, 2)
    assert not plan.divisions
    assert plan.whole["project"] == "it shares a parameter with words"


def test_a_projection_whose_bias_another_layer_has():
    tokens = torch.zeros(3, 5, dtype=torch.long)
    model = Words(use=lambda m, x: (m.project(x), m.other(x)))
    model.other = nn.Linear(6, 12)
    model.other.bias = model.project.bias
    plan = prove(model, (tokens,), {}, 2)
    assert not plan.divisions
    assert plan.whole["project"] == "a parameter is also that of other"
    model = Words(use=lambda m, x: (m.project(x), m.other(x, x, x)))
    model.other = nn.MultiheadAttention(6, 2, batch_first=True)
    model.other.in_proj_bias = nn.Parameter(torch.zeros(18))
    model.project = nn.Linear(6, 18)
    model.project.bias = model.other.in_proj_bias
    model.words = nn.Embedding(18, 6, _weight=model.project.weight)
    model.words.weight = model.project.weight
    plan = prove(model, (tokens,), {}, 2)
    assert not plan.divisions
    assert "also used in multi_head_attention_forward()" in plan.whole["project"]


def test_an_embedding_with_two_names():
    """As in Hugging Face's T5, whose encoder and decoder hold one embedding."""
    model = Words()
    model.first = nn.Sequential(model.words)
    plan = prove(model, (torch.zeros(3, 5, dtype=torch.long),), {}, 2)
    assert plan.divisions == {"words": ROWS, "project": LOGITS}
    assert not any(p.is_meta for p in model.parameters())


def test_embeddings_and_projections_of_one_weight():
    model = Words(use=lambda m, x: m.project(x) + m.again(m.others(x.argmax(-1))))
    model.others, model.again = nn.Embedding(12, 6), nn.Linear(6, 12, bias=False)
    model.others.weight = model.again.weight = model.words.weight
    plan = prove(model, (torch.zeros(3, 5, dtype=torch.long),), {}, 2)
    of_words = {"words": ROWS, "others": ROWS, "project": LOGITS, "again": LOGITS}
    assert plan.divisions == of_words
    assert placements_of(model, plan) == {
        "words.weight": Placement(0),
        "project.bias": Placement(0),
    }


def test_a_projection_by_the_transposed_weight_of_an_embedding():
    class Transposed(nn.Linear):
        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, 6), self.weight).view(x.shape)

    model = Words(6, 6)
    model.project = Transposed(6, 6)
    model.project.weight = model.words.weight
    plan = prove(model, (torch.zeros(3, 4, dtype=torch.long),), {}, 2)
    assert plan.whole["project"] == "it multiplies by the weight of an embedding, transposed"


def test_a_plan_in_words_for_embeddings():
    tokens = torch.zeros(3, 5, dtype=torch.long)
    plan = prove(Words(tied=False), (tokens,), {}, 2, {"words": "rowwise", "places": "colwise"})
    assert plan.divisions == {"words": ROWS, "places": FEATURES}
    plan = prove(Words(), (tokens,), {}, 2, {"words": "colwise", "project": "rowwise"})
    assert plan.divisions == {"words": FEATURES, "project": ROW}
    for options, words, why in (
        ({"sparse": True}, {"words": "rowwise", "project": "colwise"}, "sparse=True is about"),
        ({"rows": 13, "tied": False}, {"words": "rowwise"}, "its 13 inputs are no multiple of 2"),
    ):
        with pytest.raises(ValueError, match=f"cannot divide words: {why}"):
            prove(Words(**options), (tokens,), {}, 2, words)


def test_a_layer_called_with_whole_and_with_divided_activations():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.second(x) + self.second(self.first(x))

    plan = prove(Twice(), (torch.ones(2, 8),), {}, 2)
    assert plan.whole["first"] == (
        "second, which takes its output, stays whole: it takes whole activations"
    )


def test_a_layer_that_is_not_called():
    model = MLP()
    model[0].unused = nn.Linear(4, 4)
    plan = prove(model, (torch.ones(2, 20),), {}, 2)
    assert plan.whole["0.unused"] == "the forward does not call it"


def test_one_rank_divides_nothing():
    assert prove(MLP(), (), {}, 1).divisions == {}


def test_a_forward_that_looks_at_values():
    # The sum, which decides, needs the whole.
    assert plan_of(lambda m, x: x if x.sum().item() > 0 else -x).divisions == {}
    with pytest.raises(HvkitError, match=r"cannot be followed on the meta device.*plan=\{\}"):
        plan_of(lambda m, x: torch.from_numpy(x.detach().numpy()))
    assert prove(Between(None), (), {}, 2, {}).divisions == {}


class DynamicCache:
    def __init__(self, keys):
        self.layers = [keys]


@pytest.mark.parametrize(("key", "hold"), [("past_key_values", lambda t: [t]), (1, DynamicCache)])
def test_a_cache_of_keys_and_values_may_be_divided(key, hold):
    class Cached(MLP):
        def forward(self, x):
            return {0: super().forward(x), key: hold(self[0](x))}

    assert set(prove(Cached(), (torch.ones(2, 20),), {}, 2).divisions) == {"0", "2"}


def test_what_the_model_returns():
    class Inspected(MLP):
        def forward(self, x):
            return {"y": super().forward(x), "hidden": [self[0](x)]}

    plan = prove(Inspected(), (torch.ones(2, 20),), {}, 2)
    assert plan.whole["0"] == "the model returns what it computes from it in 'hidden'"
    assert set(plan.divisions) == {"2", "4"}


def test_a_plan_in_words():
    words = {"h.*.mlp.0": "colwise", "h.0.mlp.2": RowwiseParallel(), "*.c_attn": ColwiseParallel()}
    plan = prove(GPT(), (IDS,), {}, 2, words)
    assert plan.divisions == {
        "h.0.mlp.0": COLUMN,
        "h.1.mlp.0": COLUMN,
        "h.0.mlp.2": ROW,
        "h.0.attn.c_attn": Division("column", 3),
        "h.1.attn.c_attn": Division("column", 3),
    }
    assert plan.whole["h.1.mlp.2"] == "plan= does not name it"


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ({"h.*.mlp.9": "colwise"}, ValueError, "there are: wte, wpe, h.0.attn.c_attn, "),
        ({"ln_f": "colwise"}, ValueError, "'ln_f': ...} names no linear layer or emb"),
        ({"h.0.mlp.0": "columns"}, TypeError, "'columns'}: a layer is divided by 'colwise'"),
        ({"h.0.mlp.0": ColwiseParallel(output_layouts=Replicate())}, ValueError, "layouts of its"),
        ({"lm_head": "colwise"}, ValueError, "in the same way: add 'wte': 'rowwise'"),
        (
            {"lm_head": "rowwise", "wte": "rowwise"},
            ValueError,
            "the same way: add 'wte': 'colwise'",
        ),
    ],
)
def test_words_that_fit_no_layer(words, error, text):
    with pytest.raises(error) as raised:
        prove(GPT(), (IDS,), {}, 2, words)
    assert text in str(raised.value)


def test_words_for_lengths_that_ranks_cannot_divide():
    x = torch.ones(2, 20)
    with pytest.raises(ValueError, match="its 20 inputs are no multiple of 3"):
        prove(MLP(), (x,), {}, 3, {"0": "rowwise"})
    with pytest.raises(ValueError, match="its 32 outputs are no multiple of 3"):
        prove(MLP(), (x,), {}, 3, {"0": "colwise"})


def test_words_that_would_mix_up_shares():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.other, self.last = nn.Linear(4, 16), nn.Linear(4, 16), nn.Linear(8, 4)

        def forward(self, x):
            a, b = (self.first(x) * self.other(x)).chunk(2, -1)
            return self.last(a + b)

    x = torch.ones(2, 4)
    assert len(prove(Gated(), (x,), {}, 2, {"first": "colwise", "other": "colwise"}).divisions) == 2
    with pytest.raises(ValueError, match="divides first and leaves other whole"):
        prove(Gated(), (x,), {}, 2, {"first": "colwise"})
    with pytest.raises(ValueError, match=r"cannot divide project: encoder\.layers\.0"):
        prove(Encoder(), (torch.ones(2, 5, 20),), {}, 2, {"project": "colwise"})
