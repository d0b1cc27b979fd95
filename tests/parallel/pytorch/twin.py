"""A twin in one process that trains on the gradients of a distributed model.

The twin is the same optimizer with the multiplied rate in absolute numbers. Weights must be equal
to its weights, and whatever reads the rate between steps must see what it sees without hvkit.
"""

import torch
from ranks import same_on_all_ranks
from torch.optim import lr_scheduler as schedulers
from torch_nets import backward, local, mlp, regression

import hvkit

RATE = 0.1
STEPS = 6


class Twin:
    """Trains in one process, on a distributed model's gradients and at given rates."""

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
            set_rate(own, rate)
        self.take()


def set_rate(group, rate):
    """As scripts do: a tensor in place, a number anew."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def new_gradients(model, batch):
    model.zero_grad()
    backward(model, batch)


def rates_of(optimizer):
    """The rates as floats; rates in tensors keep the precision of their dtype."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def multiplied(group, by):
    """The multiplied rate, rounded to the dtype of the group's rate."""
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


def compare(make, *, before=None, after=None, scaling="linear", warmup=0, step=None):
    """Train on all ranks; the script sees its own rates, the weights follow the multiplied ones.

    Args:
        make: makes the optimizer for a model.
        before: called with the optimizer before distribute; returns a function that this calls
            after each step.
        after: the same, called after distribute.
    """
    # The rates that a script sees without hvkit.
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
        new_gradients(model, batches[i])
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
    """Steps a scheduler after each optimizer step."""

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
            set_rate(group, 0.3 / (i + 1))

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
