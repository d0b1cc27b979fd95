"""PyTorch: the tensor axis behind ``distribute``, alone and with the other axes."""

import functools

import pytest
import torch
from cases import MORE, cases
from mesh_models import GPT, MLP, SMALL, Encoder, Experts, Llama, MixtureNet
from mesh_training import (
    both,
    cross_entropy,
    difference,
    differences,
    distributed,
    fewer_on_four,
    part_size,
    tokens,
    train,
    vectors,
    whole_state,
    with_gradients,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvkit
from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor import sequence_parallel


class Scored(GPT):
    """Returns a loss for each sample."""

    def forward(self, ids):
        logits = super().forward(ids[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)


SEQUENCES = functools.partial(vectors, shape=(6, 20))
MODELS = {
    "GPT": (SMALL, tokens),
    "GPT of 65 words": (functools.partial(GPT, vocab=65, layers=4), tokens),
    "GPT with its loss": (functools.partial(Scored, layers=4), tokens),
    "Llama": (functools.partial(Llama, layers=4), tokens),
    "encoder": (Encoder, SEQUENCES),
    "experts": (functools.partial(MixtureNet, "module"), tokens),
    "experts in loops": (functools.partial(MixtureNet, "loop in a module"), tokens),
    "experts with biases": (functools.partial(MixtureNet, "module in turns"), tokens),
    "MLP": (MLP, vectors),
    "one layer": (functools.partial(nn.Linear, 20, 10), vectors),
}
TENSOR = {"mesh": hvkit.Mesh(tensor=2), "microbatches": None}


def loss_of(outputs, targets):
    return outputs.mean() if outputs.dim() == 1 else cross_entropy(outputs, targets)


def assert_trains_as_one_process(name, **options):
    make, data_of = MODELS[name]
    weights, losses, norms = differences(make, data_of(4), loss_of=loss_of, **options)
    assert weights < 1e-11
    assert losses < 1e-12
    assert norms < 1e-11


@pytest.mark.parametrize("name", fewer_on_four(cases(MODELS), ["GPT", "experts"]))
def test_it_trains_the_model_of_one_process(name):
    assert_trains_as_one_process(name, **TENSOR)


@pytest.mark.skipif(hvkit.size() < 4, reason="a pipeline of two stages of two ranks each")
@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("GPT", "GPipe"),
        ("GPT with its loss", "1F1B"),
        ("Llama", "1F1B"),
        ("encoder", "GPipe"),
        ("experts in loops", "GPipe"),
        ("experts with biases", "1F1B"),
    ],
)
def test_stages_of_divided_layers(name, schedule):
    mesh = hvkit.Mesh(pipeline=2, tensor=2)
    assert_trains_as_one_process(name, mesh=mesh, schedule=schedule, together=4)


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("name", "divided"),
    cases([("GPT", 0.47), ("encoder", 0.39), ("experts with biases", 0.46), ("MLP", 0.29)]),
)
def test_each_rank_holds_a_part(name, divided):
    make, data_of = MODELS[name]
    whole = sum(p.numel() for p in make().parameters())
    model, optimizer = distributed(make(), **TENSOR)
    train(model, optimizer, data_of(1), loss_of)
    assert sum(p.numel() for p in model.parameters()) == whole
    mine = sum(map(part_size, model.parameters()))
    assert mine < whole * (1 - divided)
    assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == mine


class OfMode(Scored):
    """Uses the weight of its words in another way in evaluation."""

    def __init__(self, evaluate):
        super().__init__(layers=4)
        self.evaluate = evaluate

    def forward(self, ids):
        return super().forward(ids) if self.training else self.evaluate(self, ids)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("evaluate", "words"),
    [(GPT.forward, 32), (lambda m, x: GPT.forward(m, x) + m.wte.weight.sum(), 64)],
)
def test_a_vocabulary_that_evaluation_uses_otherwise(evaluate, words):
    make = functools.partial(OfMode, evaluate)
    (reference, its), (model, own) = both(make, **TENSOR)
    data = tokens(2)
    for _ in range(2):
        train(reference.train(), its, data, loss_of)
        train(model.train(), own, data, loss_of)
        assert part_size(model.wte.weight) == words * 32
        with torch.no_grad():
            x, _ = data[0]
            assert torch.allclose(model.eval()(x), reference.eval()(x), atol=1e-11)


@MORE
@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("plan", "divided"),
    [
        (
            {"h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise", "lm_head": "colwise"},
            {*(f"h.{block}.mlp.{layer}" for block in (0, 1) for layer in (0, 2)), "lm_head"},
        ),
        ({"h.0.mlp.0": "colwise", "h.1.mlp.2": "rowwise"}, {"h.0.mlp.0", "h.1.mlp.2"}),
    ],
    ids=["pairs, and the last layer", "halves of pairs"],
)
def test_a_plan_in_words(plan, divided):
    make = functools.partial(GPT, layers=2, tied=False)
    assert max(differences(make, tokens(3), plan=plan, **TENSOR)) < 1e-11
    _, (model, optimizer) = both(make, plan=plan, **TENSOR)
    train(model, optimizer, tokens(1), loss_of)
    weights = {
        name: layer.weight for name, layer in model.named_modules() if hasattr(layer, "weight")
    }
    assert {name for name, p in weights.items() if part_size(p) < p.numel()} == divided


@MORE
@pytest.mark.two_ranks
def test_a_hook_of_one_rank_alone():
    """It needs whole activations, which the other ranks would not join."""
    found = []

    def look(module, args, y):
        found.append(float(y.detach().flip(1).sum().is_meta))

    def make():
        model = SMALL()
        for block in model.h if hvkit.rank() == 0 else ():
            block.register_forward_hook(look)
        return model

    assert max(differences(make, tokens(2), **TENSOR)) < 1e-11
    assert len(found) > 4 or hvkit.rank()


class Recomputed(nn.Module):
    """Blocks between the layers of a pair, so that what they take is divided."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(20, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2)
        )

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@MORE
@pytest.mark.two_ranks
def test_blocks_that_are_computed_again_between_the_layers_of_a_pair(monkeypatch):
    monkeypatch.setattr(sequence_parallel, "SMALLEST", 1 << 40)  # pairs reach over blocks
    assert max(differences(Recomputed, vectors(3), **TENSOR)) < 1e-11


@MORE
@pytest.mark.two_ranks
def test_lines_of_a_script_see_whole_experts():
    (reference, its), (model, own) = both(lambda: MixtureNet("module in turns"), **TENSOR)
    seen = [[], []]
    for each, kept in zip((reference, model), seen, strict=True):
        for block in each.blocks:
            block.mixture.experts.register_forward_hook(lambda _, x, y, kept=kept: kept.append(y))
    for x, y in tokens(3, rows=4, length=6):
        for each, optimizer in ((reference, its), (model, own)):
            optimizer.zero_grad()
            loss = cross_entropy(each(x), y)
            experts = each.blocks[1].mixture.experts
            (loss + 0.01 * sum(p.norm() + p[2].amax() for p in experts.parameters())).backward()
            experts.gate_up.grad -= experts.gate_up.grad.mean((1, 2), keepdim=True)
            optimizer.step()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    assert max(float((p.grad.norm() - q.grad.norm()).abs()) for p, q in pairs) < 1e-12
    expected = dict(reference.named_parameters())
    found = whole_state(model, own)
    assert difference(found, expected, with_gradients(reference, its)) < 1e-11
    assert all(torch.allclose(a, b, atol=1e-11) for a, b in zip(*seen, strict=True))


@MORE
@pytest.mark.two_ranks
def test_experts_that_are_called_in_another_way_than_in_the_first_call():
    class WithMask(Experts):
        def forward(self, x, places, weights, mask=None):
            y = super().forward(x, places, weights)
            return y if mask is None else F.layer_norm(y, y.shape[-1:]) * mask

    model = MixtureNet("module")
    for block in model.blocks:
        block.mixture.experts.__class__ = WithMask
    model, _ = distributed(model, **TENSOR)
    x, _ = tokens(1, rows=4, length=6)[0]
    model(x)
    experts = model.blocks[0].mixture.experts
    routes = torch.ones(24, 16), torch.zeros(24, 2, dtype=torch.long), torch.ones(24, 2)
    with pytest.raises(HvkitError, match="called with other arguments than in the first call"):
        experts(*routes, torch.ones(24, 1))
