"""Trains a model in a mesh, and the same one in one process."""

import copy

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hvkit
from hvkit.pipeline.gpipe import sizes_of

MICROBATCHES = 4
MESHES = {
    "GPipe": {"mesh": hvkit.Mesh(pipeline=2)},
    "1F1B": {"mesh": hvkit.Mesh(pipeline=2), "schedule": "1F1B"},
    "tensor": {"mesh": hvkit.Mesh(tensor=2), "microbatches": None},
    "shard": {"mesh": hvkit.Mesh(shard=2), "microbatches": None},
    "none": {"mesh": None, "microbatches": None},
}


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def parts(together=2):
    """How many parts a global batch has, if so many ranks hold a model together."""
    return hvkit.size() // together


def of_this_rank(data, together=2):
    """This rank's part of each tensor of global batches."""
    number, count = hvkit.rank() // together, parts(together)
    return [[t[number::count] for t in batch] for batch in data]


def data_for(mesh, data):
    """This rank's part of global batches in one of ``MESHES``."""
    return of_this_rank(data, 1 if mesh in ("shard", "none") else 2)


def tokens(steps=5, rows=16, length=16):
    generator = torch.Generator().manual_seed(1)
    shape = steps, 2, rows, length
    return list(torch.randint(0, 64, shape, generator=generator))


def vectors(steps=5, rows=16, shape=(20,)):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(rows, *shape, generator=generator),
            torch.randint(0, 10, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def images(steps=5, rows=16):
    return vectors(steps, rows, (1, 8, 8))


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(model, optimizer, data, loss_of=cross_entropy, norms=(1.0,)):
    """Steps as a user writes them; the losses and norms."""
    found = []
    for x, y in data:
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), norms[0])
        optimizer.step()
        found.append((loss.item(), float(norm)))
    return found


class InMicroBatches:
    """A model that computes as its pipelines do, in one process.

    Args:
        count: micro-batches of each part.
        together: ranks that hold a model.
    """

    def __init__(self, model, count=MICROBATCHES, together=2):
        self.model, self.count, self.parts = model, count, parts(together)
        self.parameters = model.parameters

    def __call__(self, x):
        outputs = torch.empty(0)
        for number in range(self.parts):
            mine = x[number :: self.parts]
            sizes = sizes_of(len(mine), min(self.count, len(mine)))
            rows = torch.cat([self.model(each) for each in mine.split(sizes)])
            if not len(outputs):
                outputs = rows.new_empty((len(x), *rows.shape[1:]))
            outputs = outputs.index_put((torch.arange(number, len(x), self.parts),), rows)
        return outputs


def distributed(model, optimizer=adamw, **options):
    """The model in a pipeline of two ranks, and its optimizer."""
    options = {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES} | options
    return hvkit.distribute(model, optimizer(model), **options)


def both(make, optimizer=adamw, **options):
    """A model of one process with its optimizer, and the same in a mesh with its own."""
    reference = make()
    model = copy.deepcopy(reference)
    return (reference, optimizer(reference)), distributed(model, optimizer, **options)


def apart(steps, make, data, *, optimizer=adamw, **options):
    """How far weights are from those of one process, after ``steps`` with either model.

    Args:
        steps: a function of a model, its optimizer and batches.
        make: a model.
        data: global batches.
        options: of ``hvkit.distribute``, in place of a mesh with a pipeline of two ranks.
    """
    (reference, its), (model, own) = both(make, optimizer, **options)
    steps(reference, its, data)
    steps(model, own, of_this_rank(data))
    counted = with_gradients(reference, its)
    return difference(whole_state(model, own), reference.state_dict(), counted)


def fewer_on_four(params, chosen):
    """Cases of ``pytest.param``, of which four ranks run those that begin with a chosen value."""
    more = pytest.mark.two_ranks
    return [
        each
        if each.values[0] in chosen
        else pytest.param(*each.values, id=each.id, marks=[*each.marks, more])
        for each in params
    ]


def part_size(p):
    """How many elements this rank holds of a parameter, which has the shape of the whole."""
    own = p.to_local() if hasattr(p, "to_local") else p
    return own.untyped_storage().nbytes() // p.itemsize


def whole_state(model, *optimizers):
    """The state dict, on rank 0; empty on others."""
    with hvkit.settled(model, *optimizers):
        if hvkit.rank() == 0:
            return {name: t.detach().clone() for name, t in model.state_dict().items()}
    return {}


def held_by_rank(model, *optimizers):
    """Copies of the weights and states that this rank holds, by name."""
    held = {n: p.detach() for n, p in model.named_parameters() if not p.is_meta}
    for optimizer in optimizers:
        for i, state in enumerate(optimizer.state.values()):
            held |= {f"{i}.{key}": t for key, t in state.items() if isinstance(t, torch.Tensor)}
    return {n: (t.to_local() if isinstance(t, DTensor) else t).clone() for n, t in held.items()}


def assert_equal(found, expected):
    """On all ranks, tensors by name have the same bits; a collective."""
    apart = [n for n, t in expected.items() if n not in found or not torch.equal(found[n], t)]
    assert hvkit.allgather(apart) == [[]] * hvkit.size()


def difference(found, expected, counted=()):
    """The largest difference of tensors by name, the same on every rank.

    Args:
        counted: by name, which elements count; all if there is no entry.
    """
    apart = {n: (found[n] - t).abs().double() for n, t in expected.items()} if found else {}
    mine = [d[counted[n]] if n in counted else d for n, d in apart.items()]
    return hvkit.broadcast(max((float(d.max()) for d in mine if d.numel()), default=0.0))


def with_gradients(model, optimizer):
    """By name, the elements of parameters whose gradient is more than rounding.

    AdamW makes steps of full length of the others, as of the bias of keys in attention.
    """
    state = {n: optimizer.state.get(p, {}) for n, p in model.named_parameters()}
    return {n: s["exp_avg_sq"] > 1e-20 for n, s in state.items() if "exp_avg_sq" in s}


def differences(
    make, data, *, optimizer=adamw, loss_of=cross_entropy, prepare=None, together=2, **options
):
    """Of weights, losses and norms from those of one process, after some steps.

    Args:
        make: a model.
        data: global batches.
        prepare: called with the model first.
        together: ranks that hold a model.
        options: of ``hvkit.distribute``, in place of a mesh with a pipeline of two ranks.
    """
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(hvkit.rank() + 1)
    model = make()
    model.load_state_dict(reference.state_dict())
    for each in (reference, model):
        if prepare:
            prepare(each)
    options = {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES} | options
    alone = InMicroBatches(reference, options["microbatches"] or 1, together)
    its = optimizer(reference)
    expected = train(alone, its, data, loss_of)
    model, own = hvkit.distribute(model, optimizer(model), **options)
    found = train(model, own, of_this_rank(data, together), loss_of)
    pairs = list(zip(found, expected, strict=True))
    losses = [hvkit.average(loss) - theirs for (loss, _), (theirs, _) in pairs]
    norms = [norm - theirs for (_, norm), (_, theirs) in pairs]
    # Batch norm of several parts has the mean of their statistics.
    alike = parts(together) == 1
    of_one = reference.state_dict() if alike else dict(reference.named_parameters())
    weights = difference(whole_state(model, own), of_one, with_gradients(reference, its))
    return weights, max(map(abs, losses)), max(map(abs, norms))
