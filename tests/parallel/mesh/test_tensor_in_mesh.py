"""PyTorch: the tensor axis behind ``distribute``, alone and with the other axes."""

import copy
import functools

import pytest
import torch
from cases import MORE, cases
from mesh_models import GPT, MLP, Encoder, Experts, Llama, MixtureNet
from mesh_training import (
    adamw,
    cross_entropy,
    difference,
    differences,
    distributed,
    of_this_rank,
    part_size,
    tokens,
    train,
    vectors,
    whole_state,
    with_gradients,
)
from ranks import shared_folder
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvkit
from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.tensor import streams


class Scored(GPT):
    """Returns a loss for each sample."""

    def forward(self, ids):
        logits = super().forward(ids[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)


SEQUENCES = functools.partial(vectors, shape=(6, 20))
MODELS = {
    "GPT": (functools.partial(GPT, layers=4), tokens, 0.48),
    "GPT of 65 words": (functools.partial(GPT, vocab=65, layers=4), tokens, 0.48),
    "GPT, untied": (functools.partial(GPT, layers=4, tied=False), tokens, 0.48),
    "GPT with its loss": (functools.partial(Scored, layers=4), tokens, 0.48),
    "Llama": (functools.partial(Llama, layers=4), tokens, 0.49),
    "encoder": (Encoder, SEQUENCES, 0.4),
    "experts": (functools.partial(MixtureNet, "module"), tokens, 0.48),
    "experts in loops": (functools.partial(MixtureNet, "loop in a module"), tokens, 0.48),
    "experts with biases": (functools.partial(MixtureNet, "module in turns"), tokens, 0.47),
    "MLP": (MLP, vectors, 0.3),
}


def loss_of(outputs, targets):
    return outputs.mean() if outputs.dim() == 1 else cross_entropy(outputs, targets)


@pytest.mark.parametrize("name", cases(MODELS))
def test_it_trains_the_model_of_one_process(name):
    make, data_of, _ = MODELS[name]
    weights, losses, norms = differences(
        make, data_of(), loss_of=loss_of, mesh=hvkit.Mesh(tensor=2), microbatches=None
    )
    assert weights < 1e-11
    assert losses < 1e-12
    assert norms < 1e-11


@pytest.mark.parametrize("name", cases(MODELS))
def test_each_rank_holds_a_part(name):
    make, data_of, part = MODELS[name]
    whole = sum(p.numel() for p in make().parameters())
    model, optimizer = distributed(make(), mesh=hvkit.Mesh(tensor=2), microbatches=None)
    train(model, optimizer, of_this_rank(data_of(1)), loss_of)
    assert sum(p.numel() for p in model.parameters()) == whole
    mine = sum(map(part_size, model.parameters()))
    assert mine < whole * (1 - part + 0.01)
    assert sum(state["exp_avg"].numel() for state in optimizer.state.values()) == mine


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("name", [n for n in MODELS if n != "MLP"])
def test_stages_of_divided_layers(name, schedule):
    if hvkit.size() < 4:
        pytest.skip("a pipeline of two stages of two ranks each")
    make, data_of, _ = MODELS[name]
    mesh = hvkit.Mesh(pipeline=2, tensor=2)
    weights, losses, norms = differences(
        make, data_of(), loss_of=loss_of, mesh=mesh, schedule=schedule, together=4
    )
    assert weights < 1e-11
    assert losses < 1e-12
    assert norms < 1e-11


class OfMode(Scored):
    """Uses the weight of its words in another way in evaluation."""

    def __init__(self, evaluate):
        super().__init__(layers=4)
        self.evaluate = evaluate

    def forward(self, ids):
        return super().forward(ids) if self.training else self.evaluate(self, ids)


@MORE
@pytest.mark.parametrize(
    ("evaluate", "words"),
    [(GPT.forward, 32), (lambda m, x: GPT.forward(m, x) + m.wte.weight.sum(), 64)],
)
def test_a_vocabulary_that_evaluation_uses_otherwise(evaluate, words):
    make, tensor = functools.partial(OfMode, evaluate), {"mesh": hvkit.Mesh(tensor=2)}
    tensor["microbatches"] = None
    assert max(differences(make, tokens(4), loss_of=loss_of, **tensor)) < 1e-11
    torch.manual_seed(0)
    reference = make()
    model, optimizer = distributed(
        copy.deepcopy(reference), lambda m: torch.optim.SGD(m.parameters(), 0.0), **tensor
    )
    train(model, optimizer, of_this_rank(tokens(1)), loss_of)
    assert part_size(model.wte.weight) == words * 32
    x = of_this_rank(tokens(1))[0][0]
    assert torch.allclose(model.eval()(x), reference.eval()(x), atol=1e-12)


@MORE
def test_a_plan_in_words():
    make = functools.partial(GPT, layers=4, tied=False)
    plan = {"h.*.mlp.0": "colwise", "h.*.mlp.2": "rowwise"}
    mesh = hvkit.Mesh(tensor=2)
    found = differences(make, tokens(6), mesh=mesh, microbatches=None, plan=plan)
    assert max(found) < 1e-11


@MORE
def test_dropout_is_the_same_on_both_ranks():
    torch.manual_seed(hvkit.rank())
    make = functools.partial(GPT, layers=2, dropout=0.2)
    model, optimizer = distributed(make(), mesh=hvkit.Mesh(tensor=2), microbatches=None)
    train(model, optimizer, of_this_rank(tokens(5)))
    whole = [p.detach() for n, p in model.named_parameters() if "ln_" in n]
    everyone = hvkit.allgather(torch.cat(whole)[None])
    together = everyone[hvkit.rank() // 2 * 2 :][:2]
    assert torch.equal(together[0], together[1])


@MORE
def test_a_hook_of_one_rank_alone():
    """It needs whole activations, which the other ranks would not join."""
    found = []

    def look(module, args, y):
        found.append(float(y.detach().flip(1).sum().is_meta))

    def make():
        model = GPT(layers=4)
        for block in model.h if hvkit.rank() == 0 else ():
            block.register_forward_hook(look)
        return model

    mesh = hvkit.Mesh(tensor=2)
    assert max(differences(make, tokens(2), mesh=mesh, microbatches=None)) < 1e-11
    assert len(found) > 4 or hvkit.rank()


@MORE
def test_a_file_is_that_of_the_plain_model(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    data = tokens(6)
    torch.manual_seed(0)
    reference = GPT(layers=4)
    alone = adamw(reference)
    tensor = {"mesh": hvkit.Mesh(tensor=2), "microbatches": None}
    for number, options in enumerate([tensor, {}, tensor]):
        steps = data[2 * number : 2 * number + 2]
        torch.manual_seed(number)
        model, optimizer = distributed(GPT(layers=4), **options)
        if number == 0:
            model.load_state_dict(reference.state_dict())
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        if number == 2:  # also into a model that is divided already
            train(model, optimizer, of_this_rank(data[:1]))
        assert checkpoint.restore().step == 2 * number
        train(model, optimizer, of_this_rank(steps))
        train(reference, alone, steps)
        checkpoint.save(epoch=0, step=2 * number + 2)
    assert (
        difference(whole_state(model), reference.state_dict(), with_gradients(reference, alone))
        < 1e-11
    )


@MORE
def test_a_resumed_run_is_the_undisturbed_run(tmp_path_factory):
    """With dropout, whose numbers both ranks draw together."""
    folder = shared_folder(tmp_path_factory)
    data = of_this_rank(tokens(6))
    make = functools.partial(GPT, layers=2, dropout=0.2)
    tensor = {"mesh": hvkit.Mesh(tensor=2), "microbatches": None}
    torch.manual_seed(hvkit.rank())
    model, optimizer = distributed(make(), **tensor)
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    train(model, optimizer, data[:3])
    checkpoint.save(epoch=0, step=3)
    train(model, optimizer, data[3:])
    undisturbed = whole_state(model)
    for before in (0, 1):
        torch.manual_seed(9)
        model, optimizer = distributed(make(), **tensor)
        train(model, optimizer, data[:before])
        assert hvkit.Checkpoint(folder, model=model, optimizer=optimizer).restore().step == 3
        train(model, optimizer, data[3:])
        assert difference(whole_state(model), undisturbed) == 0.0


@MORE
def test_a_model_that_is_one_layer():
    reference = nn.Linear(20, 10)
    model = copy.deepcopy(reference)
    its = adamw(reference)
    model, own = distributed(model, mesh=hvkit.Mesh(tensor=2), microbatches=None)
    data = vectors(3)
    train(reference, its, data)
    train(model, own, of_this_rank(data, 2))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


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
def test_blocks_that_are_computed_again_between_the_layers_of_a_pair(monkeypatch):
    monkeypatch.setattr(streams, "SMALLEST", 1 << 40)  # no stream: pairs reach over blocks
    apart = differences(Recomputed, vectors(), mesh=hvkit.Mesh(tensor=2), microbatches=None)
    assert max(apart) < 1e-11


@MORE
def test_lines_of_a_script_see_whole_experts():
    reference = MixtureNet("module in turns")
    model = copy.deepcopy(reference)
    its, own = adamw(reference), adamw(model)
    model, own = hvkit.distribute(model, own, mesh=hvkit.Mesh(tensor=hvkit.size()))
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
def test_experts_that_are_called_in_another_way_than_in_the_first_call():
    class WithMask(Experts):
        def forward(self, x, places, weights, mask=None):
            y = super().forward(x, places, weights)
            return y if mask is None else F.layer_norm(y, y.shape[-1:]) * mask

    model = MixtureNet("module")
    for block in model.blocks:
        block.mixture.experts.__class__ = WithMask
    model, _ = distributed(model, mesh=hvkit.Mesh(tensor=hvkit.size()), microbatches=None)
    x, _ = tokens(1, rows=4, length=6)[0]
    model(x)
    experts = model.blocks[0].mixture.experts
    routes = torch.ones(24, 16), torch.zeros(24, 2, dtype=torch.long), torch.ones(24, 2)
    with pytest.raises(HvkitError, match="called with other arguments than in the first call"):
        experts(*routes, torch.ones(24, 1))
