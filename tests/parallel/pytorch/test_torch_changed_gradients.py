"""Gradients that the script changes between backward() and step()."""

import pytest
import torch
from torch import nn
from torch_nets import (
    alike,
    alike_gradients,
    backward,
    distributed,
    equals_one_process,
    in_rounds,
    local,
    mlp,
    raised_everywhere,
    regression,
)

import hvkit
from hvkit.frameworks.pytorch import checks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, data, change=lambda model: None, reduce=False):
    for batch in data:
        optimizer.zero_grad()
        backward(model, batch)
        with torch.no_grad():
            change(model)
        if reduce:
            hvkit.reduce_gradients(model)
        optimizer.step()


def noise(rank=None):
    """Noise of each rank's own, in a generator of its own."""
    generator = torch.Generator().manual_seed(hvkit.rank() if rank is None else rank)
    return lambda p: 0.1 * torch.randn(p.shape, generator=generator)


def mean_noise():
    """What all ranks' noise has for a mean."""
    draws = [noise(rank) for rank in range(hvkit.size())]
    return lambda p: torch.stack([draw(p) for draw in draws]).mean(0)


def on_all(function):
    return lambda model: [function(p) for p in model.parameters()]


def in_place(draw):
    return on_all(lambda p: p.grad.add_(draw(p)))


def through_data(draw):
    return on_all(lambda p: p.grad.data.add_(draw(p)))


def through_numpy(draw):
    return on_all(lambda p: p.grad.numpy().__iadd__(draw(p).numpy()))


def set_anew(draw):
    def change(p):
        p.grad = p.grad + draw(p)

    return on_all(change)


def by_one_rank(draw):
    return in_place(draw) if hvkit.rank() == 1 else lambda model: None


def removed_by_one_rank(draw):
    def remove(model):
        if hvkit.rank() == 0:
            model[2].bias.grad = None

    return remove


GRADIENT = "the gradient of parameter 0.weight"
CHANGED = [
    (0, 0, in_place, GRADIENT),
    (0, 0, set_anew, GRADIENT),
    (0, 0, by_one_rank, GRADIENT),
    (0, 0, removed_by_one_rank, "the gradient of parameter 2.bias"),
    (0, 0, through_data, GRADIENT),
    # Before the comparison after 8 steps: a first change, and one after 4 steps with changes.
    (5, 0, in_place, GRADIENT),
    (2, 4, in_place, GRADIENT),
    # No counter shows these, but the next comparison does, after 4 steps: of weights by then.
    (3, 0, through_data, "parameter 0.weight"),
    (3, 0, through_numpy, "parameter 0.weight"),
]


@pytest.mark.parametrize(("plain", "clipped", "kind", "text"), CHANGED)
def test_gradients_that_ranks_change_differently_are_an_error(plain, clipped, kind, text):
    model, optimizer = distributed(sgd)
    data = local(regression(steps=8))
    train(model, optimizer, data[:plain])
    train(model, optimizer, data[plain : plain + clipped], CHANGES["clip_grad_norm_"])
    assert alike(model)
    texts = [text, "hvkit.reduce_gradients(model)"] if "gradient" in text else [text]
    change = kind(noise())
    assert raised_everywhere(
        lambda: train(model, optimizer, data[plain + clipped :], change), *texts
    )


def test_a_second_optimizer_is_compared_in_its_own_first_step():
    model = mlp()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, [first, second])
    data = local(regression(steps=8))
    train(model, first, data[:6])
    assert raised_everywhere(
        lambda: train(model, second, data[6:], through_data(noise())), "parameter 2.weight"
    )


STRATEGIES = {
    "synchronous": {},
    "sharded": {"strategy": hvkit.ShardedOptimizer()},
    "centralized": {"strategy": hvkit.Centralized()},
    "accumulated": {"accumulate": 2},
}


@pytest.mark.parametrize("kind", [in_place, through_data, set_anew])
@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_changes_that_are_averaged_equal_those_of_one_process(options, kind):
    changes = iter([(kind(mean_noise()), False), (kind(noise()), True)])

    def steps(model, optimizer, data):
        train(model, optimizer, data, *next(changes))

    assert equals_one_process(sgd, steps=steps, data=regression(steps=5), **options)


def halved(p):
    p.grad = p.grad / 2


def removed(p):
    if p.dim() == 1:
        p.grad = None


CHANGES = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "centralised": on_all(lambda p: p.grad.sub_(p.grad.mean())),
    "set": on_all(halved),
    "None": on_all(removed),
    "NaN": on_all(lambda p: p.grad.mul_(float("nan"))),
    "nothing": lambda model: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_the_same_on_all_ranks_are_compared_rarely(name, monkeypatch):
    compared = []
    rows = checks.rows_of_gradients
    monkeypatch.setattr(
        checks, "rows_of_gradients", lambda g: (compared.append(len(g)), rows(g))[1]
    )
    model, optimizer = distributed(sgd)
    train(model, optimizer, local(regression(steps=20)), CHANGES[name])
    # In the first step, and in the steps after 1, 2, 4, 8 and 16, with or without changes.
    assert len(compared) == 6
    assert alike(model)


def test_a_closure_that_changes_gradients_differently_is_an_error():
    model, optimizer = distributed(sgd)
    draw = noise()

    def step(batch):
        def closure():
            optimizer.zero_grad()
            backward(model, batch)
            with torch.no_grad():
                in_place(draw)(model)
            return 0.0

        optimizer.step(closure)

    data = local(regression(steps=2))
    assert raised_everywhere(lambda: list(map(step, data)), "parameter 0.weight")


def test_a_compression_that_keeps_a_rest_averages_once():
    data, change = local(regression(steps=4)), in_place(noise())
    model, optimizer = distributed(sgd, compression=hvkit.TopK(0.5))
    assert raised_everywhere(
        lambda: train(model, optimizer, data, change, reduce=True),
        "accumulate= one more than the backward passes",
        kind=ValueError,
    )
    model, optimizer = distributed(sgd, compression=hvkit.TopK(0.5), accumulate=2)
    train(model, optimizer, data, change, reduce=True)
    assert alike(model)


def test_reduce_gradients_takes_a_distributed_model_only():
    reduce = hvkit.reduce_gradients
    assert raised_everywhere(lambda: reduce([mlp()]), "got builtins.list", kind=TypeError)
    text = "Sequential was not passed to hvkit.distribute"
    assert raised_everywhere(lambda: reduce(mlp()), text, kind=ValueError)
    model, optimizer = in_rounds(hvkit.LocalSGD(every=4))
    train(model, optimizer, local(regression(steps=4)), in_place(noise()), reduce=True)
    assert not alike_gradients(model)
    assert alike(model)


class Wrapped(torch.optim.Optimizer):
    """As Opacus and Accelerate wrap optimizers: without what ``Optimizer.__init__`` makes."""

    def __init__(self, inner, draw, after=lambda optimizer: None):
        self.inner = inner
        self.draw, self.after = draw, after

    param_groups = property(lambda self: self.inner.param_groups)
    defaults = property(lambda self: self.inner.defaults)
    state = property(lambda self: self.inner.state)

    def state_dict(self):
        return self.inner.state_dict()

    def load_state_dict(self, state):
        self.inner.load_state_dict(state)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.grad = p.grad + self.draw(p)
        self.after(self)
        self.inner.step()


def test_an_optimizer_without_hooks_around_one_with_hooks(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    # The rate that the wrapper has in one process is what scaling makes of that of the ranks.
    wrappers = iter(
        [
            lambda p: Wrapped(torch.optim.SGD(p, lr=0.1 * hvkit.size()), mean_noise()),
            lambda p: Wrapped(sgd(p), noise(), hvkit.reduce_gradients),
        ]
    )
    options = {"lr_scaling": "linear", "monitor": hvkit.Monitor(folder)}
    assert equals_one_process(lambda p: next(wrappers)(p), steps=train, **options)
    model, optimizer = distributed(lambda p: Wrapped(sgd(p), noise()))
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=4))),
        "the gradient of parameter 0.weight",
    )


def test_an_optimizer_without_hooks_and_without_one_inside_is_refused():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    assert raised_everywhere(lambda: distributed(Own), "Own", "super().__init__", kind=TypeError)
