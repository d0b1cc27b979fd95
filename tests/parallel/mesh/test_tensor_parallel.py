"""PyTorch: models whose linear layers are divided among the ranks of a tensor group."""

import copy
import inspect
import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from cases import MORE, pairwise
from mesh_models import CNN, GPT, MLP, Encoder, LearntInside, Llama, ResNet, SkipNet, gpt_of_conv1d
from ranks import error_of, same_on_all_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hvkit
from hvkit.frameworks.pytorch.model_parallel.tensor.layers import divide
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import whole_of
from hvkit.frameworks.pytorch.model_parallel.tensor.plan import prove

pytestmark = pytest.mark.usefixtures("torch_distributed")


def ids(batch=4, length=8):
    return torch.randint(64, (batch, length))


def vectors(batch=6):
    return torch.randn(batch, 20, dtype=torch.float64)


def sequences(batch=3, length=5):
    return torch.randn(batch, length, 20, dtype=torch.float64)


def of_many_lengths(make):
    """Of eight positions, which ranks can divide, and of some that they cannot."""
    lengths = itertools.cycle((8, 7, 8, 1))
    return lambda: make(length=next(lengths))


def images(batch=4):
    return torch.randn(batch, 1, 16, 16, dtype=torch.float64)


def divided(model, *args, words=None, **kwargs):
    """A copy of a model that all ranks divide; the plan, and how its parameters are divided."""
    model = copy.deepcopy(model)
    plan = prove(model, args, kwargs, hvkit.size(), words)
    return model, plan, divide(model, plan, init_device_mesh("cpu", (hvkit.size(),)))


def whole(model, placements, read=lambda p: p.detach()):
    """All parameters of a divided model, whole; a collective."""
    found = {}
    for name, p in model.named_parameters():
        mine = read(p).contiguous()
        if name in placements:
            parts = [torch.empty_like(mine) for _ in range(hvkit.size())]
            dist.all_gather(parts, mine)
            mine = whole_of(parts, placements[name])
        found[name] = mine
    return found


def train(model, batches, optimizer=None):
    """Losses, and by parameter the largest gradient of each element."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.01)
    losses, largest = [], {}
    for x in batches:
        optimizer.zero_grad()
        y = model(x)
        loss = y.square().mean() + y.flatten()[::7].mean()
        loss.backward()
        for name, p in model.named_parameters():
            seen = largest.get(name, torch.zeros_like(p))
            largest[name] = torch.maximum(seen, p.grad.abs())
        optimizer.step()
        losses.append(loss.item())
    return losses, largest


def furthest(found, model, largest):
    """Largest difference to a model's weights; not where gradients are zero but for rounding.

    AdamW makes steps of the learning rate from them, of either sign.
    """
    differences = [
        (found[name] - p.detach())[largest[name] > 1e-12].abs()
        for name, p in model.named_parameters()
    ]
    return max(float(each.max()) for each in differences if each.numel())


@pytest.mark.parametrize(
    ("make", "batch", "share"),
    [
        pytest.param(GPT, of_many_lengths(ids), 0.97, id="GPT"),
        pytest.param(
            lambda: GPT(tied=False, fused=False), ids, 0.97, id="GPT, untied, own attention"
        ),
        pytest.param(gpt_of_conv1d, ids, 0.97, id="GPT of Conv1D"),
        pytest.param(Llama, of_many_lengths(ids), 0.99, id="Llama"),
        pytest.param(lambda: Llama(head_norm=True), ids, 0.99, id="Qwen"),
        pytest.param(LearntInside, sequences, 0.91, id="parameters inside"),
        pytest.param(Encoder, of_many_lengths(sequences), 0.92, id="nn.TransformerEncoder"),
        pytest.param(MLP, vectors, 0.82, id="MLP"),
        pytest.param(SkipNet, vectors, 0.46, id="net with skips"),
        pytest.param(CNN, images, 0.65, id="CNN"),
        pytest.param(ResNet, images, 0.0, id="ResNet"),
    ],
)
def test_weights_are_those_of_one_process(make, batch, share):
    reference = make().double()
    batches = [batch() for _ in range(4)]
    model, plan, placements = divided(reference, batches[0])
    assert plan.share == pytest.approx(share, abs=0.005)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, reference)]
    rest = 1 - plan.share + plan.share / hvkit.size()
    assert sizes[0] / sizes[1] == pytest.approx(rest, abs=0.005)
    losses, _ = train(model, batches)
    expected, largest = train(reference, batches)
    assert losses == pytest.approx(expected, abs=1e-13)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11
    undivided = [p.detach() for n, p in model.named_parameters() if n not in placements]
    assert same_on_all_ranks(p.numpy() for p in undivided)
    buffers = zip(model.buffers(), reference.buffers(), strict=True)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in buffers)


class Language(nn.Module):
    """An embedding and a projection with a bias, of one weight or of two."""

    def __init__(self, vocab=64, width=24, tied=True, **options):
        super().__init__()
        self.embed = nn.Embedding(vocab, width, **options)
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, vocab)
        if tied:
            self.project.weight = self.embed.weight

    def forward(self, x):
        return self.project(self.norm(self.embed(x)))


@MORE
@pytest.mark.parametrize(
    ("vocab", "tied", "padding", "words"),
    pairwise(
        [64, 65], [True, False], [None, 1, -1], [None, {"embed": "rowwise"}, {"embed": "colwise"}]
    ),
)
def test_embeddings_and_projections(vocab, tied, padding, words):
    if words and (tied or vocab % 2):
        words = {"embed": "colwise", "project": "rowwise"}
    reference = Language(vocab, tied=tied, padding_idx=padding).double()
    batches = [torch.cat([ids(), torch.full((1, 8), vocab - 1)]) for _ in range(4)]
    batches[0][0, 0] = 1
    model, plan, placements = divided(reference, batches[0], words=words)
    assert ("project" in plan.divisions) == (words is None or "project" in words)
    train(model, batches)
    _, largest = train(reference, batches)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11


class WithLoss(Language):
    """Computes the loss of the next word, as Hugging Face's models do."""

    def __init__(self, returns=False, **options):
        loss = {k: options.pop(k) for k in ("reduction", "ignore_index") if k in options}
        super().__init__(**options)
        self.returns, self.loss = returns, loss

    def forward(self, x):
        logits = super().forward(x).float().to(self.norm.weight.dtype)
        flat = logits[:, :-1].contiguous().view(-1, logits.shape[-1])
        loss = F.cross_entropy(flat, x[:, 1:].reshape(-1), **self.loss)
        return torch.cat((loss.view(-1), logits.flatten())) if self.returns else loss.view(-1)


@MORE
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tied": False},
        {"reduction": "sum", "ignore_index": 3},
        {"reduction": "none", "ignore_index": 60},
        {"vocab": 65},
        {"returns": True},
    ],
)
def test_a_loss_of_divided_logits(options):
    reference = WithLoss(**options).double()
    batches = [ids() for _ in range(4)]
    model, plan, placements = divided(reference, batches[0])
    divided_up_to_the_loss = not plan.divisions["project"].by_itself
    assert divided_up_to_the_loss == ("returns" not in options)
    losses, _ = train(model, batches)
    expected, largest = train(reference, batches)
    assert losses == pytest.approx(expected, rel=1e-13)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11


@MORE
@pytest.mark.parametrize(
    "later",
    [
        lambda y, x: F.cross_entropy(y, x, label_smoothing=0.1),
        lambda y, x: F.cross_entropy(y, x, weight=torch.arange(64.0, dtype=y.dtype)),
        lambda y, x: F.cross_entropy(y, F.one_hot(x, 64).to(y.dtype)),
        lambda y, x: F.nll_loss(y.log_softmax(-1), x) + (y.argmax(-1) == x).sum(),
        lambda y, x: y.topk(3).values.sum() + y[..., 3:50].logsumexp(-1).sum(),
    ],
)
def test_what_a_later_call_does_to_logits_that_the_first_one_left_divided(later):
    class Changing(Language):
        def forward(self, x, loss=F.cross_entropy):
            return loss(super().forward(x).flatten(0, 1), x.flatten())

    reference = Changing().double()
    x = ids()
    model, plan, placements = divided(reference, x)
    assert not plan.divisions["project"].by_itself
    found, expected = (each(x, later) for each in (model, reference))
    assert torch.allclose(found, expected, rtol=1e-12)
    for each in (found, expected):
        each.backward()
    gradients = whole(model, placements, lambda p: p.grad)
    for name, p in reference.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-12), name


@MORE
def test_logits_of_a_divided_loss_are_not_sent():
    reference = WithLoss(width=8).double()
    x = ids()
    model, _, _ = divided(reference, x)
    before = hvkit.traffic().get("activations", (0, 0))
    model(x).sum().backward()
    sent = hvkit.traffic()["activations"]
    # Rows that are looked up, and their gradient, in halves of sums; three numbers for each target;
    # the gradient of the norm's weight and bias.
    words, targets, norm = 4 * 8 * 8 * 8, 4 * 7 * 8, 2 * 8 * 8
    assert sent[1] - before[1] == 4 + 3 + 1
    sums = 2 * words + 3 * targets + norm
    assert sent[0] - before[0] == sums * 2 * (hvkit.size() - 1) // hvkit.size()


@MORE
@pytest.mark.parametrize("ahead", [0, 64])
def test_a_target_that_is_no_class(ahead):
    class Ahead(Language):
        def forward(self, x):
            return F.cross_entropy(super().forward(x).flatten(0, 1), x.flatten() + self.ahead)

    reference = Ahead().double()
    reference.ahead = 0
    model, _, _ = divided(reference, ids())
    model.ahead = ahead
    kind, _ = error_of(lambda: model(ids()))
    assert (kind is None) == (ahead == 0)


@MORE
@pytest.mark.parametrize("index", [-1, 64])
@pytest.mark.parametrize("word", ["rowwise", "colwise"])
def test_an_index_that_the_embedding_does_not_have(index, word):
    model, _, _ = divided(Language(tied=False).double(), ids(), words={"embed": word})
    kind, _ = error_of(lambda: model(torch.tensor([[0, index]])))
    assert kind is IndexError


@MORE
def test_parameters_are_the_same_plain_objects_for_an_optimizer_made_before():
    reference = MLP().double()
    model = copy.deepcopy(reference)
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    batches = [vectors() for _ in range(3)]
    plan = prove(model, (batches[0],), {}, hvkit.size())
    placements = divide(model, plan, init_device_mesh("cpu", (hvkit.size(),)))
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    train(model, batches, optimizer)
    _, largest = train(reference, batches)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11


@MORE
def test_gradients_and_outputs_are_plain_and_whole():
    reference = GPT().double()
    x = ids()
    model, _, placements = divided(reference, x)
    for each in (model, reference):
        y = each(x)
        assert type(y) is torch.Tensor
        y.square().sum().backward()
    gradients = whole(model, placements, lambda p: p.grad)
    for name, p in reference.named_parameters():
        assert type(model.get_parameter(name).grad) is torch.Tensor
        assert torch.allclose(gradients[name], p.grad, rtol=1e-10, atol=1e-12), name


@MORE
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation(context):
    reference = Encoder(dropout=0.1).double().eval()
    model, plan, _ = divided(reference, sequences(length=8))
    assert plan.streams
    for length in (8, 5):
        x, padding = sequences(length=length), torch.zeros(3, length, dtype=torch.bool)
        padding[1, -1] = True
        with context():
            assert torch.allclose(model(x), reference(x), atol=1e-12)
            assert torch.allclose(model(x, padding), reference(x, padding), atol=1e-12)


@MORE
def test_a_copy_has_weights_of_its_own():
    x = vectors()
    model, _, _ = divided(MLP().double(), x)
    expected = model(x)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(average(x), expected)


@MORE
def test_the_arguments_of_the_forward_can_still_be_read():
    model, _, _ = divided(GPT().double(), ids())
    assert list(inspect.signature(model.forward).parameters) == ["ids", "targets"]


@MORE
def test_autocast():
    x = ids()
    reference = GPT()
    model, _, _ = divided(reference, x)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(x), reference(x)
    assert y.dtype == expected.dtype
    assert torch.allclose(y, expected, atol=0.05)
    y.float().sum().backward()


ATTENTION = {
    "weights": ({}, {}),
    "weights of each head": ({}, {"average_attn_weights": False}),
    "no weights": ({}, {"need_weights": False}),
    "length first": ({"batch_first": False}, {"need_weights": False}),
    "no bias": ({"bias": False}, {"need_weights": False}),
    "other keys": ({"kdim": 12, "vdim": 20}, {}),
}


@MORE
@pytest.mark.parametrize("case", ATTENTION)
@pytest.mark.parametrize("mask", [None, "added", "boolean", "of each head"])
def test_multihead_attention(case, mask):
    options, call = ATTENTION[case]
    length = 5
    reference = nn.MultiheadAttention(16, 4, **{"batch_first": True, **options}).double()
    first = reference.batch_first
    q, k, v = (
        torch.randn((3, n, d) if first else (n, 3, d), dtype=torch.float64)
        for n, d in ((4, 16), (length, reference.kdim), (length, reference.vdim))
    )
    if mask is not None:
        shape = (12, 4, length) if mask == "of each head" else (4, length)
        call = {**call, "attn_mask": torch.randn(shape, dtype=torch.float64)}
        if mask == "boolean":
            call["attn_mask"] = call["attn_mask"] > 0.5
            call["attn_mask"][:, 0] = False
        call["key_padding_mask"] = torch.zeros(3, length, dtype=torch.bool)
        call["key_padding_mask"][1, -1] = True
        if mask != "boolean":
            call["key_padding_mask"] = (
                torch.zeros(3, length).double().masked_fill(call["key_padding_mask"], float("-inf"))
            )
    model, plan, placements = divided(reference, q, k, v, **call)
    assert plan.share > 0.9
    for each in (model, reference):
        y, weights = each(q, k, v, **call)
        (y.square().sum() + (0 if weights is None else weights.square().sum())).backward()
    y, weights = model(q, k, v, **call)
    expected, expected_weights = reference(q, k, v, **call)
    assert torch.allclose(y, expected, atol=1e-12)
    assert (weights is None) == (expected_weights is None)
    assert weights is None or torch.allclose(weights, expected_weights, atol=1e-12)
    gradients = whole(model, placements, lambda p: p.grad)
    for name, p in reference.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-10), name


@MORE
def test_multihead_attention_without_a_batch():
    reference = nn.MultiheadAttention(16, 4).double()
    x = torch.randn(5, 16, dtype=torch.float64)
    model, _, _ = divided(reference, x, x, x)
    for got, expected in zip(model(x, x, x), reference(x, x, x), strict=True):
        assert torch.allclose(got, expected, atol=1e-12)


def dropouts():
    """Dropout on activations that all ranks hold, before and after a pair."""
    layers = nn.Dropout(0.3), nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10), nn.Dropout(0.3)
    return nn.Sequential(*layers).double()


@MORE
def test_dropout_of_whole_activations_is_that_of_one_process():
    reference = dropouts()
    batches = [vectors() for _ in range(5)]
    torch.manual_seed(1 + hvkit.rank())
    model, _, placements = divided(reference, batches[0])
    train(model, batches)
    own = torch.rand(())
    assert len(set(hvkit.allgather(own.item()))) == hvkit.size()
    torch.manual_seed(1)
    _, largest = train(reference, batches)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11


@MORE
@pytest.mark.parametrize(
    ("make", "batch"), [(lambda: GPT(dropout=0.2), ids), (lambda: Encoder(dropout=0.2), sequences)]
)
def test_ranks_seeded_differently_keep_the_same_weights(make, batch):
    reference = make().double()
    batches = [batch() for _ in range(5)]
    torch.manual_seed(1 + hvkit.rank())
    model, _, placements = divided(reference, batches[0])
    losses, _ = train(model, batches)
    assert hvkit.allgather(losses) == [losses] * hvkit.size()
    undivided = [p.detach() for n, p in model.named_parameters() if n not in placements]
    assert same_on_all_ranks(p.numpy() for p in undivided)


@MORE
def test_ranks_drop_different_elements_of_their_parts():
    kept = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 64), nn.Linear(64, 10)

        def forward(self, x):
            h = F.dropout(self.first(x), 0.5)
            if isinstance(h, DTensor):
                kept.append((h.to_local() != 0).tolist())
            return self.second(h)

    x = vectors()
    model, _, _ = divided(Net().double(), x)
    model(x)
    model(x)
    assert len({str(each) for rank in hvkit.allgather(kept) for each in rank}) == 2 * hvkit.size()


@MORE
@pytest.mark.parametrize("length", [8, 7])
def test_dropout_between_pairs(length):
    """Each rank drops other elements of its part; the same ones where all hold the whole."""
    kept = []

    def keep(module, args, y):
        held = y.to_local() if isinstance(y, DTensor) else y
        assert y.shape == (4, length, 32)
        assert held.shape[1] == (length if length == 7 else length // hvkit.size())
        kept.append((held != 0).tolist())

    model, _, _ = divided(GPT(dropout=0.5).double(), ids())
    model.h[0].mlp[3].register_forward_hook(keep)
    torch.manual_seed(1 + hvkit.rank())
    x = ids(length=length)
    model(x)
    model(x)
    found = {str(each) for rank in hvkit.allgather(kept) for each in rank}
    assert len(found) == 2 * (1 if length == 7 else hvkit.size())


def bytes_kept(model, *args):
    """What autograd keeps for backward, without parameters."""
    kept = {}

    def keep(t):
        held = t.to_local() if isinstance(t, DTensor) else t
        kept[held.untyped_storage().data_ptr()] = held.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(*args)
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in kept.values())


@MORE
def test_a_rank_keeps_its_part_of_what_lies_between_pairs():
    reference, x = GPT(layers=3).double(), ids()
    plan = prove(reference, (x,), {}, hvkit.size())
    mesh = init_device_mesh("cpu", (hvkit.size(),))
    found = []
    for streams in ((), plan.streams):
        model = copy.deepcopy(reference)
        divide(model, replace(plan, streams=streams), mesh)
        found.append(bytes_kept(model, x))
    # What seven norms take, with the mean and the deviation of each position.
    norms = 7 * 4 * 8 * (32 + 2) * 8
    weights = 7 * 2 * 32 * 8
    assert found[0] - found[1] + weights >= norms * (hvkit.size() - 1) // hvkit.size()
    assert found[0] - found[1] <= norms * (hvkit.size() - 1) // hvkit.size()


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


@MORE
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
def test_what_a_later_call_does_between_pairs(use):
    reference, x = Between().double(), ids()
    model, plan, placements = divided(reference, x)
    assert plan.streams
    for each in (model, reference):
        each(x, use).square().mean().backward()
    assert torch.allclose(model(x, use), reference(x, use), rtol=1e-12)
    gradients = whole(model, placements, lambda p: p.grad)
    for name, p in reference.named_parameters():
        assert torch.allclose(gradients[name], p.grad, atol=1e-12), name


def _overwritten(h):
    h[h > 0] = 0
    return h


def _first_overwritten(h):
    h.view(-1, 32)[0].zero_()
    return h


@MORE
@pytest.mark.parametrize(
    ("use", "why"),
    [
        (_overwritten, "x[...] = value writes into it: write x = torch.where(mask, value, x)"),
        (_first_overwritten, "is one of a copy, into which zero_() would write"),
    ],
)
def test_a_later_call_that_writes_into_a_part(use, why):
    model, _, _ = divided(Between().double(), ids())
    kind, text = error_of(lambda: model(ids(), use))
    assert kind is hvkit.HvkitError
    assert why in text


class Checkpointed(GPT):
    """Computes each block again during backward."""

    def forward(self, x):
        h = self.drop(self.wte(x))
        for block in self.h:
            h = checkpoint(block, h, use_reentrant=False) if self.again else block(h)
        return self.lm_head(self.ln_f(h))


@MORE
def test_gradient_checkpointing_drops_the_same_elements_again():
    reference = Checkpointed(dropout=0.2).double()
    x, gradients = ids(), []
    for again in (False, True):
        reference.again = again
        torch.manual_seed(3 + hvkit.rank())
        model, plan, _ = divided(reference, x)
        assert (len(plan.divisions), len(plan.streams)) == (10, 1)
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


class InFunctions(nn.Module):
    """Computes a function of its own again during backward, between the layers of a pair."""

    def __init__(self, reentrant):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.3)
        self.reentrant = reentrant

    def function(self, x):
        return self.down(self.drop(torch.tanh(self.up(x))))

    def forward(self, x):
        if self.reentrant is None:
            return x + self.function(x)
        return x + checkpoint(self.function, x, use_reentrant=self.reentrant)


@MORE
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_inside_a_block_is_computed_again(reentrant):
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(16, 16), InFunctions(None)).double()
    x, gradients = torch.randn(4, 16).double(), []
    for each in (None, reentrant):
        reference[1].reentrant = each
        torch.manual_seed(3 + hvkit.rank())
        model, plan, _ = divided(reference, x)
        assert len(plan.divisions) == 2
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 6
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


WORDS = {
    "some pairs, and the last layer": {
        "h.*.mlp.0": "colwise",
        "h.*.mlp.2": RowwiseParallel(),
        "h.0.attn.c_attn": ColwiseParallel(),
        "h.0.attn.c_proj": "rowwise",
        "lm_head": "colwise",
    },
    "halves of pairs": {"h.0.mlp.0": "colwise", "h.1.mlp.2": "rowwise"},
}


@MORE
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_plan_in_words_of_parallelize_module(words):
    reference = GPT(tied=False).double()
    batches = [ids() for _ in range(5)]
    model, plan, placements = divided(reference, batches[0], words=words)
    assert len(plan.divisions) == (7 if "lm_head" in words else 2)
    assert type(model(batches[0])) is torch.Tensor
    train(model, batches)
    _, largest = train(reference, batches)
    assert furthest(whole(model, placements), reference, largest) <= 1e-11


class KeyCache:
    """Starts empty, as that of Hugging Face."""

    def __init__(self):
        self.keys = torch.tensor([], dtype=torch.float64)

    def update(self, keys):
        self.keys = torch.cat([self.keys, keys], dim=-2)
        return self.keys


class Decoder(nn.Module):
    """One attention layer, called again with the keys of earlier calls."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(20, 32), nn.Linear(20, 32)
        self.out = nn.Linear(32, 10)

    def forward(self, x, cache=None):
        cache = cache or KeyCache()
        q, k = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k))
        k = cache.update(k)
        y = F.scaled_dot_product_attention(q, k, k)
        return {"y": self.out(y.transpose(1, 2).flatten(2)), "cache": cache}


@MORE
def test_a_cache_of_keys():
    reference = Decoder().double()
    x = sequences()
    model, plan, _ = divided(reference, x)
    assert set(plan.divisions) == {"q", "k", "out"}
    first, expected = model(x), reference(x)
    for _ in range(2):
        assert torch.allclose(first["y"], expected["y"], atol=1e-12)
        first, expected = model(x, first["cache"]), reference(x, expected["cache"])
    assert first["cache"].keys.to_local().shape == (3, 4 // hvkit.size(), 15, 8)
    first["y"].sum().backward()


@MORE
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("length", [8, 7])
def test_bytes_sent_are_the_sums_of_activations_and_the_logits(length, tied):
    x = ids(batch=2, length=8)
    model, _, _ = divided(GPT(layers=3, width=32, tied=tied).double(), x)
    before = hvkit.traffic().get("activations", (0, 0))
    model(x[:, :length]).sum().backward()
    sent = hvkit.traffic()["activations"]
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
    assert sent[1] - before[1] == messages
    assert sent[0] - before[0] == exchanges * features + logits + parameters


@MORE
def test_layers_that_take_the_same_activation_share_one_sum():
    x = ids()
    model, _, _ = divided(Llama(layers=1).double(), x)
    before = hvkit.traffic().get("activations", (0, 0))[1]
    model(x).sum().backward()
    # Two exchanges each: what attention and MLP return, what the MLP and the projection take. One:
    # the gradient of what attention takes whole, and of the part of it that is added; two norms;
    # the embedding, and the logits.
    assert hvkit.traffic()["activations"][1] - before == 2 * 4 + 2 + 2 + 2


@MORE
def test_a_layer_outside_the_forward_of_its_model():
    model, _, _ = divided(MLP().double(), vectors())
    kind, text = error_of(lambda: model[0](vectors()))
    assert kind is hvkit.HvkitError
    assert "call the model itself" in text


@MORE
def test_a_mesh_of_another_size():
    model = MLP().double()
    plan = prove(model, (vectors(),), {}, 16)
    mesh = init_device_mesh("cpu", (hvkit.size(),))
    kind, text = error_of(lambda: divide(model, plan, mesh))
    assert kind is ValueError
    assert f"among 16 ranks, and the mesh has the shape ({hvkit.size()},)" in text
