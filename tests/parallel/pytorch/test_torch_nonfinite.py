"""PyTorch: gradients with NaN or infinite values stop all ranks, or skip a step on all."""

import numpy as np
import pytest
import torch
from ranks import identical, shared_folder
from torch.nn import functional as F
from torch_nets import (
    alike,
    arrays,
    backward,
    local,
    mlp,
    raised_everywhere,
    regression,
    sgd,
    weights,
)
from torch_nets import distributed as distributed_model

import hvkit
from hvkit.sync.port import skipped_steps
from hvkit.watch import calls


@pytest.fixture(autouse=True)
def _resumed_after_step_100(monkeypatch):
    monkeypatch.setattr(calls, "_resumed", 100)


def distributed(action, make=sgd, model=None, **options):
    return distributed_model(make, model, on_nonfinite=action, **options)


def step(model, optimizer, batch, *, bad=False):
    x, y = batch
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward(torch.tensor(float("nan") if bad else 1.0))
    optimizer.step()


class InTwoParts(torch.optim.SGD):
    """Goes on with the gradients after the step of its parent class."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p -= 0.01 * p.grad


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (sgd, {}),
        (sgd, {"compression": "bf16"}),
        (adam, {"strategy": hvkit.ShardedOptimizer()}),
        (adam, {}),
        (lambda p: InTwoParts(p, 0.1), {}),
    ],
)
def test_a_step_that_is_skipped_changes_nothing(make, options, capsys):
    model, optimizer = distributed("skip", make, **options)
    twin, plain = distributed("ignore", make, **options)
    for number, batch in enumerate(local(regression(steps=5))):
        bad = number == 2
        step(model, optimizer, batch, bad=bad and hvkit.rank() == 1)
        if bad:
            assert all(p.grad is not None for p in model.parameters())
        else:
            step(twin, plain, batch)
    assert identical(weights(model), weights(twin))
    assert alike(model)
    logged = capsys.readouterr().err
    expected = "skipped step 103: rank 1 has a NaN or infinite gradient of parameters 0.weight, "
    assert (expected in logged) == (hvkit.rank() == 0)


def test_a_step_with_a_closure_is_skipped_too():
    model, optimizer = distributed("skip")
    x, y = local(regression(steps=1))[0]

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward(torch.tensor(float("nan") if hvkit.rank() == 1 else 1.0))
        return loss

    before = weights(model)
    optimizer.step(closure)
    assert identical(weights(model), before)


class TwoPasses(torch.optim.Optimizer):
    """Computes gradients in its own step, and lets another optimizer make the update."""

    def __init__(self, parameters):
        self.base = sgd(parameters)
        self.param_groups = self.base.param_groups
        super().__init__(self.param_groups, {})

    def step(self):
        for number in range(2):
            self.zero_grad()
            self.loss_of_pass(number).backward()
        self.base.step()


def test_gradients_that_a_step_computes_itself_are_skipped():
    data, found = local(regression(steps=3)), []
    for action, steps in (("skip", [0, 1, 2]), ("ignore", [0, 2])):
        model, optimizer = distributed(action, TwoPasses)
        for at in steps:
            bad = at == 1 and hvkit.rank() == 1

            def loss_of_pass(number, model=model, batch=data[at], bad=bad):
                loss = F.mse_loss(model(batch[0]), batch[1])
                return loss * (float("nan") if bad and number else 1.0)

            optimizer.loss_of_pass = loss_of_pass
            optimizer.step()
        assert alike(model)
        found.append(weights(model))
    assert identical(*found)


def before_it_is_averaged(parameter, change):
    """Let autograd change this rank's own gradient; a hook on the parameter would get the mean."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(lambda gradients: tuple(map(change, gradients)))
    nodes.append(node)


nodes = []


def test_stop_names_rank_and_parameter_on_every_rank():
    model, optimizer = distributed("stop")
    data = local(regression(steps=2))
    step(model, optimizer, data[0])
    if hvkit.rank() == 1:
        before_it_is_averaged(model[2].bias, lambda gradient: gradient * float("inf"))
    text = "in step 102: rank 1 has a NaN or infinite gradient of parameter 2.bias"
    kind = FloatingPointError
    assert raised_everywhere(lambda: step(model, optimizer, data[1]), text, kind=kind)


def test_row_sparse_gradients_are_looked_at():
    model, _ = distributed("stop", model=torch.nn.Embedding(10, 3, sparse=True))
    loss = model(torch.tensor([1, 4])).sum() * (float("nan") if hvkit.rank() == 1 else 1.0)
    with pytest.raises(FloatingPointError, match=r"rank 1 has a NaN .* of parameter weight"):
        loss.backward()


def test_large_gradients_are_finite():
    model, _ = distributed("stop")
    for p in model.parameters():
        before_it_is_averaged(p, lambda g: torch.full_like(g, 3e38 / hvkit.size()))
    model(torch.ones(2, 8)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 3}, {"strategy": hvkit.ShardedOptimizer()}], ids=str
)
def test_a_step_kept_from_before_the_call_that_fails_once_is_still_averaged(options):
    class Fails(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            if self.fails:
                self.fails = False
                raise MemoryError
            return super().step(closure)

    model = mlp()
    optimizer = Fails(model.parameters(), 0.1)
    kept = optimizer.step
    hvkit.distribute(model, optimizer, **options)
    for number, batch in enumerate(local(regression(steps=5))):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.fails = number == 1
        if optimizer.fails:
            with pytest.raises(MemoryError):
                kept()
        kept()
    assert alike(model)


def with_batch_norm():
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)
    return torch.nn.Sequential(*layers)


def statistics(model):
    return arrays([model[1].running_mean, model[1].running_var])


@pytest.mark.parametrize("batch_norm", ["average", "sync", "local"])
def test_statistics_of_batch_norm_survive_a_skipped_step(batch_norm):
    model, optimizer = distributed("skip", model=with_batch_norm(), batch_norm=batch_norm)
    for number, (x, y) in enumerate(local(regression(steps=4))):
        before = statistics(model)
        bad = number in (0, 2)
        if bad and hvkit.rank() == 1:
            x = x * float("nan")
        step(model, optimizer, (x, y))
        if bad and (hvkit.rank() == 1 or batch_norm != "local"):
            assert identical(statistics(model), before)
    assert all(np.isfinite(each).all() for each in statistics(model))


def test_statistics_that_a_checkpoint_has_brought_survive_a_skipped_step(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    *data, (x, y) = local(regression(steps=3))

    def begin():
        model, optimizer = distributed("skip", model=with_batch_norm())
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    model, optimizer, checkpoint = begin()
    for batch in data:
        step(model, optimizer, batch)
    checkpoint.save(epoch=0, step=2)
    kept = statistics(model)
    model, optimizer, checkpoint = begin()
    checkpoint.restore()
    step(model, optimizer, (x * float("nan"), y))
    assert identical(statistics(model), kept)


class Discriminator(torch.nn.Linear):
    pass


def test_only_steps_that_an_optimizer_would_have_taken_are_skipped(capsys):
    """The discriminator of a GAN: three backward passes, the last of them for the generator."""
    torch.manual_seed(0)
    generator, of_generator = distributed("skip", model=torch.nn.Linear(4, 8))
    model, optimizer = distributed("skip", model=Discriminator(8, 1))
    skipped = skipped_steps.number
    for number in range(3):
        real, noise = torch.randn(6, 8), torch.randn(6, 4)
        if number == 1 and hvkit.rank() == 1:
            real[0, 0] = float("nan")
        optimizer.zero_grad()
        model(real).mean().backward()
        made = generator(noise)
        (-model(made.detach()).mean()).backward()
        optimizer.step()
        of_generator.zero_grad()
        model(made).mean().backward()
        of_generator.step()
    assert skipped_steps.number == skipped + 1
    lines = [line for line in capsys.readouterr().err.splitlines() if "skipped" in line]
    found = "rank 1 has a NaN or infinite gradient of parameter weight"
    said = [f"hvkit: skipped step 102 of Discriminator: {found}"]
    assert lines == (said if hvkit.rank() == 0 else [])


def test_gradients_that_are_never_set_to_zero_are_named(capsys):
    model, optimizer = distributed("skip")
    for number, (x, y) in enumerate(local(regression(steps=3))):
        bad = number == 1 and hvkit.rank() == 1
        F.mse_loss(model(x), y).backward(torch.tensor(float("nan") if bad else 1.0))
        optimizer.step()
    left = "still hold NaN or infinite values of an earlier step: call zero_grad() in each step"
    assert (left in capsys.readouterr().err) == (hvkit.rank() == 0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"action": "drop"}, "on_nonfinite must be one of .*got 'drop'"),
        ({"action": "skip", "strategy": hvkit.LocalSGD(2)}, "not averaged as a whole"),
        ({"action": "stop", "strategy": hvkit.FullyShard()}, "not averaged as a whole"),
        ({"action": "skip", "compression": hvkit.TopK(0.1)}, "would keep NaN"),
        ({"action": "skip", "make": torch.optim.LBFGS}, "LBFGS"),
    ],
)
def test_options_that_cannot_be_checked_are_refused(options, text):
    with pytest.raises(ValueError, match=text):
        distributed(**options)


def test_a_loss_scale_which_skips_steps_itself_is_refused():
    model, optimizer = distributed("stop")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = local(regression(steps=1))[0]
    scaler.scale(F.mse_loss(model(x), y)).backward()
    with pytest.raises(ValueError, match="GradScaler skips"):
        scaler.step(optimizer)
