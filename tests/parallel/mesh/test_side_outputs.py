"""PyTorch: what a forward keeps beside its result, for the script's loss, in a mesh."""

import collections
import copy

import pytest
import torch
from cases import MORE, cases
from mesh_models import Mixture, MixtureNet
from mesh_training import adamw, difference, tokens, whole_state, with_gradients
from ranks import error_of
from torch import nn
from torch.nn import functional as F

import hvkit
from hvkit.frameworks.pytorch.model_parallel import division
from hvkit.frameworks.pytorch.model_parallel.pipeline import microbatches

pytestmark = pytest.mark.skipif(hvkit.size() != 2, reason="for two ranks")
AXES = {
    "GPipe, whole batch": {"pipeline": 2, "microbatches": 1},
    "GPipe": {"pipeline": 2, "microbatches": 4},
    "1F1B": {"pipeline": 2, "microbatches": 4, "schedule": "1F1B"},
    "tensor": {"tensor": 2},
    "shard": {"shard": 2},
}


def apart_in_microbatches(make, loss_of, axis, collect=None, **options):
    """How far weights and losses are from those of one process in the same micro-batches.

    Args:
        axis: a name in ``AXES``.
        collect: called with the model, returns what its hooks fill, which the loss takes.
    """
    options = AXES[axis] | options
    axis = next(iter(options))
    mesh = hvkit.Mesh(**{axis: options.pop(axis)})
    torch.manual_seed(0)
    reference = make()
    model = copy.deepcopy(reference)
    kept = [collect and collect(each) for each in (reference, model)]
    its, own = adamw(reference), adamw(model)
    model, own = hvkit.distribute(model, own, mesh=mesh, **options)
    losses = []
    for x, y in tokens(3, rows=8, length=4):
        its.zero_grad()
        own.zero_grad()
        parts = 2 if axis == "shard" else 1
        pieces = [(x[n::parts], y[n::parts]) for n in range(parts)]
        mine = pieces[hvkit.rank() % parts]
        if axis == "pipeline":
            count = options["microbatches"]
            pieces = list(zip(x.chunk(count), y.chunk(count), strict=True))
        expected = sum(loss_of(reference, *piece, kept[0]) for piece in pieces) / len(pieces)
        expected.backward()
        loss = loss_of(model, *mine, kept[1])
        loss.backward()
        its.step()
        own.step()
        losses.append(abs(hvkit.average(loss.item()) - expected.item()))
    found = whole_state(model, own)
    weights = difference(found, dict(reference.named_parameters()), with_gradients(reference, its))
    return max(weights, *losses)


def of_logits(logits, y):
    return F.cross_entropy(logits.flatten(0, -2), y.flatten())


def with_attributes(model, x, y, _):
    return of_logits(model(x), y) + 0.1 * sum(block.mixture.aux for block in model.blocks)


@pytest.mark.parametrize(
    ("experts", "axis"),
    cases(
        [
            ("loop in a module", "GPipe"),
            ("loop in a module", "tensor"),
            ("loop", "GPipe, whole batch"),
            ("loop", "tensor"),
            ("products", "1F1B"),
            ("products", "shard"),
            ("module", "GPipe"),
        ],
        2,
    ),
)
def test_an_auxiliary_loss_on_a_block(experts, axis):
    assert apart_in_microbatches(lambda: MixtureNet(experts), with_attributes, axis) < 1e-11


@MORE
@pytest.mark.parametrize("axis", ["GPipe", "tensor", "shard"])
def test_experts_without_samples(axis):
    """Other ones on each rank and in each micro-batch; AdamW leaves out what no rank has used."""
    make = lambda: MixtureNet("loop", count=8, chosen=1)  # noqa: E731
    assert apart_in_microbatches(make, with_attributes, axis) < 1e-11


class OnlyInTraining(Mixture):
    def forward(self, x):
        y = super().forward(x)
        if not self.training:
            self.aux = None
        return y


@MORE
@pytest.mark.parametrize(("first", "schedule"), [(True, "GPipe"), (False, "1F1B")])
def test_a_loss_that_only_training_keeps(first, schedule):
    torch.manual_seed(0)
    reference = MixtureNet("products")
    for block in reference.blocks:
        block.mixture.__class__ = OnlyInTraining
    model = copy.deepcopy(reference)
    mesh, options = hvkit.Mesh(pipeline=2), {"microbatches": 4, "schedule": schedule}
    model, _ = hvkit.distribute(model, adamw(model), mesh=mesh, **options)
    x, y = tokens(1, rows=8, length=4)[0]
    for mode in (first, not first, first, not first, True):
        model.train(mode)
        reference.train(mode)
        if not mode:
            with torch.no_grad():
                assert float((model(x) - reference(x)).abs().max()) < 1e-12
            assert [block.mixture.aux for block in model.blocks] == [None] * 2
            continue
        model.zero_grad()
        loss = with_attributes(model, x, y, None)
        loss.backward()
        parts = zip(x.chunk(4), y.chunk(4), strict=True)
        expected = sum(with_attributes(reference, *part, None) for part in parts) / 4
        assert abs(loss.item() - expected.item()) < 1e-12


def with_penalty(model, x, y, kept):
    kept.clear()
    loss = of_logits(model(x), y)
    values = kept.values() if isinstance(kept, dict) else kept
    return loss + 0.1 * sum(each.square().mean() for each in values)


def in_a_list(model):
    kept = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, output: kept.append(output))
    return kept


def in_a_deque(model):
    kept = collections.deque()
    for block in model.blocks:
        # Between a column and a row layer, if a tensor axis divided them.
        block.dense[0].register_forward_hook(lambda m, a, output, kept=kept: kept.append(output))
    return kept


@MORE
@pytest.mark.parametrize(
    ("collect", "axis"),
    [
        (in_a_list, "GPipe"),
        (in_a_list, "shard"),
        (in_a_deque, "1F1B"),
        (in_a_deque, "tensor"),
    ],
)
def test_activations_that_hooks_collect(collect, axis):
    assert (
        apart_in_microbatches(lambda: MixtureNet("products"), with_penalty, axis, collect) < 1e-11
    )


@pytest.mark.parametrize(
    ("loss_of", "collect"), cases([(with_attributes, None), (with_penalty, in_a_deque)])
)
def test_a_script_reads_the_loss_before_backward(loss_of, collect):
    """A batch of another schedule then runs by GPipe."""

    def read_early(model, x, y, kept):
        loss = loss_of(model, x, y, kept)
        count = kept and len(kept)
        assert loss.item() > 0
        assert (kept and len(kept)) == count
        return loss

    make = lambda: MixtureNet("products")  # noqa: E731
    assert apart_in_microbatches(make, read_early, "1F1B", collect) < 1e-11


class AddsUp(MixtureNet):
    """The model's own forward adds up what its blocks keep."""

    def forward(self, ids):
        x, total = self.embed(ids), 0.0
        for block in self.blocks:
            x = block(x)
            total = total + block.mixture.aux
        return self.head(x), total


class AddsUpAtTheEnd(MixtureNet):
    def forward(self, ids):
        logits = super().forward(ids)
        return logits, torch.stack([block.mixture.aux for block in self.blocks]).sum()


class ClearsItsList(MixtureNet):
    """Blocks and model hold one list."""

    def __init__(self, experts):
        super().__init__(experts)
        self.log = []
        for block in self.blocks:
            block.log = self.log

    def forward(self, ids):
        self.log.clear()
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            block.log.append(x.square().mean())
        return self.head(x)


@MORE
@pytest.mark.parametrize("axis", ["1F1B", "tensor", "shard"])
def test_a_list_that_the_forward_clears(axis):
    def loss_of(model, x, y, _):
        loss = of_logits(model(x), y) + 0.1 * sum(model.log)
        assert len(model.log) == len(model.blocks)
        assert all(block.log is model.log for block in model.blocks)
        return loss

    assert apart_in_microbatches(lambda: ClearsItsList("products"), loss_of, axis) < 1e-11


class KeepsFloats(MixtureNet):
    def forward(self, ids):
        x = super().forward(ids)
        self.mean = 0.9 * getattr(self, "mean", 0.0) + float(x.detach().mean())
        return x


@MORE
@pytest.mark.parametrize("named", [True, False])
def test_floats_that_a_forward_keeps_are_named(named, monkeypatch):
    found = []
    monkeypatch.setattr(division, "warn_once", lambda kind, text: found.append(text))
    make = KeepsFloats if named else MixtureNet
    loss_of = lambda m, x, y, _: of_logits(m(x), y)  # noqa: E731
    apart_in_microbatches(lambda: make("products"), loss_of, "GPipe, whole batch")
    assert any("keeps a Python number in mean" in each for each in found) == named


def with_total(model, x, y, _):
    logits, total = model(x)
    return of_logits(logits, y) + 0.1 * total


@MORE
@pytest.mark.parametrize(("kind", "experts"), [(AddsUp, "loop"), (AddsUpAtTheEnd, "products")])
def test_a_forward_that_adds_up_auxiliary_losses(kind, experts):
    """Right in one micro-batch; in several, the mean is refused as any other."""
    make = lambda: kind(experts)  # noqa: E731
    assert apart_in_microbatches(make, with_total, "GPipe, whole batch") < 1e-11
    refused, text = error_of(lambda: apart_in_microbatches(make, with_total, "GPipe"))
    assert refused is ValueError
    assert "in 4 micro-batches" in text


class ReturnsRouterLogits(MixtureNet):
    """As Hugging Face's do: for each layer a tensor of all tokens of all samples."""

    def forward(self, ids):
        found = []
        hooks = [
            block.mixture.gate.register_forward_hook(lambda m, a, output: found.append(output))
            for block in self.blocks
        ]
        logits = super().forward(ids)
        for hook in hooks:
            hook.remove()
        return logits, tuple(found)


def with_router_logits(model, x, y, _):
    logits, found = model(x)
    probabilities = torch.cat(found).softmax(-1)
    load = F.one_hot(probabilities.argmax(-1), probabilities.size(-1)).to(probabilities).mean(0)
    return of_logits(logits, y) + 0.1 * (load * probabilities.mean(0)).sum()


@MORE
@pytest.mark.parametrize("axis", ["GPipe, whole batch", "tensor", "shard"])
def test_router_logits_for_a_loss_of_the_whole_batch(axis):
    make = lambda: ReturnsRouterLogits("products")  # noqa: E731
    assert apart_in_microbatches(make, with_router_logits, axis) < 1e-11


@MORE
@pytest.mark.parametrize(
    "options",
    [
        {"stages": ["blocks.1"]},
        {"stages": ["blocks.0", "blocks.1", "blocks.2"], "schedule": "Interleaved1F1B"},
    ],
)
def test_router_logits_of_the_block_after_which_the_model_is_cut(options):
    def with_sizes(model, x, y, _):
        logits, found = model(x)
        return of_logits(logits, y) + sum((1 + i) * t.square().mean() for i, t in enumerate(found))

    make = lambda: ReturnsRouterLogits("module", layers=4)  # noqa: E731
    assert apart_in_microbatches(make, with_sizes, "GPipe", microbatches=2, **options) < 1e-11


@MORE
def test_a_mean_over_micro_batches_is_named(monkeypatch):
    found = []
    monkeypatch.setattr(microbatches, "warn_once", lambda kind, text: found.append(text))
    apart_in_microbatches(lambda: MixtureNet("products"), with_attributes, "GPipe")
    assert "is another mean over 4 micro-batches than for the whole batch" in found[0]


class CountsRows(nn.Module):
    """Decides by a value how long a result is, and uses its length in the last layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.rest = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        count = len(x[x.sum(-1) > 0])
        for layer in self.rest:
            x = torch.tanh(layer(x))
        return x / (1 + count)


def test_a_length_that_depends_on_values_is_known_to_one_stage_alone():
    """No later stage computes with the length that it would have for other values."""
    model = CountsRows()
    plain = copy.deepcopy(model)
    model, _ = hvkit.distribute(model, adamw(model), mesh=hvkit.Mesh(pipeline=2), microbatches=1)
    x = torch.randn(8, 20)
    assert float((model(x) - plain(x)).abs().max()) < 1e-12


def test_a_penalty_on_weights_of_all_stages_names_the_way():
    """Each rank has the values of its own stage."""
    torch.manual_seed(0)
    reference = MixtureNet("products")
    model, penalised = copy.deepcopy(reference), copy.deepcopy(reference)
    x, y = tokens(1, rows=8, length=6)[0]

    def penalty(of):
        return 0.1 * sum(p.square().sum() for p in of.parameters())

    mesh = hvkit.Mesh(pipeline=2)
    penalised, _ = hvkit.distribute(penalised, adamw(penalised), mesh=mesh)
    loss = of_logits(penalised(x), y) + penalty(penalised)
    with pytest.raises(ValueError, match="weight_decay=") as caught:
        loss.backward()
    assert "no value on this rank" in str(caught.value)

    its = torch.optim.Adam(reference.parameters())
    own = torch.optim.Adam(model.parameters(), weight_decay=0.2)
    model, own = hvkit.distribute(model, own, mesh=mesh, microbatches=1)
    (of_logits(reference(x), y) + penalty(reference)).backward()
    of_logits(model(x), y).backward()
    its.step()
    own.step()
    assert difference(whole_state(model, own), dict(reference.named_parameters())) < 1e-11
