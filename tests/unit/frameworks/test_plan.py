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
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor import sequence_parallel
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import LayerDivision
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import (
    TensorPlan,
    in_both_modes,
    plan_layers,
)

IDS = torch.zeros(2, 8, dtype=torch.long)
X, IMAGES = torch.ones(2, 20), torch.ones(2, 1, 16, 16)
WORDS = torch.ones(2, 5, 20)
COLUMN, ROW = LayerDivision("column"), LayerDivision("row")


@pytest.fixture(autouse=True)
def _small_activations(monkeypatch):
    """Are divided along the sequence, too."""
    monkeypatch.setattr(sequence_parallel, "SMALLEST", 0)


def plan_of(model, x, ways=2, words=None):
    return plan_layers(model, (x,), {}, ways, words)


class Net(nn.Module):
    """Layers and parameters by name, and a forward."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.computed = forward

    def forward(self, x):
        return self.computed(self, x)


def around(between, width=8):
    """Two layers, and what a test does between them."""
    return Net(
        lambda m, x: m.second(between(m, m.first(x))),
        first=nn.Linear(4, width),
        second=nn.Linear(8, 4),
        scale=nn.Parameter(torch.ones(width)),
    )


def plan_around(between, ways=2, width=8):
    return plan_of(around(between, width), torch.ones(3, 5, 4), ways)


def test_a_gpt_with_one_product_for_queries_keys_and_values():
    plan = plan_of(GPT(), IDS)
    of_blocks = {
        f"h.{i}.{name}": division
        for i in range(2)
        for name, division in {
            "attn.c_attn": LayerDivision("column", 3),
            "attn.c_proj": ROW,
            "mlp.0": COLUMN,
            "mlp.2": ROW,
        }.items()
    }
    rows, logits = LayerDivision("row", 1, True, True), LayerDivision("column", by_itself=True)
    assert plan.divisions == of_blocks | {"wte": rows, "lm_head": logits}
    assert plan.whole == {"wpe": "its 16 rows are fewer than its 32 features"}
    assert plan.fraction == pytest.approx(0.97, abs=0.005)
    assert "10 of 11 linear layers and embeddings divided, 97% of all weights" in str(plan)
    (stream,) = plan.sequence_regions
    assert set(stream.begins) == {n for n, d in plan.divisions.items() if d.style == "row"}
    assert set(stream.ends) == {n for n, d in plan.divisions.items() if d.style == "column"}
    assert "between wte and lm_head activations" in str(plan)


LAYERS = "encoder.layers"
OUT = f"{LAYERS}.0.self_attn.out_proj"


@pytest.mark.parametrize(
    ("make", "x", "divided", "regions"),
    [
        (Llama, IDS, 16, "layers.0.o_proj to lm_head"),
        (lambda: Llama(head_norm=True), IDS, 16, "layers.0.o_proj to lm_head"),
        (lambda: GPT(fused=False, dropout=0.1), IDS, 10, "wte to lm_head"),
        (lambda: GPT(dropout=0.1, tied=False), IDS, 10, "h.0.attn.c_proj to lm_head"),
        (gpt_of_conv1d, IDS, 10, "wte to lm_head"),
        (Encoder, WORDS, 8, f"{OUT} to {LAYERS}.1.linear1"),
        (lambda: Encoder().eval(), WORDS, 8, f"{OUT} to {LAYERS}.1.linear1"),
        (
            EncoderDecoder,
            IDS,
            22,
            f"layers.{OUT} to layers.decoder.layers.1.multihead_attn, "
            "layers.decoder.layers.0.self_attn.out_proj to head",
        ),
        (MLP, X, 2, ""),
        (SkipNet, X, 2, ""),
        (CNN, IMAGES, 2, ""),
        (ResNet, IMAGES, 0, ""),
    ],
)
def test_models_as_people_write_them(make, x, divided, regions):
    model = make()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    plan = plan_of(model, x, 4)
    assert len(plan.divisions) == divided
    assert (
        ", ".join(f"{each.begins[0]} to {each.ends[-1]}" for each in plan.sequence_regions)
        == regions
    )
    assert not plan.whole_regions
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


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
def test_operations_that_end_the_division_along_the_sequence(between, why):
    plan = plan_of(BetweenBlocks(between), IDS)
    assert len(plan.divisions) == 10
    assert bool(plan.sequence_regions) == (not why)
    assert why in "".join(plan.whole_regions)


def test_parts_of_small_activations_do_not_pay(monkeypatch):
    monkeypatch.undo()
    plan = plan_of(GPT(), IDS)
    assert "they have at most 0.00205 MB, and parts pay from 8 MB" in str(plan)
    assert plan_of(GPT(length=32768), torch.zeros(2, 32768, dtype=torch.long)).sequence_regions


def test_blocks_that_are_compiled_take_whole_activations():
    model = GPT()
    for block in model.h:
        block.compile(backend="eager")
    with torch.compiler.set_stance("force_eager"):
        plan = plan_of(model, IDS)
    assert not plan.sequence_regions
    assert "h.0, which takes them, is compiled" in str(plan)


def test_regions_that_only_one_mode_divides_stay_whole():
    model = BetweenBlocks(lambda block, x: block(x) if model.training else _zeroed(block(x)))
    plan, other = (plan_of(model.train(mode), IDS) for mode in (True, False))
    assert (len(plan.sequence_regions), len(other.sequence_regions)) == (1, 0)
    both, different = in_both_modes(model, plan, other)
    assert (both.sequence_regions, different) == ((), set())


def test_a_vocabulary_that_the_modes_divide_into_other_parts_stays_whole():
    """One mode alone splits its outputs into three."""
    model, layers = around(F.gelu), frozenset(["first"])
    of_modes = (
        TensorPlan(2, {"first": LayerDivision("column", parts)}, vocabularies=found, called=layers)
        for parts, found in ((1, (layers,)), (3, ()))
    )
    both, different = in_both_modes(model, *of_modes)
    assert (both.divisions, different) == ({}, set())
    assert both.whole["first"] == "training and evaluation use its weight in different ways"


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
def test_operations_that_keep_an_activation_divided(between):
    assert plan_around(between).divisions == {"first": COLUMN, "second": ROW}


def _attention_of_one_product(m, x):
    q, k, v = x.view(3, 5, 3, 4, 2).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(3, 5, 8)


@pytest.mark.parametrize(
    ("between", "width", "shares"),
    [
        (lambda m, x: x.chunk(2, -1)[0] * F.silu(x.chunk(2, -1)[1]), 16, 2),
        (lambda m, x: F.gelu(x).split(8, 2)[0], 16, 2),
        (lambda m, x: x.transpose(1, 2).chunk(2, dim=1)[1].transpose(1, 2), 16, 2),
        (_attention_of_one_product, 24, 3),
    ],
)
def test_shares_of_a_product(between, width, shares):
    assert plan_around(between, width=width).divisions["first"] == LayerDivision("column", shares)


APART = "takes the divided dimension apart"


@pytest.mark.parametrize(
    ("between", "width", "why"),
    [
        (lambda m, x: x.flip(-1), 8, "flip() has no rule"),
        (lambda m, x: F.dropout(x, inplace=True), 8, "dropout() in place changes"),
        (lambda m, x: F.layer_norm(x, (8,)), 8, "layer_norm() combines elements along the divided"),
        (lambda m, x: x.softmax(-1), 8, "softmax() combines elements along the divided dimension"),
        (lambda m, x: x - x.mean(), 8, "mean() combines all elements"),
        (lambda m, x: x.view(3, 5, 2, 4).transpose(2, 3).reshape(3, 5, 8), 8, "reshape()"),
        (lambda m, x: x.view(3, 40)[:, :8], 8, "view() from (3, 5, 8) to (3, 40) leaves no dim"),
        (lambda m, x: x[..., torch.tensor([0] * 8)], 8, f"__getitem__() {APART}"),
        (lambda m, x: torch.cat([x[..., 4:], x[..., :4]], -1), 8, APART),
        (lambda m, x: torch.cat([x, torch.ones(3, 1, 8)], 1), 8, "one that is whole"),
        (lambda m, x: torch.zeros(3, 5, 8).add_(x), 8, "writes a divided activation into one"),
        (lambda m, x: x.transpose(1, 2)[:, :, :4].repeat(1, 1, 2), 8, "repeat() has no rule"),
        (lambda m, x: x + x.view(3, 5, 2, 4).transpose(1, 2).reshape(3, 5, 8), 8, "reshape() from"),
        (lambda m, x: x + m.first(x[..., :4]), 8, APART),
        (lambda m, x: x if x.sum().item() > 0 else -x, 8, ""),
        (lambda m, x: x + m.first.weight.square().sum(), 8, "also used in square()"),
        (lambda m, x: x * m.first.weight.shape[0], 8, "also used in shape()"),
        (lambda m, x: x.chunk(2, -1)[0].chunk(2, -1)[0], 32, "divides a share of a product in"),
        (lambda m, x: (x * m.scale).chunk(2, -1)[0], 16, "share of a product"),
        (lambda m, x: x.split([8, 4, 4], -1)[0], 16, "cuts the product into [8, 4, 4]"),
    ],
)
def test_operations_that_leave_a_layer_whole(between, width, why):
    plan = plan_around(between, width=width)
    assert not plan.divisions
    assert plan.fraction == 0
    assert why in plan.whole["first"]


class Own(nn.Linear):
    """A linear layer of a class of its own."""

    def __init__(self, after):
        super().__init__(20, 8)
        self.after = after

    def forward(self, x, unused=None):
        return self.after(super().forward(x))


def two(forward, first=None, second=None):
    return Net(forward, first=first or nn.Linear(20, 20), second=second or nn.Linear(20, 20))


def behind(first, *extra):
    return two(lambda m, x: m.second(m.first(x, *extra).flatten(1)), first, nn.Linear(8, 4))


def in_two_shares(m, x):
    x = m.first(x)
    return m.second(x.chunk(2, -1)[0]) + m.third(x.chunk(4, -1)[0])


LINEAR = {"second": nn.Linear(8, 4), "third": nn.Linear(4, 4)}
IN_TWO_SHARES = Net(in_two_shares, first=nn.Linear(20, 16), **LINEAR)


def of_one_weight():
    model = nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 20))
    model[0].weight = model[2].weight
    return model


def with_unused():
    model = MLP()
    model[0].unused = nn.Linear(4, 4)
    return model


class Returning(MLP):
    """Returns what its first layer computes, too."""

    def __init__(self, key, hold):
        super().__init__()
        self.returned = key, hold

    def forward(self, x):
        key, hold = self.returned
        return {"y": super().forward(x), key: hold(self[0](x))}


class DynamicCache:
    def __init__(self, keys):
        self.layers = [keys]


WEIGHT_NORM = nn.utils.parametrizations.weight_norm


@pytest.mark.parametrize(
    ("model", "divided", "layer", "why"),
    [
        (behind(Own(lambda y: y * 2)), "", "first", "besides the product"),
        (behind(Own(lambda y: y.view(-1, 4, 2))), "", "first", "the product in another shape"),
        (behind(Own(lambda y: y)), "first second", "first", ""),
        (behind(Own(lambda y: y), None), "", "first", "takes or returns more than one tensor"),
        (behind(WEIGHT_NORM(nn.Linear(20, 8))), "", "second", ""),
        (of_one_weight(), "", "0", "it shares a parameter with 2"),
        (of_one_weight(), "", "2", "it shares a parameter with 0"),
        (
            two(lambda m, x: m.second(x) + m.second(m.first(x))),
            "",
            "first",
            "second, which takes its output, stays whole: it takes whole activations",
        ),
        (IN_TWO_SHARES, "", "first", "its output is used in 2 and in 4 shares"),
        (with_unused(), "0 2", "0.unused", "the forward does not call it"),
        (Returning("hidden", lambda t: [t]), "2 4", "0", "what it computes from it in 'hidden'"),
        (Returning("past_key_values", lambda t: [t]), "0 2", "0", ""),
        (Returning(1, DynamicCache), "0 2", "0", ""),
    ],
)
def test_a_layer_that_stays_whole_says_why(model, divided, layer, why):
    plan = plan_of(model, X)
    assert " ".join(sorted(plan.divisions)) == divided
    assert why in plan.whole.get(layer, "")


def test_lengths_that_the_ranks_do_not_divide():
    assert plan_around(lambda m, x: x, ways=3).whole["first"] == (
        "its 8 outputs are no multiple of the 3 ranks"
    )
    plan = plan_of(Llama(heads=8, kv_heads=4), IDS, 8)
    of_blocks = {n for n in plan.divisions if n.startswith("layers")}
    assert {n.split(".")[2] for n in of_blocks} == {"gate", "up", "down"}
    assert "that 8 ranks could divide" in plan.whole["layers.0.k_proj"]
    plan = plan_of(Encoder(heads=4), WORDS, 8)
    assert plan.whole[f"{LAYERS}.0.self_attn"] == "its 4 heads are no multiple of the 8 ranks"
    assert plan.divisions[f"{LAYERS}.0.linear1"] == COLUMN


def test_a_forward_that_cannot_be_followed_needs_an_empty_plan():
    with pytest.raises(HvkitError, match=r"cannot be followed on the meta device.*plan=\{\}"):
        plan_around(lambda m, x: torch.from_numpy(x.detach().numpy()))
    assert plan_layers(around(None), (), {}, 2, {}).divisions == {}
    assert plan_layers(MLP(), (), {}, 1).divisions == {}
