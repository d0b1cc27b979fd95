"""PyTorch: models whose linear layers are divided among the ranks of a tensor group."""

import copy
import inspect
import itertools

import pytest
import torch
from cases import MORE, each_once, pairwise
from mesh_models import CNN, GPT, MLP, Encoder, LearntInside, Llama, ResNet, SkipNet, gpt_of_conv1d
from ranks import error_of, same_on_all_ranks
from tensor_groups import (
    assert_computes_alike,
    divided,
    furthest,
    ids,
    sent_in_a_pass,
    sequences,
    train,
    trained_apart,
    vectors,
    whole,
)
from torch import nn
from torch.nn import functional as F

import hvkit

pytestmark = pytest.mark.usefixtures("torch_distributed")


def of_many_lengths(make):
    """Of eight positions, which ranks can divide, and of some that they cannot."""
    lengths = itertools.cycle((8, 7, 8, 1))
    return lambda: make(length=next(lengths))


def images():
    return torch.randn(4, 1, 16, 16)


MODELS = {
    "GPT": (GPT, of_many_lengths(ids), 0.97),
    "GPT, untied, own attention": (lambda: GPT(tied=False, fused=False), ids, 0.97),
    "GPT of Conv1D": (gpt_of_conv1d, ids, 0.97),
    "Llama": (Llama, of_many_lengths(ids), 0.99),
    "Qwen": (lambda: Llama(head_norm=True), ids, 0.99),
    "parameters inside": (LearntInside, sequences, 0.91),
    "nn.TransformerEncoder": (Encoder, of_many_lengths(sequences), 0.92),
    "MLP": (MLP, vectors, 0.82),
    "net with skips": (SkipNet, vectors, 0.46),
    "CNN": (CNN, images, 0.65),
    "ResNet": (ResNet, images, 0.0),
}


@pytest.mark.parametrize(("make", "batch", "share"), MODELS.values(), ids=MODELS)
def test_weights_are_those_of_one_process(make, batch, share):
    reference = make()
    batches = [batch() for _ in range(4)]
    model, plan, placements = divided(reference, batches[0])
    assert plan.fraction == pytest.approx(share, abs=0.005)
    sizes = [sum(p.numel() for p in each.parameters()) for each in (model, reference)]
    rest = 1 - plan.fraction + plan.fraction / hvkit.size()
    assert sizes[0] / sizes[1] == pytest.approx(rest, abs=0.005)
    losses, weights = trained_apart(model, placements, reference, batches)
    assert losses < 1e-13
    assert weights < 1e-11
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
    reference = Language(vocab, tied=tied, padding_idx=padding)
    batches = [torch.cat([ids(), torch.full((1, 8), vocab - 1)]) for _ in range(4)]
    batches[0][0, 0] = 1
    model, plan, placements = divided(reference, batches[0], words=words)
    assert ("project" in plan.divisions) == (words is None or "project" in words)
    assert max(trained_apart(model, placements, reference, batches)) < 1e-11


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
        {"tied": False, "reduction": "sum", "ignore_index": 3},
        {"reduction": "none", "ignore_index": 60},
        {"vocab": 65},
        {"returns": True},
    ],
)
def test_a_loss_of_divided_logits(options):
    reference = WithLoss(**options)
    x = ids()
    model, plan, placements = divided(reference, x)
    divided_up_to_the_loss = not plan.divisions["project"].by_itself
    assert divided_up_to_the_loss == ("returns" not in options)
    assert_computes_alike(model, placements, reference, lambda m: m(x))


@MORE
def test_logits_of_a_divided_loss_are_not_sent():
    x = ids()
    model, _, _ = divided(WithLoss(width=8), x)
    sent = sent_in_a_pass(model, x)
    # Rows that are looked up, and their gradient, in halves of sums; three numbers for each target;
    # the gradient of the norm's weight and bias.
    words, targets, norm = 4 * 8 * 8 * 8, 4 * 7 * 8, 2 * 8 * 8
    sums = 2 * words + 3 * targets + norm
    assert sent == (sums * 2 * (hvkit.size() - 1) // hvkit.size(), 4 + 3 + 1)


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
def test_a_later_call_may_use_divided_logits_otherwise(later):
    class Changing(Language):
        def forward(self, x, loss=F.cross_entropy):
            return loss(super().forward(x).flatten(0, 1), x.flatten())

    reference, x = Changing(), ids()
    model, plan, placements = divided(reference, x)
    assert not plan.divisions["project"].by_itself
    assert_computes_alike(model, placements, reference, lambda m: m(x, later))


@MORE
def test_a_target_that_is_no_class():
    class Ahead(Language):
        def forward(self, x, ahead=0):
            return F.cross_entropy(super().forward(x).flatten(0, 1), x.flatten() + ahead)

    model, _, _ = divided(Ahead(), ids())
    kinds = [error_of(lambda ahead=ahead: model(ids(), ahead))[0] for ahead in (0, 64)]
    assert kinds[0] is None
    assert kinds[1] is not None


@MORE
@pytest.mark.parametrize(("word", "index"), [("rowwise", -1), ("rowwise", 64), ("colwise", 64)])
def test_an_index_that_the_embedding_does_not_have(word, index):
    model, _, _ = divided(Language(tied=False), ids(), words={"embed": word})
    kind, _ = error_of(lambda: model(torch.tensor([[0, index]])))
    assert kind is IndexError


@MORE
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation(context):
    reference = Encoder(dropout=0.1).eval()
    model, plan, _ = divided(reference, sequences(length=8))
    assert plan.sequence_regions
    for length in (8, 5):
        x, padding = sequences(length=length), torch.zeros(3, length, dtype=torch.bool)
        padding[1, -1] = True
        with context():
            assert torch.allclose(model(x), reference(x), atol=1e-12)
            assert torch.allclose(model(x, padding), reference(x, padding), atol=1e-12)


@MORE
def test_a_copy_has_weights_of_its_own():
    x = vectors()
    model, _, _ = divided(MLP(), x)
    expected = model(x)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(average(x), expected)


@MORE
def test_the_arguments_of_the_forward_can_still_be_read():
    model, _, _ = divided(GPT(), ids())
    assert list(inspect.signature(model.forward).parameters) == ["ids", "targets"]


@MORE
def test_autocast():
    x, reference = ids(), GPT().float()
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
MASKS = [None, "added", "boolean", "of each head"]


@MORE
@pytest.mark.parametrize(
    ("case", "mask"),
    [*each_once(ATTENTION, MASKS), *each_once(["weights", "no weights"], MASKS[1:])],
)
def test_multihead_attention(case, mask):
    options, call = ATTENTION[case]
    length = 5
    reference = nn.MultiheadAttention(16, 4, **{"batch_first": True, **options})
    first = reference.batch_first
    q, k, v = (
        torch.randn((3, n, d) if first else (n, 3, d))
        for n, d in ((4, 16), (length, reference.kdim), (length, reference.vdim))
    )
    if mask is not None:
        added = torch.randn((12, 4, length) if mask == "of each head" else (4, length))
        padding = torch.zeros(3, length, dtype=torch.bool)
        padding[1, -1] = True
        if mask == "boolean":
            added = added > 0.5
            added[:, 0] = False
        else:
            padding = torch.zeros(3, length).masked_fill(padding, float("-inf"))
        call = {**call, "attn_mask": added, "key_padding_mask": padding}
    model, plan, placements = divided(reference, q, k, v, **call)
    assert plan.fraction > 0.9

    def compute(attention):
        return torch.cat([t.flatten() for t in attention(q, k, v, **call) if t is not None])

    assert_computes_alike(model, placements, reference, compute)


@MORE
def test_multihead_attention_without_a_batch():
    reference, x = nn.MultiheadAttention(16, 4), torch.randn(5, 16)
    model, _, _ = divided(reference, x, x, x)
    for found, expected in zip(model(x, x, x), reference(x, x, x), strict=True):
        assert torch.allclose(found, expected, atol=1e-12)


@MORE
def test_dropout_of_whole_activations_is_that_of_one_process():
    """All ranks hold them, before and after a pair."""
    layers = nn.Dropout(0.3), nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10), nn.Dropout(0.3)
    reference, batches = nn.Sequential(*layers), [vectors() for _ in range(5)]
    torch.manual_seed(1 + hvkit.rank())
    model, _, placements = divided(reference, batches[0])
    train(model, batches)
    own = torch.rand(())
    assert len(set(hvkit.allgather(own.item()))) == hvkit.size()
    torch.manual_seed(1)
    _, largest = train(reference, batches)
    assert furthest(whole(model, placements), reference, largest) < 1e-11


@MORE
@pytest.mark.parametrize(
    ("make", "batch"), [(lambda: GPT(dropout=0.2), ids), (lambda: Encoder(dropout=0.2), sequences)]
)
def test_ranks_seeded_differently_keep_the_same_weights(make, batch):
    batches = [batch() for _ in range(3)]
    reference = make()
    torch.manual_seed(1 + hvkit.rank())
    model, _, placements = divided(reference, batches[0])
    losses, _ = train(model, batches)
    assert hvkit.allgather(losses) == [losses] * hvkit.size()
    undivided = [p.detach() for n, p in model.named_parameters() if n not in placements]
    assert same_on_all_ranks(p.numpy() for p in undivided)


@MORE
def test_a_layer_outside_the_forward_of_its_model():
    model, _, _ = divided(MLP(), vectors())
    kind, text = error_of(lambda: model[0](vectors()))
    assert kind is hvkit.HvkitError
    assert "call the model itself" in text
