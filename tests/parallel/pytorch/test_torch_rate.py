"""The learning rate is the user's everywhere but inside the update.

Each test trains on all ranks with the rates that the user sets, and a twin: the same optimizer in
one process, which gets the same gradients and the multiplied rate in absolute numbers. Whatever
reads the rate in between has to see what it would without hvkit.
"""

import copy
import warnings

import pytest
import torch
from nets import local, mlp, regression, train_with_closure
from ranks import same_on_all_ranks
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

import hvkit

RATE = 0.1
STEPS = 6


class Twin:
    """One process that trains on the gradients of a distributed model at the rates it is given."""

    def __init__(self, model, make, step=None):
        self.model = mlp()
        self.model.load_state_dict(model.state_dict())
        self.optimizer = make(self.model)
        self.take = step(self.optimizer) if step else self.optimizer.step

    def step(self, model, rates, groups):
        for ours, theirs in zip(self.model.parameters(), model.parameters(), strict=True):
            ours.grad = None if theirs.grad is None else theirs.grad.clone()
        for own, rate, theirs in zip(self.optimizer.param_groups, rates, groups, strict=True):
            own.update({k: v for k, v in theirs.items() if k not in ("params", "lr")})
            if isinstance(own["lr"], torch.Tensor):
                own["lr"].fill_(rate)
            else:
                own["lr"] = rate
        self.take()


def backward(model, batch):
    model.zero_grad()
    x, y = batch
    F.mse_loss(model(x), y).backward()


def rates_of(optimizer):
    """The rates as floats; those in tensors with the bits of their dtype."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def multiplied(group, by):
    """The rate that one process would be given, in the dtype of the group's."""
    return (
        (torch.as_tensor(group["lr"]).detach() * by).item()
        if isinstance(group["lr"], torch.Tensor)
        else group["lr"] * by
    )


def multipliers(scaling, warmup):
    n = hvkit.size()
    full = {"none": 1, "linear": n, "sqrt": n**0.5}[scaling]
    first = 1 / n if scaling == "none" else 1
    return [first + (full - first) * t / warmup if t < warmup else full for t in range(STEPS)]


def sgd(model, lr=RATE):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)


def tensor_sgd(model):
    return sgd(model, torch.tensor(RATE))


def identical(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def compare(
    make,
    *,
    before=None,
    after=None,
    scaling="linear",
    warmup=0,
    compiled=None,
    step=None,
    **options,
):
    """Train on all ranks; the rates seen are the user's, the weights those of the multiplied ones.

    Args:
        make: makes the optimizer for a model.
        before: called with the optimizer before distribute; returns what to call after each step.
        after: the same, called after distribute.
    """
    # What a script sees without hvkit.
    plain = make(mlp())
    plain_each = (before or after or (lambda _: lambda i: None))(plain)
    for group in plain.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    model = mlp(seed=hvkit.rank())
    optimizer = make(model)
    each = before(optimizer) if before else None
    hvkit.distribute(model, optimizer, lr_scaling=scaling, warmup_steps=warmup)
    each = each or (after(optimizer) if after else lambda i: None)
    twin = Twin(model, make, step)
    take, take_plain = (step(each) if step else each.step for each in (optimizer, plain))
    batches = local(regression(steps=STEPS))
    for i, by in enumerate(multipliers(scaling, warmup)):
        assert rates_of(optimizer) == rates_of(plain)
        backward(model, batches[i])
        rates = [multiplied(group, by) for group in optimizer.param_groups]
        take()
        assert rates_of(optimizer) == rates_of(plain)
        twin.step(model, rates, optimizer.param_groups)
        assert identical(model, twin.model), f"step {i}"
        take_plain()
        each(i)
        plain_each(i)
    assert rates_of(optimizer) == rates_of(plain)
    assert same_on_all_ranks([p.detach().numpy() for p in model.parameters()])
    return model, optimizer


def stepping(make_scheduler):
    """A scheduler that is stepped after each optimizer step."""

    def made(optimizer):
        scheduler = make_scheduler(optimizer)
        return lambda i: scheduler.step()

    return made


def on_a_plateau(optimizer):
    scheduler = schedulers.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    return lambda i: scheduler.step(1.0)


def absolute(optimizer):
    def assign(i):
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(0.3 / (i + 1))
            else:
                group["lr"] = 0.3 / (i + 1)

    assign(0)
    return assign


def relative(optimizer):
    def lower(i):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0.7

    return lower


def in_sequence(optimizer):
    first = schedulers.LinearLR(optimizer, 0.25, total_iters=2)
    second = schedulers.CosineAnnealingLR(optimizer, 5)
    return schedulers.SequentialLR(optimizer, [first, second], [2])


SETTERS = {
    "constant": lambda optimizer: lambda i: None,
    "absolute": absolute,
    "relative": relative,
    "StepLR": stepping(lambda o: schedulers.StepLR(o, 2, 0.3)),
    "LambdaLR": stepping(lambda o: schedulers.LambdaLR(o, lambda i: 0.9**i)),
    "OneCycleLR": stepping(lambda o: schedulers.OneCycleLR(o, max_lr=0.7, total_steps=9)),
    "CyclicLR": stepping(lambda o: schedulers.CyclicLR(o, 0.02, 0.3, step_size_up=2)),
    "ReduceLROnPlateau": on_a_plateau,
    "SequentialLR": stepping(in_sequence),
}


@pytest.mark.parametrize(
    ("made", "warmup", "make"),
    [("before", 4, sgd), ("after", 0, tensor_sgd)],
    ids=["before, float, warm-up", "after, tensor"],
)
@pytest.mark.parametrize("setter", SETTERS)
def test_whatever_sets_the_rate_sees_its_own_and_updates_use_the_multiplied(
    setter, made, warmup, make
):
    compare(make, **{made: SETTERS[setter]}, warmup=warmup)


@pytest.mark.parametrize("scaling", ["none", "sqrt"])
@pytest.mark.parametrize("warmup", [0, 4], ids=["at once", "warm-up"])
def test_the_other_rules(scaling, warmup):
    compare(sgd, after=SETTERS["StepLR"], scaling=scaling, warmup=warmup)


def test_by_default_the_rate_is_used_as_it_is():
    model = mlp()
    optimizer = sgd(model)
    twin = Twin(model, sgd)
    hvkit.distribute(model, optimizer)
    for batch in local(regression(steps=3)):
        backward(model, batch)
        optimizer.step()
        twin.step(model, [RATE], optimizer.param_groups)
        assert identical(model, twin.model)


def groups_of(model):
    return [{"params": model[0].parameters()}, {"params": model[2].parameters()}]


OPTIMIZERS = {
    "two groups": lambda m: torch.optim.SGD(
        [groups_of(m)[0] | {"lr": 0.3}, groups_of(m)[1]], lr=0.1
    ),
    "two groups, one tensor": lambda m: torch.optim.SGD(groups_of(m), lr=torch.tensor(0.1)),
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.01),
    "Adam foreach": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, foreach=True),
    "Adam fused": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True),
    "Adam fused, tensor": lambda m: torch.optim.Adam(
        m.parameters(), lr=torch.tensor(0.01), fused=True
    ),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "SGD fused": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, fused=True),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.01),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    "Adadelta": lambda m: torch.optim.Adadelta(m.parameters(), lr=0.5),
    "Rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(m.parameters(), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.01),
    "Adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_groups(name):
    compare(OPTIMIZERS[name], after=SETTERS["StepLR"], warmup=4)


def test_a_rate_that_gradients_flow_to_is_replaced_and_never_written_to():
    """Writing to it would spoil what autograd has kept of it."""
    model = mlp()
    optimizer = sgd(model, torch.tensor(RATE, requires_grad=True))
    twin = Twin(model, tensor_sgd)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    rate = optimizer.param_groups[0]["lr"]
    penalty = rate.square()  # keeps the rate for its gradient
    backward(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [multiplied(optimizer.param_groups[0], hvkit.size())], optimizer.param_groups)
    assert identical(model, twin.model)
    assert optimizer.param_groups[0]["lr"] is rate
    penalty.backward()
    assert rate.grad == 2 * rate


def test_a_tensor_that_the_script_holds_sets_the_rate_on_every_rank():
    model = mlp()
    rate = torch.tensor(0.7 + hvkit.rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    assert rate == torch.tensor(0.7)  # rank 0's
    twin = Twin(model, sgd)
    rate.fill_(0.25)
    backward(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [0.25 * hvkit.size()], optimizer.param_groups)
    assert identical(model, twin.model)
    assert rate == 0.25


@pytest.mark.parametrize("rate", ["float", "tensor", "shared tensor"])
def test_groups_that_are_added_later_have_the_users_rate_too(rate):
    shared = torch.tensor(RATE)
    rate = {"float": RATE, "tensor": torch.tensor(RATE), "shared tensor": shared}[rate]
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=shared)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    optimizer.add_param_group({"params": model[2].parameters(), "lr": rate})
    assert rates_of(optimizer) == [pytest.approx(RATE)] * 2
    twin = mlp()
    reference = torch.optim.SGD(twin.parameters(), lr=shared * hvkit.size())
    for batch in local(regression(steps=3)):
        backward(model, batch)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
        assert float(shared) == float(torch.tensor(RATE))
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


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


@pytest.mark.usefixtures("_not_compiled_before")
@pytest.mark.parametrize(
    ("step", "make", "warmup"),
    [(compiled_method, capturable, 4), (compiled_function, sgd, 4), (compiled_function, sgd, 0)],
)
def test_compiled_steps(step, make, warmup):
    """Adam refuses ``capturable`` on CPUs where its update is not compiled."""
    with torch._dynamo.config.patch(recompile_limit=32):  # three optimizers
        compare(make, after=SETTERS["OneCycleLR"], warmup=warmup, step=step)


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


@pytest.mark.parametrize("kept", ["optimizer.step", "compiled"])
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
        assert identical(model, twin.model)


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
    """Those of before the call and those of after it."""
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
    """A step that does more, by way of its parent's."""

    def step(self, closure=None):
        return super().step(closure)


class Decays(torch.optim.SGD):
    """Lowers its rate itself, as a part of its step."""

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
    """Sets its rate itself before it steps, as Noam's schedule is often written."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["done"] = group.get("done", 0) + 1
            group["lr"] = RATE / group["done"]
        return super().step(closure)


class SetsAndSteps(torch.optim.SGD):
    """The same, in other words."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = RATE / 3
        return torch.optim.SGD.step(self, closure)


@pytest.mark.parametrize("kind", [Sets, SetsAndSteps])
@pytest.mark.parametrize("warmup", [0, 4], ids=["at once", "warm-up"])
def test_a_rate_that_a_step_sets_is_the_users(kind, warmup):
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


@pytest.mark.parametrize("take", ["step", "second_step"])
def test_an_optimizer_inside_another_updates_at_the_multiplied_rate_once(take):
    model = mlp()
    optimizer = Around(model.parameters(), lr=RATE)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    before = [p.detach().clone() for p in model.parameters()]
    for batch in local(regression(steps=3)):
        backward(model, batch)
        getattr(optimizer, take)()
        assert rates_of(optimizer) == [RATE]
        for p, old in zip(model.parameters(), before, strict=True):
            torch.testing.assert_close(p, old - RATE * hvkit.size() * p.grad)
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
    said = capfd.readouterr().err
    train_with_closure(model, optimizer, local(data))
    assert optimizer.param_groups[0]["lr"] == 0.5
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)
    if hvkit.rank() == 0:
        assert said == f"hvkit: {hvkit.size()} ranks; step length 0.5 of LBFGS, never scaled\n"


def test_a_scheduler_of_before_the_call_has_nothing_to_warn_of():
    model = mlp()
    optimizer = sgd(model)
    scheduler = schedulers.StepLR(optimizer, 1)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(model, local(regression(steps=1))[0])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("loaded", ["before", "after"])
def test_saved_rates_are_the_users_whenever_they_are_loaded(loaded, tmp_path):
    model, optimizer = compare(sgd, after=SETTERS["StepLR"], warmup=4)
    rate = optimizer.param_groups[0]["lr"]
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert state["param_groups"][0]["lr"] == rate < RATE
    model = mlp()
    optimizer = sgd(model, 0.7)
    if loaded == "before":
        optimizer.load_state_dict(state)
    twin = Twin(model, sgd)
    twin.optimizer.load_state_dict(copy.deepcopy(state))
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    if loaded == "after":
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == rate
    backward(model, local(regression(steps=1))[0])
    optimizer.step()
    twin.step(model, [rate * hvkit.size()], optimizer.param_groups)
    assert identical(model, twin.model)


def test_a_copy_of_the_optimizer_is_a_plain_one():
    model = mlp()
    optimizer = sgd(model)
    hvkit.distribute(model, optimizer, lr_scaling="linear")
    twin = copy.deepcopy(optimizer)
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in twin.param_groups[0]["params"]]
    twin.step()
    for p, q in zip(twin.param_groups[0]["params"], before, strict=True):
        assert torch.equal(p, q - RATE)


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


def announced(capfd, model, optimizer, **options):
    hvkit.distribute(model, optimizer, **options)
    said = capfd.readouterr().err
    assert (hvkit.rank() == 0) == (said != "")
    return hvkit.broadcast(said).removeprefix(f"hvkit: {hvkit.size()} ranks; ")


def test_rank_0_says_what_a_step_uses(capfd):
    n = hvkit.size()

    def line(**options):
        model = mlp()
        groups = groups_of(model)
        groups[0]["lr"], groups[1]["lr"] = 0.5, torch.tensor(0.25)
        return announced(capfd, model, torch.optim.Adam(groups), **options)

    assert line() == (
        f"learning rate 0.5, 0.25, not scaled (the global batch is {n} times one rank's: "
        f'lr_scaling="linear" would use {0.5 * n:g}, {0.25 * n:g})\n'
    )
    assert line(lr_scaling="sqrt") == (
        f"learning rate 0.5, 0.25, of which a step uses {0.5 * n**0.5:g}, {0.25 * n**0.5:g} "
        '(lr_scaling="sqrt")\n'
    )
    assert line(lr_scaling="linear", warmup_steps=30) == (
        f"learning rate 0.5, 0.25, of which a step uses 0.5, 0.25 at first and {0.5 * n:g}, "
        f'{0.25 * n:g} after 30 steps (lr_scaling="linear", warm-up)\n'
    )
    assert line(warmup_steps=30) == (
        f"learning rate 0.5, 0.25, of which a step uses {0.5 / n:g}, {0.25 / n:g} at first and "
        '0.5, 0.25 after 30 steps (lr_scaling="none", warm-up)\n'
    )
