"""Optimizers that step in unusual ways multiply the rate once and restore the user's."""

import copy
import functools

import pytest
import torch
from cases import MORE, cases
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers
from torch_nets import local, mlp, regression, train_with_closure
from twin import (
    RATE,
    SETTERS,
    Twin,
    backward,
    compare,
    identical,
    multiplied,
    multipliers,
    rates_of,
    sgd,
    tensor_sgd,
)

import hvkit

pytestmark = pytest.mark.two_ranks


def compiled_method(optimizer, backend="aot_eager"):
    return torch.compile(optimizer.step, backend=backend)


def compiled_function(optimizer, backend="aot_eager"):
    return torch.compile(lambda: optimizer.step(), backend=backend)


def capturable(model):
    lr = torch.tensor(0.01)
    return torch.optim.Adam(model.parameters(), lr=lr, capturable=True, foreach=True)


@pytest.fixture
def _not_compiled_before():
    torch._dynamo.reset()


@MORE
@pytest.mark.usefixtures("_not_compiled_before")
@pytest.mark.parametrize(
    ("step", "make"),
    # A rate that is a number compiles each step anew, so by the quickest backend.
    [(functools.partial(compiled_function, backend="eager"), sgd), (compiled_method, capturable)],
    ids=["function", "method"],
)
def test_compiled_steps(step, make):
    """On CPUs, Adam accepts ``capturable`` only in a compiled update."""
    with torch._dynamo.config.patch(recompile_limit=32):  # three optimizers
        compare(make, after=SETTERS["OneCycleLR"], warmup=4, step=step)


@MORE
@pytest.mark.usefixtures("_not_compiled_before")
@pytest.mark.parametrize("step", [compiled_method, compiled_function])
def test_a_compiled_step_is_compiled_once(step):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(RATE))
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=4)
    scheduler = schedulers.StepLR(optimizer, 1, 0.5)
    take = step(optimizer, count)
    for batch in local(regression(steps=5)):
        backward(model, batch)
        take()
        scheduler.step()
    assert len(graphs) == 1


@pytest.mark.parametrize("kept", cases(["optimizer.step", "compiled"]))
def test_a_step_that_was_kept_from_before_the_call_uses_the_multiplied_rate(kept):
    model = mlp()
    optimizer = sgd(model)
    step = optimizer.step if kept == "optimizer.step" else compiled_method(optimizer)
    twin = Twin(model, sgd)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=2)
    for batch, by in zip(local(regression(steps=4)), multipliers("linear", 2), strict=False):
        backward(model, batch)
        step()
        twin.step(model, [RATE * by], optimizer.param_groups)
        assert optimizer.param_groups[0]["lr"] == RATE
        # PyTorch 2.8 rounds otherwise where it has compiled the step.
        for mine, theirs in zip(model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-8)


@pytest.mark.parametrize("make", [sgd, tensor_sgd], ids=["float", "tensor"])
def test_a_closure_reads_and_sets_the_users_rate(make):
    model = mlp()
    optimizer = make(model)
    twin = Twin(model, make)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=2)
    group, seen = optimizer.param_groups[0], []
    for i, batch in enumerate(local(regression(steps=4))):

        def closure(i=i, batch=batch):
            seen.append(float(group["lr"]))
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.5 / (i + 1))
            else:
                group["lr"] = 0.5 / (i + 1)
            model.zero_grad()
            x, y = batch
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure) if i % 2 else optimizer.step(closure=closure)
        by = multipliers("linear", 2)[i]
        twin.step(model, [multiplied(group, by)], optimizer.param_groups)
        assert identical(model, twin.model)
        assert float(group["lr"]) == pytest.approx(0.5 / (i + 1))
    assert seen == pytest.approx([RATE, 0.5, 0.25, 0.5 / 3])


def test_hooks_of_the_user_read_and_set_the_users_rate():
    """Hooks registered before the call and after it."""
    model = mlp()
    optimizer = sgd(model)
    twin = Twin(model, sgd)
    seen = []

    def look(optimizer, args, kwargs):
        seen.append(optimizer.param_groups[0]["lr"])

    def assign(optimizer, args, kwargs):
        optimizer.param_groups[0]["lr"] = 0.25

    optimizer.register_step_post_hook(look)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    optimizer.register_step_pre_hook(look)
    optimizer.register_step_pre_hook(assign)
    for batch in local(regression(steps=2)):
        backward(model, batch)
        optimizer.step()
        twin.step(model, [0.25 * hvkit.size()], optimizer.param_groups)
        assert identical(model, twin.model)
    assert seen == [RATE, 0.25, 0.25, 0.25]


class Fails(torch.optim.SGD):
    """A step that raises after it has read its rate."""

    def step(self, closure=None):
        if closure is not None:
            closure()
        raise MemoryError(f"at {float(self.param_groups[0]['lr']):g}")


@MORE
@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
@pytest.mark.parametrize("where", ["update", "closure", "hook"])
@pytest.mark.parametrize("warmup", [0, 4], ids=["at once", "warm-up"])
def test_a_step_that_raises_leaves_the_users_rate_in_place(where, lr, warmup):
    lr = copy.deepcopy(lr)
    model = mlp()
    kind = Fails if where == "update" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=lr)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    lr = optimizer.param_groups[0]["lr"]

    def fail(*_):
        raise MemoryError("at no rate")

    if where == "hook":
        hook = optimizer.register_step_pre_hook(fail)
    backward(model, local(regression(steps=1))[0])
    for _ in range(3):
        used = RATE if warmup else RATE * hvkit.size()
        with pytest.raises(MemoryError, match=f"at {used:g}" if where == "update" else "at no"):
            optimizer.step(fail) if where == "closure" else optimizer.step()
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == pytest.approx(RATE)
    if where == "hook":
        hook.remove()
    if where != "update":
        twin = Twin(model, lambda m: torch.optim.SGD(m.parameters(), lr=copy.deepcopy(lr)))
        backward(model, local(regression(steps=1))[0])
        optimizer.step()
        by = 1 if warmup else hvkit.size()
        twin.step(model, [float(lr * by)], optimizer.param_groups)
        assert identical(model, twin.model)


class Own(torch.optim.SGD):
    """A step that calls its parent's."""

    def step(self, closure=None):
        return super().step(closure)


class Decays(torch.optim.SGD):
    """Lowers its own rate at the end of its step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if self.in_place:
                group["lr"] *= 0.5
            else:
                group["lr"] = group["lr"] * 0.5


@pytest.mark.parametrize("warmup", [0, 4], ids=["at once", "warm-up"])
def test_a_step_that_calls_its_parents_counts_once(warmup):
    compare(lambda m: Own(m.parameters(), lr=RATE), after=SETTERS["StepLR"], warmup=warmup)


class Sets(torch.optim.SGD):
    """Sets its own rate before it steps, as implementations of Noam's schedule often do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            group["lr"] = RATE / group["done"]
        return super().step(closure)


class SetsAndSteps(torch.optim.SGD):
    """The same, naming the parent class."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = RATE / 3
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize("kind", [Sets, SetsAndSteps])
@pytest.mark.parametrize("warmup", [0, 4], ids=["at once", "warm-up"])
def test_a_rate_set_inside_a_step_counts_as_the_users(kind, warmup):
    model = mlp()
    optimizer = kind(model.parameters(), lr=RATE)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    before = [p.detach().clone() for p in model.parameters()]
    for i, batch in enumerate(local(regression(steps=6))):
        backward(model, batch)
        optimizer.step()
        users = RATE / 3 if kind is SetsAndSteps else RATE / (i + 1)
        assert rates_of(optimizer) == [users]
        by = 1 + (hvkit.size() - 1) * min(1, i / warmup if warmup else 1)
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - users * by * p.grad)
            old.copy_(p.detach())


class Around(torch.optim.Optimizer):
    """Steps another optimizer of the same groups, in its own step or beside it, as SAM does."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    def step(self, closure=None):
        self.base.step()

    def second_step(self):
        self.base.step()


@pytest.mark.parametrize("warmup", [0, 3], ids=["at once", "warm-up"])
@pytest.mark.parametrize("take", ["step", "second_step"])
def test_an_optimizer_inside_another_updates_at_the_multiplied_rate_once(take, warmup):
    model = mlp()
    optimizer = Around(model.parameters(), lr=RATE)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    before = [p.detach().clone() for p in model.parameters()]
    for i, batch in enumerate(local(regression(steps=5))):
        backward(model, batch)
        getattr(optimizer, take)()
        assert rates_of(optimizer) == [RATE]
        by = multipliers("linear", warmup)[i]
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - RATE * by * p.grad)
            old.copy_(p.detach())


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("lr", [RATE, torch.tensor(RATE)], ids=["float", "tensor"])
def test_an_optimizer_that_lowers_its_rate_itself_lowers_the_users(lr, in_place):
    lr = copy.deepcopy(lr)
    model = mlp()
    optimizer = Decays(model.parameters(), lr=lr)
    optimizer.in_place = in_place
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    seen = []
    for batch in local(regression(steps=3)):
        backward(model, batch)
        optimizer.step()
        seen.append(float(optimizer.param_groups[0]["lr"]))
    assert seen == pytest.approx([RATE / 2, RATE / 4, RATE / 8], rel=1e-6)


@MORE
@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_the_step_length_of_lbfgs_is_never_scaled(line_search, warmup, capfd):
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    data = regression(steps=2)
    reference = mlp()
    train_with_closure(reference, make(reference), data)
    model = mlp(seed=hvkit.rank())
    optimizer = make(model)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    logged = capfd.readouterr().err
    train_with_closure(model, optimizer, local(data))
    assert optimizer.param_groups[0]["lr"] == 0.5
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    if hvkit.rank() == 0:
        assert logged == f"hvkit: {hvkit.size()} ranks; step length 0.5 of LBFGS, never scaled\n"


def test_a_step_in_the_warm_up_is_not_captured_into_a_cuda_graph(monkeypatch):
    model = mlp()
    optimizer = sgd(model)
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=1)
    batches = local(regression(steps=3))
    backward(model, batches[0])
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.cuda, "is_available", lambda: True)
        capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="capture it after the warm-up"):
            optimizer.step()
    assert optimizer.param_groups[0]["lr"] == RATE
    backward(model, batches[1])
    optimizer.step()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    optimizer.step()
