"""Small networks and training loops of the PyTorch tests."""

import torch
from ranks import batches, error_of, largest_difference, my_part, same_on_all_ranks
from torch import nn
from torch.nn import functional as F

import hvkit


def mlp(seed=0):
    """8 inputs, 4 outputs; the same weights for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def convnet(seed=0):
    """Images of 1x8x8, 4 outputs."""
    torch.manual_seed(seed)
    convolutions = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Tanh()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 4))


def regression(steps=20, per_rank=6, shape=(8,), seed=0):
    """Global batches of inputs and targets as tensors."""
    arrays = batches(steps, per_rank, shape, (4,), seed=seed)
    return [tuple(map(torch.from_numpy, each)) for each in arrays]


def train(model, optimizer, data):
    """The plain loop."""
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def backward(model, batch):
    """Add the gradients of a batch to those that are there."""
    x, y = batch
    F.mse_loss(model(x), y).backward()


def train_with_closure(model, optimizer, data):
    """The loop for LBFGS, whose step computes the loss several times."""
    for x, y in data:

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def local(data, group=None):
    """This rank's part of each batch of all ranks, or of a group."""
    return [(my_part(x, group), my_part(y, group)) for x, y in data]


def arrays(tensors):
    """NumPy's copies: float64 stays, all else is float32."""
    copies = (t.detach().clone() for t in tensors)
    return [(t if t.dtype == torch.float64 else t.float()).numpy() for t in copies]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def mean_over_ranks(tensor):
    """The mean of a dense tensor over ranks, computed without allreduce."""
    return torch.stack(hvkit.allgather(tensor)).mean(0)


def weights(model):
    return arrays(model.parameters())


def sgd(parameters, lr=0.05, **options):
    return torch.optim.SGD(parameters, lr, momentum=0.9, **options)


def distributed(make=sgd, model=None, **options):
    """A model that all ranks train, and its optimizer."""
    model = mlp() if model is None else model
    return hvkit.distribute(model, make(model.parameters()), **options)


def in_rounds(strategy, make=sgd, model=None, **options):
    return distributed(make, model, strategy=strategy, **options)


def served(staleness, make=sgd, model=None, **options):
    return distributed(make, model, strategy=hvkit.ParameterServer(staleness), **options)


def equals_one_process(make=sgd, build=mlp, steps=train, data=None, within=1e-5, **options):
    """Whether ranks with their parts of batches get the weights of one process with the whole.

    Args:
        make: an optimizer of parameters.
        build: a model.
        steps: a training loop over a model, its optimizer and batches.
        data: global batches.
        options: of ``hvkit.distribute``.
    """
    data = data or regression(steps=6)
    reference = build()
    steps(reference, make(reference.parameters()), data)
    model = build()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(hvkit.rank())  # all begin as rank 0 does
    model, optimizer = distributed(make, model, **options)
    steps(model, optimizer, local(data))
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < within
    return True


def alike(model):
    return same_on_all_ranks(arrays(model.state_dict().values()))


def alike_gradients(model):
    return same_on_all_ranks(arrays(p.grad for p in model.parameters()))


def raised_everywhere(function, *parts, kind=hvkit.RanksDisagreeError):
    """Whether ``function`` raises the same error on all ranks, with these parts in its text."""
    found, text = error_of(function)
    assert found is kind, text
    assert hvkit.allgather(text) == [text] * hvkit.size()
    for part in parts:
        assert part in text
    return True
