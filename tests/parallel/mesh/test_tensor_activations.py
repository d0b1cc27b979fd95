"""PyTorch: what ranks of a tensor group hold and send of what lies between divided layers."""

import copy

import pytest
import torch
from cases import MORE
from mesh_models import GPT, Llama, RecomputedGPT
from ranks import error_of
from tensor_groups import assert_computes_alike, divided, ids, sent_in_a_pass, sequences
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvkit
from hvkit.frameworks.pytorch.model_parallel.rank_groups import SameRandomNumbers

pytestmark = [MORE, pytest.mark.usefixtures("torch_distributed")]


def held(t):
    return t.to_local() if isinstance(t, DTensor) else t


class DropsBetween(nn.Module):
    """Dropout between the layers of a pair."""

    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)

    def forward(self, x):
        return self.second(self.drop(self.first(x)))


@pytest.mark.parametrize(
    ("model", "layer", "length", "by_rank"),
    [
        (GPT(dropout=0.5), "h.0.mlp.3", 8, True),
        (GPT(dropout=0.5), "h.0.mlp.3", 7, False),  # all ranks hold the whole
        (DropsBetween(), "drop", None, True),
    ],
    ids=["between pairs", "of a length that ranks cannot divide", "inside of a pair"],
)
def test_each_rank_drops_other_elements_of_its_part(model, layer, length, by_rank):
    model = copy.deepcopy(model).double()
    inputs = ids(length=length) if length else torch.randn(4, 8)
    model, _, _ = divided(model, ids() if length else inputs)
    kept = []

    def keep(module, args, y):
        assert held(y).numel() == y.numel() // (hvkit.size() if by_rank else 1)
        kept.append((held(y) != 0).tolist())

    model.get_submodule(layer).register_forward_hook(keep)
    torch.manual_seed(1 + hvkit.rank())
    model(inputs)
    model(inputs)
    found = {str(each) for rank in hvkit.allgather(kept) for each in rank}
    assert len(found) == 2 * (hvkit.size() if by_rank else 1)


@pytest.mark.parametrize(("dropout", "train"), [(0.5, True), (0.5, False), (0.0, True)])
def test_random_numbers_are_drawn_only_to_drop_elements(dropout, train, monkeypatch):
    drawn, different = [], SameRandomNumbers.different
    monkeypatch.setattr(
        SameRandomNumbers, "different", lambda *args: drawn.append(args) or different(*args)
    )
    model, _, _ = divided(GPT(dropout=dropout).train(train), ids())
    model(ids())
    assert bool(drawn) == (dropout > 0 and train)


class Between(GPT):
    """Does something to what lies between its blocks, in a later call."""

    def forward(self, ids, use=lambda h: h):
        h = self.wte(ids) + self.wpe(torch.arange(ids.size(1)))
        for block in self.h:
            h = use(block(h))
        return self.lm_head(self.ln_f(h))


def _written(h):
    other = torch.zeros(4, 8, 32, dtype=h.dtype)
    other[:, :8] = h
    other.add_(h)
    return other


@pytest.mark.parametrize(
    "use",
    [
        lambda h: h[:, -1:],
        lambda h: h.view(-1, 32).view(4, 8, 32).flip(1),
        lambda h: F.group_norm(h.transpose(1, 2), 4).transpose(1, 2),
        lambda h: F.linear(h, torch.eye(32, dtype=h.dtype)) - h.mean(1, keepdim=True),
        lambda h: F.relu(h.mul_(2), inplace=True),
        lambda h: h * (h[h > 0].mean() > h.detach().cpu().numpy().mean()),
        _written,
    ],
)
def test_a_later_call_may_compute_otherwise_between_pairs(use):
    reference, x = Between(), ids()
    model, plan, placements = divided(reference, x)
    assert plan.sequence_regions
    assert_computes_alike(model, placements, reference, lambda m: m(x, use))


def _overwritten(h):
    h[h > 0] = 0
    return h


def _first_overwritten(h):
    h.view(-1, 32)[0].zero_()
    return h


@pytest.mark.parametrize(
    ("use", "why"),
    [
        (_overwritten, "x[...] = value writes into it: write x = torch.where(mask, value, x)"),
        (_first_overwritten, "is one of a copy, into which zero_() would write"),
    ],
)
def test_a_later_call_that_writes_into_a_part(use, why):
    model, _, _ = divided(Between(), ids())
    kind, text = error_of(lambda: model(ids(), use))
    assert kind is hvkit.HvkitError
    assert why in text


class FunctionAgain(nn.Module):
    """Computes a function, between the layers of a pair, again unless ``reentrant`` is None."""

    reentrant = None

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)

    def function(self, x):
        return self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            return x + self.function(x)
        return x + checkpoint(self.function, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize(
    ("make", "batch", "reentrant", "layers"),
    [
        (lambda: RecomputedGPT(dropout=0.2), ids, False, 10),
        (FunctionAgain, lambda: torch.randn(4, 16), False, 2),
        (FunctionAgain, lambda: torch.randn(4, 16), True, 2),
    ],
)
def test_gradient_checkpointing_drops_the_same_elements_again(make, batch, reentrant, layers):
    reference, x, gradients = make(), batch(), []
    for reference.reentrant in (None, reentrant):
        torch.manual_seed(3 + hvkit.rank())
        model, plan, _ = divided(reference, x)
        assert len(plan.divisions) == layers
        model(x).square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert len(gradients[0]) >= 6
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())


class KeyCache:
    """Starts empty, as that of Hugging Face."""

    def __init__(self):
        self.keys = torch.tensor([])


class Decoder(nn.Module):
    """One attention layer, called again with the keys of earlier calls."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(20, 32), nn.Linear(20, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x, cache=None):
        cache = cache or KeyCache()
        q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k))
        cache.keys = k = torch.cat([cache.keys, k], dim=-2)
        y = F.scaled_dot_product_attention(q, k, k)
        return {"y": self.out(y.transpose(1, 2).flatten(2)), "cache": cache}


def test_a_cache_of_keys():
    reference, x = Decoder(), sequences()
    model, plan, _ = divided(reference, x)
    assert set(plan.divisions) == {"q", "k", "out"}
    first, expected = model(x), reference(x)
    for _ in range(2):
        assert torch.allclose(first["y"], expected["y"], atol=1e-12)
        first, expected = model(x, first["cache"]), reference(x, expected["cache"])
    assert first["cache"].keys.to_local().shape == (3, 4 // hvkit.size(), 15, 8)
    first["y"].sum().backward()


@pytest.mark.parametrize(("length", "tied"), [(8, True), (8, False), (7, True)])
def test_bytes_sent_are_the_sums_of_activations_and_the_logits(length, tied):
    x = ids(batch=2, length=8)
    model, _, _ = divided(GPT(layers=3, width=32, tied=tied), x)
    sent = sent_in_a_pass(model, x[:, :length])
    size, tokens, others = 8, 2 * length, hvkit.size() - 1
    features, logits = (tokens * n * size * others // hvkit.size() for n in (32, 64))
    sums = 3 * 2 * 2 + 1  # layers; attention and MLP; forward and backward; of the projection
    # Rows that are looked up are summed, features gathered.
    exchanges = 2 * sums + (2 if tied else 1)
    messages, parameters = sums + 2, 0
    if length % hvkit.size() == 0:
        # Two exchanges in place of a sum. Where the first norm takes the whole, the sum stays.
        messages = exchanges + 1 if tied else exchanges
        # Of the positions, or of what the first block takes, each rank takes a part.
        messages += 1
        exchanges += 1 / 2 if tied else 1
        # The gradients of norms' weights with their biases.
        norms = 7 if tied else 6
        messages += norms
        parameters = norms * 2 * 32 * size * 2 * others // hvkit.size()
    assert sent == (exchanges * features + logits + parameters, messages)


def test_layers_that_take_the_same_activation_share_one_sum():
    x = ids()
    model, _, _ = divided(Llama(layers=1), x)
    # Two exchanges each: what attention and MLP return, what the MLP and the projection take. One:
    # the gradient of what attention takes whole, and of the part of it that is added; two norms;
    # the embedding, and the logits.
    assert sent_in_a_pass(model, x)[1] == 2 * 4 + 2 + 2 + 2
