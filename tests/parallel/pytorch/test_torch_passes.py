"""Backward passes and what follows before the step: clipping, scaling, closures, checkpointing."""

import pytest
import torch
from cases import cases
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch_nets import (
    backward,
    distributed,
    equals_one_process,
    local,
    mean_over_ranks,
    mlp,
    raised_everywhere,
    regression,
    sgd,
    train,
    train_with_closure,
    weights,
)

import hvkit


def test_clipping_acts_on_the_mean():
    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            backward(model, (x, 100 * y))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    assert equals_one_process(steps=steps)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model, optimizer = distributed()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, (x, y) in enumerate(local(regression(steps=4))):
        if step == 1 and hvkit.rank() == hvkit.size() - 1:
            y = y * float("inf")
        before = weights(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = largest_difference(weights(model), before) > 0
        assert changed == (step != 1)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("what", cases(["model passed", "model", "loop"], 2))
def test_compiled_models_and_loops(what):
    def compiled(function):
        return torch.compile(function, backend="eager")

    def steps(model, optimizer, data):
        model = compiled(model) if what == "model" else model
        step = compiled(train) if what == "loop" else train
        for batch in data:
            step(model, optimizer, [batch])

    build = (lambda: compiled(mlp())) if what == "model passed" else mlp
    assert equals_one_process(build=build, steps=steps, data=regression(steps=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["together", "apart"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing(use_reentrant, dtype):
    """With a layer that is used inside and outside of the checkpointed segment.

    Of another dtype, its gradients travel apart, and are sent before the segment adds to them.
    """

    def forward(model, x):
        def shared(x):
            return torch.tanh(model[2](x.to(dtype))).float()

        x = checkpoint(shared, torch.tanh(model[0](x)), use_reentrant=use_reentrant)
        return model[1](shared(x))

    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8, dtype=dtype))

    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(forward(model, x.clone().requires_grad_()), y).backward()
            optimizer.step()

    assert equals_one_process(build=build, steps=steps)


@pytest.mark.parametrize("in_a_segment", [True, False])
def test_a_backward_pass_that_failed_leaves_nothing_behind(in_a_segment):
    x, y = local(regression(steps=1))[0]
    model, _ = distributed()

    def fails(x):
        x = torch.tanh(model[0](x))
        if x.requires_grad:  # in a segment, when it is computed again
            x.register_hook(lambda gradient: 1 / 0)
        return model[2](x)

    x.requires_grad_()
    out = checkpoint(fails, x, use_reentrant=True) if in_a_segment else fails(x)
    with pytest.raises(ZeroDivisionError):
        F.mse_loss(out, y).backward()
    model.zero_grad(set_to_none=False)
    F.mse_loss(model[0](x)[:, :4], y).backward()
    alone = mlp()
    F.mse_loss(alone[0](x)[:, :4], y).backward()
    for p, q in zip(model[0].parameters(), alone[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_ranks(q.grad))
    assert not any(p.grad is not None and p.grad.any() for p in model[2].parameters())


def of_two_dtypes():
    """Whose gradients travel in two buckets."""
    return nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3).double()])


def of_rate_1(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def hold_the_mean(models, step):
    """Whether the gradients are the mean of ``step`` plus each rank's number."""
    mean = step + (hvkit.size() - 1) / 2
    return all((p.grad == mean).all() for model in models for p in model.parameters())


@pytest.mark.parametrize("by", ["backward", "reduce_gradients"])
def test_gradients_of_all_models_after_an_error_of_all_ranks_are_averaged_anew(by):
    pairs = [distributed(of_rate_1, of_two_dtypes(), check_every=1) for _ in range(2)]
    models, optimizers = zip(*pairs, strict=True)

    def new_gradients(factor):
        parameters = [p for model in models for p in model.parameters()]
        if by == "backward":
            models[0].zero_grad()
            models[1].zero_grad()
            sum(factor * p.sum() for p in parameters).backward()
        else:
            for p in parameters:
                p.grad = torch.full_like(p, factor)
            for model in models:
                hvkit.reduce_gradients(model)

    for step in range(4):
        if step == 1:
            optimizers[0].param_groups[0]["lr"] += hvkit.rank() == 1
            assert raised_everywhere(lambda: new_gradients(7), "learning rate")
            optimizers[0].param_groups[0]["lr"] -= hvkit.rank() == 1
            continue
        new_gradients(step + hvkit.rank())
        assert hold_the_mean(models, step)
        for optimizer in optimizers:
            optimizer.step()


def test_reduce_gradients_mends_what_was_changed_too_early():
    model, optimizer = distributed(of_rate_1, of_two_dtypes(), accumulate=2, check_every=1)
    for step in range(4):
        optimizer.zero_grad()
        sum((step + hvkit.rank()) * p.sum() for p in model.parameters()).backward()
        if step == 1:
            for p in model.parameters():
                p.grad.mul_(2)
            text = "hvkit.reduce_gradients(model)"
            assert raised_everywhere(optimizer.step, text, kind=ValueError)
            for p in model.parameters():
                p.grad.div_(2)
        hvkit.reduce_gradients(model)
        assert hold_the_mean([model], step)
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        sgd,
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
        lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "LBFGS", "LBFGS with line search"],
)
def test_a_closure_passed_to_step(make):
    # A line search amplifies rounding, because it compares losses to decide how far to go.
    data, steps = regression(steps=3), train_with_closure
    assert equals_one_process(make, steps=steps, data=data, within=1e-3)


def test_a_step_inside_backward_is_refused():
    model, optimizer = distributed()
    model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(ValueError, match="call it after backward"):
        model(torch.ones(2, 8)).sum().backward()
