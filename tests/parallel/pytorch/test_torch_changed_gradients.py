"""Gradients that the script changes between backward() and step()."""

import pytest
import torch
from ranks import error_of, largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch_nets import (
    alike,
    arrays,
    distributed,
    in_rounds,
    local,
    mlp,
    raised_everywhere,
    regression,
)

import hvkit
from hvkit.frameworks.pytorch.gradients import step_report


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def train(model, optimizer, data, change=lambda model: None, reduce=False):
    for x, y in data:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            change(model)
        if reduce:
            hvkit.reduce_gradients(model)
        optimizer.step()


def noise(rank=None):
    """Noise of each rank's own, in a generator of its own."""
    generator = torch.Generator().manual_seed(hvkit.rank() if rank is None else rank)
    return lambda p: 0.1 * torch.randn(p.shape, generator=generator)


def on_all(function):
    return lambda model: [function(p) for p in model.parameters()]


def in_place(draw):
    return on_all(lambda p: p.grad.add_(draw(p)))


def through_data(draw):
    return on_all(lambda p: p.grad.data.add_(draw(p)))


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


@pytest.mark.parametrize(
    "kind", [in_place, through_data, set_anew, by_one_rank, removed_by_one_rank]
)
def test_gradients_that_ranks_change_differently_are_an_error(kind):
    model, optimizer = distributed(sgd)
    assert raised_everywhere(
        lambda: train(model, optimizer, local(regression(steps=2)), kind(noise())),
        "the gradient of parameter 2.bias" if kind is removed_by_one_rank else "parameter 0.weight",
        "hvkit.reduce_gradients(model)",
    )


@pytest.mark.parametrize("clipped", [0, 4])
def test_a_change_that_differs_is_an_error_also_later(clipped):
    """Before the comparison after 8 steps: a first change, and one after 4 steps with changes."""
    model, optimizer = distributed(sgd)
    data = local(regression(steps=8))
    begin = 6 if clipped else 5
    train(model, optimizer, data[: begin - clipped])
    train(model, optimizer, data[begin - clipped : begin], CHANGES["clip_grad_norm_"])
    assert alike(model)
    change = in_place(noise())
    assert raised_everywhere(
        lambda: train(model, optimizer, data[begin:], change), "the gradient of parameter 0.weight"
    )


def through_numpy(draw):
    return on_all(lambda p: p.grad.numpy().__iadd__(draw(p).numpy()))


@pytest.mark.parametrize("kind", [through_data, through_numpy])
def test_a_change_that_no_counter_shows_is_found_in_the_next_comparison(kind):
    """In the step after 4 steps."""
    model, optimizer = distributed(sgd)
    data = local(regression(steps=6))
    train(model, optimizer, data[:3])
    assert raised_everywhere(
        lambda: train(model, optimizer, data[3:], kind(noise())), "parameter 0.weight"
    )


def test_a_second_optimizer_is_compared_in_its_own_first_step():
    model = mlp()
    first, second = sgd(model[0].parameters()), sgd(model[2].parameters())
    hvkit.distribute(model, [first, second])
    data = local(regression(steps=12))
    train(model, first, data[:6])
    assert raised_everywhere(
        lambda: train(model, second, data[6:8], through_data(noise())), "parameter 2.weight"
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
    reference = mlp()
    draws = [noise(rank) for rank in range(hvkit.size())]
    whole = kind(lambda p: torch.stack([draw(p) for draw in draws]).mean(0))
    train(reference, sgd(reference.parameters()), regression(steps=5), whole)
    model, optimizer = distributed(sgd, **options)
    train(model, optimizer, local(regression(steps=5)), kind(noise()), reduce=True)
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def centralised(p):
    p.grad.sub_(p.grad.mean())


def halved(p):
    p.grad = p.grad / 2


def removed(p):
    if p.dim() == 1:
        p.grad = None


CHANGES = {
    "clip_grad_norm_": lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "centralised": on_all(centralised),
    "set": on_all(halved),
    "zero": on_all(lambda p: p.grad.zero_()),
    "None": on_all(removed),
    "NaN": on_all(lambda p: p.grad.mul_(float("nan"))),
    "nothing": lambda model: None,
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_are_the_same_on_all_ranks_are_compared_rarely(name, monkeypatch):
    compared = []
    rows = step_report.rows_of_gradients
    monkeypatch.setattr(
        step_report, "rows_of_gradients", lambda g: (compared.append(len(g)), rows(g))[1]
    )
    model, optimizer = distributed(sgd)
    train(model, optimizer, local(regression(steps=20)), CHANGES[name])
    # In the first step, and in the steps after 1, 2, 4, 8 and 16, with or without changes.
    assert len(compared) == 6
    assert alike(model)


def test_a_closure_that_changes_gradients_differently_is_an_error():
    model, optimizer = distributed(sgd)
    draw = noise()

    def step(x, y):
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            with torch.no_grad():
                in_place(draw)(model)
            return loss

        optimizer.step(closure)

    data = local(regression(steps=2))
    assert raised_everywhere(lambda: [step(*each) for each in data], "parameter 0.weight")


def windows(model, optimizer, batches, ends, before_step, scaler=None):
    """Accumulate over batches, and clip and step after those in ``ends``."""
    for i, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), 10 * y)
        (scaler.scale(loss) if scaler else loss).backward()
        if i in ends:
            before_step(model)
            if scaler:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()


def test_clipping_in_a_short_window_is_an_error_unless_the_window_is_ended():
    data, ends = regression(steps=6), {3, 5}
    reference = mlp()
    windows(reference, sgd(reference.parameters()), data, ends, lambda model: None)
    model, optimizer = distributed(sgd, accumulate=4)
    before = arrays(model.parameters())
    windows(model, optimizer, local(data[:4]), ends, lambda model: None)
    between = arrays(model.parameters())
    error, text = error_of(
        lambda: windows(model, optimizer, local(data[4:]), {1}, lambda model: None)
    )
    assert error is ValueError
    assert "accumulate=4 averages once in 4 passes" in text
    assert "hvkit.reduce_gradients(model)" in text
    assert largest_difference(arrays(model.parameters()), between) == 0
    model, optimizer = distributed(sgd, accumulate=4)
    assert largest_difference(arrays(model.parameters()), before) == 0
    windows(model, optimizer, local(data), ends, hvkit.reduce_gradients)
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


@pytest.mark.parametrize("closures", [False, True])
def test_a_closure_may_end_a_short_window(closures):
    """Rank 0 has no gradients in the last pass."""
    data = local(regression(steps=3))
    model, optimizer = distributed(sgd, accumulate=4)

    def last():
        loss = F.mse_loss(model(data[2][0]), data[2][1])
        if hvkit.rank() or not closures:
            loss.backward()
        return loss

    for x, y in data[:2] if not closures else data[:2][: 2 * hvkit.rank()]:
        F.mse_loss(model(x), y).backward()
    optimizer.step(last)
    assert alike(model)
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])


@pytest.mark.parametrize("ends", [{3, 5, 9, 11}, {3, 7, 11}], ids=["epochs", "over epochs"])
def test_windows_over_a_sharded_loader_may_end_with_the_epoch(ends):
    data = regression(steps=6)
    reference = mlp()
    windows(reference, sgd(reference.parameters()), data + data, ends, lambda model: None)
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    loader = hvkit.shard(DataLoader(TensorDataset(x, y), batch_size=6))
    model, optimizer = distributed(sgd, accumulate=4)
    batches = (batch for _ in range(2) for batch in loader)
    windows(model, optimizer, batches, ends, lambda model: None)
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_passes_over_parts_of_the_last_batch_may_end_a_short_window():
    data = regression(steps=3, per_rank=12)
    model, optimizer = distributed(sgd, accumulate=4)
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    loader = hvkit.shard(DataLoader(TensorDataset(x, y), batch_size=12))
    parts = (part for x, y in loader for part in zip(x.chunk(2), y.chunk(2), strict=True))
    windows(model, optimizer, parts, {3, 5}, lambda model: None)
    assert alike(model)


@pytest.mark.parametrize("done", [2, 4])
def test_the_rest_of_an_epoch_may_end_with_a_short_window(done):
    """Also if it is one batch."""
    data = regression(steps=5)
    reference = mlp()
    ends = set(range(1, 5 - done, 2)) | {4 - done}
    windows(reference, sgd(reference.parameters()), data[done:], ends, lambda model: None)
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    loader = hvkit.shard(DataLoader(TensorDataset(x, y), batch_size=6))
    loader.load_state_dict({"epoch": 1, "samples": 6 * hvkit.size() * done})
    model, optimizer = distributed(sgd, accumulate=2)
    windows(model, optimizer, loader, ends, lambda model: None)
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_an_overflow_on_one_rank_in_a_short_window_skips_the_step_on_all():
    model, optimizer = distributed(sgd, accumulate=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = local(regression(steps=6))
    windows(model, optimizer, data[:4], {3}, lambda model: None, scaler)
    before = arrays(model.parameters())
    x, y = data[5]
    last = data[4], (x, y * float("inf") if hvkit.rank() else y)
    windows(model, optimizer, last, {1}, lambda model: None, scaler)
    assert largest_difference(arrays(model.parameters()), before) == 0
    assert hvkit.allgather(scaler.get_scale()) == [512.0] * hvkit.size()
    windows(model, optimizer, data[:4], {3}, lambda model: None, scaler)
    assert alike(model)


def test_a_compression_that_keeps_a_rest_averages_once():
    model, optimizer = distributed(sgd, compression=hvkit.TopK(0.5))
    data = local(regression(steps=4))
    error, text = error_of(lambda: train(model, optimizer, data, in_place(noise()), reduce=True))
    assert error is ValueError
    assert "accumulate= one more than the backward passes" in text
    model, optimizer = distributed(sgd, compression=hvkit.TopK(0.5), accumulate=2)
    train(model, optimizer, data, in_place(noise()), reduce=True)
    assert alike(model)


def test_what_reduce_gradients_takes():
    error, text = error_of(lambda: hvkit.reduce_gradients([mlp()]))
    assert error is TypeError
    assert "got builtins.list" in text
    error, text = error_of(lambda: hvkit.reduce_gradients(mlp()))
    assert error is ValueError
    assert "Sequential was not passed to hvkit.distribute" in text
    model, optimizer = in_rounds(hvkit.LocalSGD(every=4))
    change = in_place(noise())
    train(model, optimizer, local(regression(steps=4)), change, reduce=True)
    assert not same_on_all_ranks([p.grad.numpy() for p in model.parameters()])
    assert alike(model)


class Wrapped(torch.optim.Optimizer):
    """As Opacus and Accelerate wrap optimizers: without what ``Optimizer.__init__`` makes."""

    def __init__(self, inner, after=lambda optimizer: None):
        self.inner = inner
        self.draw, self.after = noise(), after

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
    data = regression(steps=4)
    model = mlp()
    optimizer = Wrapped(sgd(model.parameters()), hvkit.reduce_gradients)
    hvkit.distribute(model, optimizer, lr_scaling="linear", monitor=hvkit.Monitor(folder))
    train(model, optimizer, local(data))
    reference = mlp()
    draws = [noise(rank) for rank in range(hvkit.size())]
    rate = torch.optim.SGD(reference.parameters(), lr=0.1 * hvkit.size())
    whole = set_anew(lambda p: torch.stack([draw(p) for draw in draws]).mean(0))
    train(reference, rate, data, whole)
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5
    model = mlp()
    optimizer = Wrapped(sgd(model.parameters()))
    hvkit.distribute(model, optimizer)
    assert raised_everywhere(
        lambda: train(model, optimizer, local(data)), "the gradient of parameter 0.weight"
    )


def test_an_optimizer_without_hooks_and_without_one_inside_is_refused():
    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            self.param_groups = [{"params": list(parameters), "lr": 0.1}]

    model = mlp()
    error, text = error_of(lambda: hvkit.distribute(model, Own(model.parameters())))
    assert error is TypeError
    assert "Own" in text
    assert "super().__init__" in text
