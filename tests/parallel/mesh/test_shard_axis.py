"""PyTorch: weights of a mesh divided along its shard axis too."""

import copy
import functools

import pytest
import torch
from cases import MORE, cases
from mesh_models import CNN, GPT, MLP, Block, UNet
from mesh_training import (
    adamw,
    cross_entropy,
    difference,
    differences,
    distributed,
    fewer_on_four,
    images,
    of_this_rank,
    tokens,
    train,
    vectors,
    whole_state,
)
from ranks import error_of
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit import main_rank


class PatchTransformer(nn.Module):
    """A small vision transformer. No layer holds its class token and its positions."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 16, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.positions = nn.Parameter(torch.randn(1, 5, 16))
        self.blocks = nn.ModuleList(Block(16, 2, 0.0, True) for _ in range(4))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 0])


SHARD = {"mesh": hvkit.Mesh(shard=2), "microbatches": None}
two_ranks = pytest.mark.two_ranks
on_four = pytest.mark.skipif(hvkit.size() < 4, reason="two axes of two ranks each")


@pytest.mark.parametrize("tied", fewer_on_four(cases([True, False]), [True]))
def test_it_trains_the_model_of_one_process(tied):
    make = functools.partial(GPT, layers=4, tied=tied)
    assert max(differences(make, tokens(4), together=1, **SHARD)) < 1e-11


@MORE
@two_ranks
def test_a_model_without_parts_and_parameters_kept_from_before():
    """All weights are gathered together, and clipping gets what the script has listed early."""
    reference = MLP()
    model = copy.deepcopy(reference)
    its = adamw(reference)
    model, own = distributed(model, **SHARD)
    kept = {id(model): list(model.parameters()), id(reference): list(reference.parameters())}
    data = vectors(6)
    for (x, y), mine in zip(data, of_this_rank(data, 1), strict=True):
        norms = []
        for each, optimizer, batch in ((reference, its, (x, y)), (model, own, mine)):
            optimizer.zero_grad()
            (cross_entropy(each(batch[0]), batch[1]) * 50).backward()
            norms.append(float(nn.utils.clip_grad_norm_(kept[id(each)], 0.1)))
            optimizer.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-12)
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


@on_four
@pytest.mark.parametrize(("tied", "schedule"), [(True, "GPipe"), (False, "1F1B")])
def test_shards_of_stages(tied, schedule):
    make = functools.partial(GPT, layers=4, tied=tied)
    mesh = hvkit.Mesh(shard=2, pipeline=2)
    assert max(differences(make, tokens(4), mesh=mesh, schedule=schedule)) < 1e-11


@on_four
@pytest.mark.parametrize("make", [UNet, PatchTransformer])
def test_shards_of_stages_with_cuts_inside_of_layers(make):
    found = differences(make, images(4), mesh=hvkit.Mesh(shard=2, pipeline=2))
    assert max(found) < 1e-11


@on_four
def test_shards_of_divided_layers():
    make = functools.partial(GPT, layers=4, tied=False)
    mesh = hvkit.Mesh(shard=2, tensor=2)
    assert max(differences(make, tokens(4), mesh=mesh, microbatches=None)) < 1e-11


@on_four
def test_a_hook_on_gathered_shards_of_a_divided_layer_is_refused():
    model, _ = distributed(GPT(layers=1), mesh=hvkit.Mesh(shard=2, tensor=2), microbatches=None)
    x, y = of_this_rank(tokens(1), 2)[0]
    loss = cross_entropy(model(x), y)
    with pytest.raises(ValueError, match="must come before the forward pass"):
        model.wte.weight.register_hook(print)
    loss.backward()


@MORE
@two_ranks
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="came with PyTorch 2.9")
def test_muon_orthogonalises_whole_matrices(monkeypatch):
    """In float64: PyTorch iterates in bfloat16, and rounding leads the weights 1e-2 apart."""

    def muon(model):
        return torch.optim.Muon(model.parameters(), lr=0.05)

    def make():  # rows that ranks cannot divide equally
        layers = [nn.Linear(*sizes, bias=False) for sizes in ((20, 33), (33, 15), (15, 10))]
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])

    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda t: t.double().clone())
    assert max(differences(make, vectors(6), optimizer=muon, together=1, **SHARD)) < 1e-11


@two_ranks
def test_each_rank_holds_its_shard():
    model, optimizer = distributed(GPT(layers=4), **SHARD)
    train(model, optimizer, of_this_rank(tokens(1), 1))
    total = sum(p.numel() for p in model.parameters())
    mine = sum(p.to_local().numel() for p in model.parameters())
    state = sum(each["exp_avg"].to_local().numel() for each in optimizer.state.values())
    assert mine == state
    assert 0.45 < mine / total < 0.55


@two_ranks
def test_refusals():
    for text, make, options in (
        ("PyTorch averages gradients", MLP, {"compression": "bf16"}),
        ("PyTorch averages gradients", MLP, {"strategy": hvkit.LocalSGD(every=2)}),
        ("row-sparse gradients", lambda: torch.nn.Embedding(3, 2, sparse=True), {}),
    ):
        kind, message = error_of(functools.partial(distributed, make(), **SHARD | options))
        assert kind is ValueError
        assert text in message
    model, optimizer = distributed(CNN(), **SHARD)
    kind, message = error_of(lambda: train(model, optimizer, of_this_rank(images(1), 1)))
    assert kind is ValueError
    assert "batch norm keeps statistics" in message


@MORE
@two_ranks
def test_ranks_that_call_another_number_of_times_are_named():
    model, optimizer = distributed(MLP(), **SHARD)
    data = of_this_rank(vectors(2), 1)
    train(model, optimizer, data[:1])
    if hvkit.rank() == 0:
        model.eval()
    kind, message = error_of(lambda: model(data[1][0]))
    assert kind is hvkit.RanksDisagreeError
    assert "makes another call" in message


class ActorCritic(nn.Module):
    """A policy and its value, which a loop may compute with methods of its own."""

    def __init__(self):
        super().__init__()
        self.actor, self.critic = MLP(), nn.Linear(20, 1)

    def forward(self, x):
        return self.act(x)

    def act(self, x):
        return self.actor(x)


@two_ranks
def test_a_loop_that_calls_methods_before_the_model_itself_is_refused():
    model, own = distributed(ActorCritic(), **SHARD)
    own.step()  # without a gradient, as before the first step of a scheduler
    x, y = of_this_rank(vectors(1), 1)[0]
    cross_entropy(model.act(x), y).backward()
    kind, message = error_of(own.step)
    assert kind is ValueError
    assert "AdamW.step() without a call of ActorCritic itself" in message


@two_ranks
def test_functional_calls_are_refused():
    """They put tensors in place of the parameters, of which a rank has a part."""
    model, _ = distributed(MLP(), **SHARD)
    x = of_this_rank(vectors(1), 1)[0][0]
    model(x)
    halves = {name: p / 2 for name, p in MLP().named_parameters()}
    kind, message = error_of(lambda: torch.func.functional_call(model, halves, (x,)))
    assert kind is ValueError
    assert "functional_call gives the model in a mesh another 0.weight" in message


@MORE
@two_ranks
def test_a_function_that_is_compiled_around_the_model_trains_it():
    reference = MLP()
    model = copy.deepcopy(reference)
    its = adamw(reference)
    model, own = distributed(model, **SHARD)

    @torch.compile(backend="aot_eager")
    def loss_of(x, y):
        return cross_entropy(model(x), y)

    data = vectors(3)
    train(reference, its, data)
    for x, y in of_this_rank(data, 1):
        own.zero_grad()
        loss_of(x, y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        own.step()
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


@MORE
@two_ranks
@pytest.mark.parametrize("mean", [False, True])
def test_losses_over_other_numbers_are_named(mean, capsys):
    main_rank._logged.clear()
    model, optimizer = distributed(MLP(), **SHARD)
    weights = torch.linspace(0.1, 1, 10)
    for x, y in of_this_rank(vectors(3), 1):
        loss = F.cross_entropy(model(x), y, weights, reduction="sum" if mean else "mean")
        (hvkit.mean(loss, weights[y].sum()) if mean else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert ("hvkit.mean(total, count)" in capsys.readouterr().err) == (hvkit.is_main() and not mean)


def test_training_goes_on_after_an_evaluation_that_is_saved():
    """PyTorch keeps weights of the model itself gathered after a pass without gradients."""
    torch.manual_seed(0)
    model = PatchTransformer()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    alone = copy.deepcopy(model)
    hvkit.distribute(model, optimizer, mesh=hvkit.Mesh(shard=hvkit.size()))
    x, y = torch.randn(8, 1, 8, 8), torch.arange(8)
    for of_model, step in ((alone, torch.optim.SGD(alone.parameters(), 0.1)), (model, optimizer)):
        part = slice(None) if of_model is alone else slice(hvkit.rank(), None, hvkit.size())
        for _ in range(2):
            cross_entropy(of_model(x[part]), y[part]).backward()
            step.step()
            step.zero_grad()
            with torch.no_grad():
                of_model(x)
            with hvkit.settled(model, optimizer):
                saved = model.state_dict() if hvkit.is_main() else {}
    for name, value in saved.items():
        torch.testing.assert_close(value, alone.state_dict()[name])
