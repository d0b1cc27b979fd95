"""``hvkit.mean``: losses over tokens or weights, of which ranks have different sums."""

from weakref import WeakValueDictionary

import pytest
import torch
from cases import cases, each_once, pairwise
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_nets import alike_gradients, distributed, raised_everywhere

import hvkit
from hvkit import main_rank
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.gradients import reducer

pytestmark = [pytest.mark.two_ranks, pytest.mark.usefixtures("torch_distributed")]

WEIGHTS = torch.tensor([0.3, 1.0, 2.0, 0.1, 5.0]).double()


def classifier():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()


def plain(parameters):
    return torch.optim.SGD(parameters, 0.5)


def trained_classifier(**options):
    return distributed(plain, classifier(), **options)


def data():
    torch.manual_seed(1)
    targets = [torch.where(torch.rand(8) < 0.5, -100, torch.randint(0, 5, (8,))) for _ in range(4)]
    return [(torch.randn(8, 8).double(), y) for y in targets]


def mine(batch, first=6):
    """Rank 0 has the first samples of a batch, rank 1 the rest."""
    return [part.tensor_split([first])[hvkit.rank()] for part in batch]


def counted(y):
    return (y != -100).sum()


def summed(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def ignored(model, x, y):
    return summed(model, x, y), counted(y)


def weighted(model, x, y):
    total = F.cross_entropy(model(x), y, WEIGHTS, reduction="sum")
    return total, WEIGHTS[y[y != -100]].sum()


def samples(model, x, y):
    return model(x).square().mean(1).sum(), len(x)


STRATEGIES = {
    "averaged": {},
    "accumulated": {"accumulate": 2},
    "sharded": {"strategy": hvkit.ShardedOptimizer()},
    "fully": {"strategy": hvkit.FullyShard()},
    "each step": {"strategy": hvkit.LocalSGD(1)},
}


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("sums", "options"), each_once([ignored, weighted, samples], list(STRATEGIES.values()))
)
def test_ranks_with_different_counts_train_the_model_of_one_process(options, sums):
    reference = classifier()
    model, optimizer = trained_classifier(**options)
    its = plain(reference.parameters())
    for number, batch in enumerate(data()):
        total, count = sums(reference, *batch)
        expected = total / count
        expected.backward()
        loss = hvkit.mean(*sums(model, *mine(batch)))
        loss.backward()
        assert_same(loss, expected)
        if number % 2:
            for each in (optimizer, its):
                each.step()
                each.zero_grad()
    with hvkit.settled(model):
        if hvkit.is_main():
            assert_same(dict(model.state_dict()), dict(reference.state_dict()))


def test_a_rank_may_count_nothing():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    mask = torch.arange(3) < 3 * hvkit.rank()  # none on rank 0
    loss = hvkit.mean(x[mask].sum(), mask.sum())
    loss.backward()
    assert loss == 2
    assert torch.equal(x.grad, torch.full((3,), 2 / 3) * hvkit.rank())
    assert hvkit.mean(x[:0].sum(), 0).isnan()
    assert hvkit.mean(0.0, 0) != hvkit.mean(0.0, 0)


def test_shapes_and_dtypes_are_those_of_the_quotient():
    one = hvkit.rank() + 1
    half = hvkit.mean(torch.tensor(1001.0 * one, dtype=torch.bfloat16), 1001 * one)
    assert (half.dtype, float(half)) == (torch.bfloat16, 1.0)
    each = hvkit.mean(torch.arange(3.0) * one, torch.tensor([1, 2, 4]))
    torch.testing.assert_close(each, torch.tensor([0.0, 0.75, 0.75]))
    assert hvkit.mean(one, 2) == 0.75


def test_a_gradient_of_the_count():
    for total in (3.0, torch.tensor(3.0)):
        weight = torch.tensor(hvkit.rank() + 1.0, requires_grad=True)
        mean = hvkit.mean(total, weight)
        mean.backward()
        assert mean == 2  # 6 / 3, whose derivative is -6 / 9, times two ranks
        assert float(weight.grad) == pytest.approx(-4 / 3)


@pytest.fixture
def no_other_models(monkeypatch):
    """Hides those of other tests: of several, nobody knows which one is meant."""
    monkeypatch.setattr(reducer, "_reducers", WeakValueDictionary())


@pytest.mark.usefixtures("no_other_models")
def test_ranks_without_tokens_may_pass_numbers():
    """As ``total = 0.0`` before a loop over no chunks."""
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    total, count = 0.0, 0
    for each in x[: 3 * hvkit.rank()]:
        total, count = total + each, count + 1
    mean = hvkit.mean(total, count)
    mean.backward()
    assert (mean.item(), mean.dtype) == (2, torch.float32)
    assert x.grad is None if hvkit.is_main() else torch.equal(x.grad, torch.full((3,), 2 / 3))
    each = hvkit.mean(torch.arange(3.0) if hvkit.rank() else 0, torch.ones(3) * hvkit.rank())
    assert torch.equal(each, torch.arange(3.0))


@pytest.mark.usefixtures("no_other_models")
def test_a_model_of_which_a_rank_without_tokens_computes_nothing():
    reference, (model, optimizer) = classifier(), trained_classifier()
    batch = data()[0]
    hvkit.mean(*(ignored(model, *batch) if hvkit.rank() else (0.0, 0))).backward()
    total, count = ignored(reference, *batch)
    (total / count).backward()
    for each, its in ((model, optimizer), (reference, plain(reference.parameters()))):
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        its.step()
    assert_same(list(model.parameters()), list(reference.parameters()))


def test_totals_and_counts_without_a_mean_are_refused_on_every_rank():
    def refused(total, count, *parts, kind=hvkit.RanksDisagreeError):
        return raised_everywhere(lambda: hvkit.mean(total, count), *parts, kind=kind)

    rank = hvkit.rank()
    pair = torch.ones([(2, 2), (4,)][rank]), 1.0
    assert refused(*pair, "(4,) to hvkit.mean, rank 0 one of (2, 2)")
    mixed = torch.ones(1 + 2 * rank), torch.ones(3 - 2 * rank)
    assert refused(*mixed, "shape (3,) to hvkit.mean, rank 0")
    assert refused(torch.ones(1 + rank), 2, "hvkit.mean")
    text = "pass the real and the imaginary part"
    assert refused(torch.ones(2, dtype=torch.complex64), 2, text, kind=TypeError)
    with pytest.raises(TypeError, match=r"and what it counts, got 1\.0 of type float and 'two'"):
        hvkit.mean(1.0, 2 if rank else "two")


def test_a_compiled_loss_under_autocast():
    model = classifier().float()
    x = data()[0][0][: 3 + hvkit.rank()]
    loss_of = torch.compile(lambda out: hvkit.mean(out.sum(), out.numel()), backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model(x.float()))
    loss.backward()
    assert loss.dtype is torch.bfloat16
    assert len({float(each) for each in hvkit.allgather(loss.detach())}) == 1


def masked_sum(model, x, y):
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses.sum() / counted(y)


def in_chunks(model, x, y):
    chunks = zip(model(x).split(2), y.split(2), strict=True)
    return sum(F.cross_entropy(*each, reduction="sum") for each in chunks) / counted(y)


def ignored_mean(model, x, y):
    return F.cross_entropy(model(x), y)


MEANS = {
    "ignored": ignored_mean,
    "weighted": lambda model, x, y: F.cross_entropy(model(x), y, WEIGHTS) / 2,
    "smoothed": lambda model, x, y: F.cross_entropy(model(x), y, label_smoothing=0.1),
    "masked": masked_sum,
    "rows": lambda model, x, y: F.mse_loss(model(x), torch.zeros(len(x), 5).double()) * 3,
    "of elements": lambda model, x, y: 0.1 + model(x).square().mean(),
    "times a reciprocal": lambda model, x, y: summed(model, x, y) * (1 / counted(y)),
    "in chunks": in_chunks,
    "in a list": lambda *batch: torch.stack([ignored_mean(*batch), torch.tensor(2.0)]).mean(),
    "in a list added up": lambda *batch: torch.stack([ignored_mean(*batch)]).sum().mean(),
    "at an index": lambda *batch: ignored_mean(*batch)[None][0],
    "beside a penalty": lambda *batch: (
        ignored_mean(*batch) / 1e6 + 0.01 * batch[0][0].weight.square().sum()
    ),
    "chosen": lambda *batch: torch.where(torch.tensor(True), ignored_mean(*batch), 0.0),
    "of samples in a list": lambda model, x, y: torch.stack([m.sum() for m in model(x)]).mean(),
    "of means in a list": lambda model, x, y: torch.stack([m.mean() for m in model(x)]).mean(),
}
NAMED = "write `loss = hvkit.mean(total, count)`"


def warned(loss_of, capsys, first=6, **options):
    """Whether rank 0 warns of losses over different numbers, in one step of training."""
    main_rank._logged.clear()
    model, optimizer = trained_classifier(**options)
    loss_of(model, *mine(data()[0], first)).backward()
    optimizer.step()
    return NAMED in capsys.readouterr().err


@pytest.mark.parametrize("loss_of", MEANS.values(), ids=MEANS)
def test_means_over_other_numbers_are_named_once(loss_of, capsys):
    assert warned(loss_of, capsys) == hvkit.is_main()


def corrected(model, x, y):
    own = int(counted(y))
    return F.cross_entropy(model(x), y) * (own / hvkit.average(own))


OF_ONE_PROCESS = [
    (lambda *batch: hvkit.mean(*ignored(*batch)), 6),
    (lambda *batch: hvkit.mean(*samples(*batch)), 6),
    (corrected, 6),
    (lambda model, x, y: model(x).sum() / 3, 6),
    (MEANS["rows"], 4),
    (MEANS["of means in a list"], 4),
    # What a sum is multiplied with need not be one over a count.
    (lambda model, x, y: model(x).sum() * x.mean(), 6),
    (lambda model, x, y: model(x).sum() * model(x).std(), 6),
]


@pytest.mark.parametrize(("loss_of", "first"), OF_ONE_PROCESS)
def test_means_of_one_process_are_not_named(loss_of, first, capsys):
    assert not warned(loss_of, capsys, first)


def test_a_pass_from_an_edge_of_the_graph():
    model, _ = trained_classifier()
    loss = model(data()[hvkit.rank()][0]).sum()
    torch.autograd.backward([get_gradient_edge(loss)])
    assert alike_gradients(model)


def test_a_checkpointed_loss_is_not_computed_once_more():
    (model, _), calls = trained_classifier(), []

    def loss_of(x, y):
        calls.append(1)
        return F.cross_entropy(model(x), y) + summed(model, x, y) / len(y)

    checkpoint(loss_of, *data()[0], use_reentrant=False).backward()
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("loss_of", "last", "options"),
    cases(
        pairwise(
            [MEANS[n] for n in ("ignored", "masked", "rows")],
            [1, 4, 6, 7],
            [{}, STRATEGIES["accumulated"], STRATEGIES["fully"]],
        ),
        first=3,
    ),
)
def test_a_shorter_last_batch_on_one_rank_is_named_in_any_step(loss_of, last, options, capsys):
    model, optimizer = trained_classifier(**options)
    x, y = (part[:4] for part in data()[0])
    y = y.clamp(min=0)
    for step in range(1, 9):
        rows = 4 - hvkit.rank() if step == last else 4
        loss_of(model, x[:rows], y[:rows]).backward()
        if step % options.get("accumulate", 1) == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert (NAMED in capsys.readouterr().err) == hvkit.is_main()


def test_losses_of_other_shapes_that_count_alike_are_left_alone_soon(capsys, monkeypatch):
    compared = []
    check = Checks.compare_losses
    monkeypatch.setattr(Checks, "compare_losses", lambda c: (compared.append(c), check(c)))
    model, optimizer = trained_classifier()
    x = data()[0][0][: 4 - hvkit.rank()]
    for _ in range(20):
        (model(x).square().mean() * len(x) / 3.5).backward()
        optimizer.step()
    assert "hvkit.mean" not in capsys.readouterr().err
    assert len(compared) == 8


def test_a_penalty_on_gradients_of_all_ranks_samples():
    reference, (model, _) = classifier(), trained_classifier()
    x = data()[0][0]
    for each, own in ((reference, x), (model, x.chunk(hvkit.size())[hvkit.rank()])):
        loss = each(own).square().mean()
        gradients = torch.autograd.grad(loss, list(each.parameters()), create_graph=True)
        if each is model:
            gradients = [hvkit.mean(g, 1) for g in gradients]
        (loss + sum(g.square().sum() for g in gradients)).backward()
    assert_same([p.grad for p in model.parameters()], [p.grad for p in reference.parameters()])
