"""Optimizers that step in unusual ways multiply the rate once and restore the user's."""

import copy

import pytest
import torch
from cases import MORE, cases, each_once, pairwise
from torch.optim import lr_scheduler as schedulers
from torch_nets import local, mlp, regression, train_with_closure
from twin import (
    RATE,
    SETTERS,
    Twin,
    compare,
    identical,
    multiplied,
    multipliers,
    new_gradients,
    rates_of,
    set_rate,
    sgd,
    tensor_sgd,
)

import hvkit

pytestmark = pytest.mark.two_ranks


def compiled_method(optimizer, backend="eager"):
    return torch.compile(optimizer.step, backend=backend)


def compiled_function(optimizer, backend="eager"):
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
    ("step", "make"), [(compiled_function, sgd), (compiled_method, capturable)]
)
def test_compiled_steps(step, make):
    """On CPUs, Adam accepts ``capturable`` only in a compiled update."""
    # A rate that is a number compiles each step anew, of three optimizers.
    with torch._dynamo.config.patch(recompile_limit=32):
        compare(make, after=SETTERS["StepLR"], warmup=2, step=step)


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
        new_gradients(model, batch)
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
        new_gradients(model, batch)
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
            set_rate(group, 0.5 / (i + 1))
            new_gradients(model, batch)
            return 0.0

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
        new_gradients(model, batch)
        optimizer.step()
        twin.step(model, [0.25 * hvkit.size()], optimizer.param_groups)
        assert identical(model, twin.model)
    assert seen == [RATE, 0.25, 0.25, 0.25]


class Fails(torch.optim.SGD):
    """A step that raises after it has read its rate."""

    def step(self, closure=None):
        raise MemoryError(f"at {float(self.param_groups[0]['lr']):g}")


@pytest.mark.parametrize(
    ("where", "lr", "warmup"),
    cases(pairwise(["update", "closure", "hook"], [RATE, torch.tensor(RATE)], [0, 4]), 3),
)
def test_a_step_that_raises_leaves_the_users_rate_in_place(where, lr, warmup):
    model = mlp()
    kind = Fails if where == "update" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=copy.deepcopy(lr))
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    lr = optimizer.param_groups[0]["lr"]

    def fail(*_):
        raise MemoryError("at no rate")

    batch, used = local(regression(steps=1))[0], RATE if warmup else RATE * hvkit.size()
    hook = optimizer.register_step_pre_hook(fail) if where == "hook" else None
    new_gradients(model, batch)
    for _ in range(3):
        with pytest.raises(MemoryError, match=f"at {used:g}" if where == "update" else "at no"):
            optimizer.step(fail) if where == "closure" else optimizer.step()
        assert optimizer.param_groups[0]["lr"] is lr
        assert float(lr) == pytest.approx(RATE)
    if hook:
        hook.remove()
    if where != "update":
        before = [p.detach().clone() for p in model.parameters()]
        new_gradients(model, batch)
        optimizer.step()
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - used * p.grad)


class CallsItsParents(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Sets(torch.optim.SGD):
    """Sets its own rate before it steps, as implementations of Noam's schedule often do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            set_rate(group, RATE / group["done"])
        return super().step(closure)


class SetsAndNamesItsParent(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            set_rate(group, RATE / 3)
        return torch.optim.SGD.step(self, closure)


class Decays(torch.optim.SGD):
    """Lowers its own rate at the end of its step."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5


class DecaysInItsUpdate(torch.optim.Optimizer):
    """Lowers its rate, a tensor in place, in a step that calls no other."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad
            group["lr"] *= 0.5


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


# The rate that each uses in a step, and the one that it shows after it.
OF_THEIR_OWN = {
    CallsItsParents: (lambda i: RATE, lambda i: RATE),
    Sets: (lambda i: RATE / (i + 1), lambda i: RATE / (i + 1)),
    SetsAndNamesItsParent: (lambda i: RATE / 3, lambda i: RATE / 3),
    Decays: (lambda i: RATE / 2**i, lambda i: RATE / 2 ** (i + 1)),
    DecaysInItsUpdate: (lambda i: RATE / 2**i, lambda i: RATE / 2 ** (i + 1)),
    Around: (lambda i: RATE, lambda i: RATE),
}


@pytest.mark.parametrize(
    ("kind", "step", "warmup", "lr"),
    [
        *((kind, "step", 3, RATE) for kind in OF_THEIR_OWN),
        *((kind, "step", 0, torch.tensor(RATE)) for kind in OF_THEIR_OWN),
        *((Around, "second_step", warmup, RATE) for warmup in (0, 3)),
    ],
)
def test_steps_of_their_own_use_the_multiplied_rate_once(kind, step, warmup, lr):
    used, shown = OF_THEIR_OWN[kind]
    model = mlp()
    optimizer = kind(model.parameters(), lr=copy.deepcopy(lr))
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    before = [p.detach().clone() for p in model.parameters()]
    for i, batch in enumerate(local(regression(steps=5))):
        new_gradients(model, batch)
        getattr(optimizer, step)()
        assert rates_of(optimizer) == pytest.approx([shown(i)])
        by = multipliers("linear", warmup)[i]
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - used(i) * by * p.grad)
            old.copy_(p.detach())


@pytest.mark.parametrize(
    ("line_search", "warmup"), cases(each_once([None, "strong_wolfe"], [0, 4]))
)
def test_the_step_length_of_lbfgs_is_never_scaled(line_search, warmup, capfd):
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=line_search)

    data = regression(steps=2)
    reference = mlp()
    train_with_closure(reference, make(reference), data)
    model = mlp(seed=hvkit.rank())
    optimizer = make(model)
    capfd.readouterr()  # of the reference, which was not passed
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
    new_gradients(model, local(regression(steps=1))[0])

    def captured():
        with monkeypatch.context() as capturing:
            capturing.setattr(torch.cuda, "is_available", lambda: True)
            capturing.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            optimizer.step()

    with pytest.raises(RuntimeError, match="capture it after the warm-up"):
        captured()
    assert optimizer.param_groups[0]["lr"] == RATE
    optimizer.step()
    captured()
