"""Trains a model in a mesh, and the same one in one process."""

import copy

import torch
from torch.nn import functional as F

import hvkit
from hvkit.frameworks.pytorch.model_parallel.pipeline.microbatches import sizes_of

MICROBATCHES = 4


def adamw(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


def parts(pipeline=2):
    """How many parts a global batch has."""
    return hvkit.size() // pipeline


def part(batch, number):
    """A part of each tensor of a global batch."""
    return [t[number :: parts()] for t in batch]


def of_this_rank(data):
    return [part(batch, hvkit.rank() // 2) for batch in data]


def tokens(steps=20, rows=8, length=16):
    generator = torch.Generator().manual_seed(1)
    shape = steps, 2, rows * parts(), length
    return list(torch.randint(0, 64, shape, generator=generator))


def vectors(steps=20, rows=8, shape=(20,)):
    generator = torch.Generator().manual_seed(1)
    rows = rows * parts()
    return [
        (
            torch.randn(rows, *shape, generator=generator),
            torch.randint(0, 10, (rows,), generator=generator),
        )
        for _ in range(steps)
    ]


def images(steps=20, rows=8):
    return vectors(steps, rows, (1, 8, 8))


def cross_entropy(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def train(model, optimizer, data, loss_of=cross_entropy, norms=(1.0,)):
    """Twenty steps as a user writes them; the losses and norms."""
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
    """

    def __init__(self, model, count=MICROBATCHES):
        self.model, self.count = model, count
        self.parameters = model.parameters

    def __call__(self, x):
        outputs = torch.empty(0)
        for number in range(parts()):
            mine = x[number :: parts()]
            sizes = sizes_of(len(mine), min(self.count, len(mine)))
            rows = torch.cat([self.model(each) for each in mine.split(sizes)])
            if not len(outputs):
                outputs = rows.new_empty((len(x), *rows.shape[1:]))
            outputs = outputs.index_put((torch.arange(number, len(x), parts()),), rows)
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


def whole_state(model, *optimizers):
    """The state dict, on rank 0; empty on others."""
    with hvkit.settled(model, *optimizers):
        if hvkit.rank() == 0:
            return {name: t.detach().clone() for name, t in model.state_dict().items()}
    return {}


def difference(found, expected):
    """The largest difference of tensors by name, the same on every rank."""
    mine = found and max(float((found[n] - t).abs().max()) for n, t in expected.items())
    return hvkit.broadcast(mine)


def differences(make, data, *, optimizer=adamw, loss_of=cross_entropy, prepare=None, **options):
    """Of weights, losses and norms from those of one process, after some steps.

    Args:
        make: a model.
        data: global batches.
        prepare: called with the model first.
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
    alone = InMicroBatches(reference, options["microbatches"])
    expected = train(alone, optimizer(reference), data, loss_of)
    model, own = hvkit.distribute(model, optimizer(model), **options)
    found = train(model, own, of_this_rank(data), loss_of)
    pairs = list(zip(found, expected, strict=True))
    losses = [hvkit.average(loss) - theirs for (loss, _), (theirs, _) in pairs]
    norms = [norm - theirs for (_, norm), (_, theirs) in pairs]
    # Batch norm of several parts has the mean of their statistics.
    of_one = reference.state_dict() if parts() == 1 else dict(reference.named_parameters())
    weights = difference(whole_state(model, own), of_one)
    return weights, max(map(abs, losses)), max(map(abs, norms))
