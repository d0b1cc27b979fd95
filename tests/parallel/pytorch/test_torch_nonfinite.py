"""PyTorch: gradients with NaN or infinite values stop all ranks, or skip a step on all."""

import numpy as np
import pytest
import torch
from ranks import error_of, shared_folder
from torch.nn import functional as F
from torch_nets import alike, arrays, local, mlp, regression, sgd

import hvkit
from hvkit.sync.nonfinite import skipped_steps
from hvkit.watch import calls


@pytest.fixture(autouse=True)
def _resumed_after_step_100(monkeypatch):
    monkeypatch.setattr(calls, "_resumed", 100)


def distributed(action, make=sgd, model=None, **options):
    model = model or mlp()
    optimizer = make(model.parameters())
    return hvkit.distribute(model, optimizer, on_nonfinite=action, **options)


def step(model, optimizer, x, y, *, bad=False):
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward(torch.tensor(float("nan") if bad else 1.0))
    optimizer.step()


def adam(parameters):
    return torch.optim.Adam(parameters, 0.01)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(
    "options", [{}, {"compression": "bf16"}, {"strategy": hvkit.ShardedOptimizer()}]
)
def test_a_step_that_is_skipped_changes_nothing(make, options, capsys):
    model, optimizer = distributed("skip", make, **options)
    twin, plain = distributed("ignore", make, **options)
    for number, (x, y) in enumerate(local(regression(steps=5))):
        bad = number == 2
        step(model, optimizer, x, y, bad=bad and hvkit.rank() == 1)
        if not bad:
            step(twin, plain, x, y)
    assert all(map(np.array_equal, arrays(model.parameters()), arrays(twin.parameters())))
    assert alike(model)
    logged = capsys.readouterr().err
    expected = "skipped step 103: rank 1 has a NaN or infinite gradient of parameters 0.weight, "
    assert (expected in logged) == (hvkit.rank() == 0)


def before_it_is_averaged(parameter, change):
    """Let autograd change this rank's own gradient; a hook on the parameter would get the mean."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    node.register_prehook(lambda gradients: tuple(map(change, gradients)))
    nodes.append(node)


nodes = []


def test_stop_names_rank_and_parameter_on_every_rank():
    model, optimizer = distributed("stop")
    data = local(regression(steps=2))
    step(model, optimizer, *data[0])
    if hvkit.rank() == 1:
        before_it_is_averaged(model[2].bias, lambda gradient: gradient * float("inf"))
    error, text = error_of(lambda: step(model, optimizer, *data[1]))
    assert error is FloatingPointError
    assert text == "in step 102: rank 1 has a NaN or infinite gradient of parameter 2.bias"


class InTwoParts(torch.optim.SGD):
    """Goes on with the gradients after the step of its parent class."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    p -= 0.01 * p.grad


def test_a_step_of_two_parts_is_skipped_as_a_whole():
    model, optimizer = distributed("skip", lambda parameters: InTwoParts(parameters, 0.1))
    data = local(regression(steps=2))
    step(model, optimizer, *data[0])
    before = arrays(model.parameters())
    step(model, optimizer, *data[1], bad=hvkit.rank() == 1)
    assert all(map(np.array_equal, arrays(model.parameters()), before))


def test_row_sparse_gradients_are_looked_at():
    model = torch.nn.Embedding(10, 3, sparse=True)
    distributed("stop", model=model)
    weight = torch.tensor(float("nan") if hvkit.rank() == 1 else 1.0)

    def backward():
        (model(torch.tensor([1, 4])).sum() * weight).backward()

    error, text = error_of(backward)
    assert error is FloatingPointError
    assert "rank 1 has a NaN or infinite gradient of parameter weight" in text


def test_large_gradients_are_finite():
    model, optimizer = distributed("stop", model=mlp().requires_grad_(True))
    for p in model.parameters():
        before_it_is_averaged(p, lambda g: torch.full_like(g, 3e38 / hvkit.size()))
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


class TwoPasses(torch.optim.Optimizer):
    """Computes gradients in its own step, and lets another optimizer make the update."""

    def __init__(self, base, forward):
        super().__init__([p for group in base.param_groups for p in group["params"]], {})
        self.base, self.forward = base, forward
        self.param_groups = base.param_groups

    def step(self):
        for number in range(2):
            self.zero_grad()
            self.forward(number).backward()
        self.base.step()


def test_gradients_that_a_step_computes_itself_are_skipped():
    found = []
    for bad in (1, None):
        model, steps = mlp(), []

        def forward(number, model=model, bad=bad, steps=steps):
            x, y = local(regression(steps=3))[len(steps)]
            nan = number == 1 and len(steps) == bad and hvkit.rank() == 1
            return F.mse_loss(model(x), y) * (float("nan") if nan else 1.0)

        optimizer = TwoPasses(sgd(model.parameters()), forward)
        hvkit.distribute(model, optimizer, on_nonfinite="skip")
        for number in range(3):
            if bad is not None or number != 1:
                optimizer.step()
            steps.append(number)
        assert alike(model)
        found.append(arrays(model.parameters()))
    assert all(map(np.array_equal, *found))


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
    for number, (x, y) in enumerate(local(regression(steps=5))):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.fails = number == 1
        if optimizer.fails:
            with pytest.raises(MemoryError):
                kept()
        kept()
    assert alike(model)


def test_gradients_stay_readable_after_a_skipped_step():
    model, optimizer = distributed("skip")
    step(model, optimizer, *local(regression(steps=1))[0], bad=True)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("batch_norm", ["average", "sync", "local"])
def test_statistics_of_batch_norm_survive_a_skipped_step(batch_norm):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    model, optimizer = distributed("skip", model=net, batch_norm=batch_norm)
    statistics = model[1].running_mean, model[1].running_var
    for number, (x, y) in enumerate(local(regression(steps=4))):
        before = arrays(statistics)
        bad = number in (0, 2)
        if bad and hvkit.rank() == 1:
            x = x * float("nan")
        step(model, optimizer, x, y)
        if bad and (hvkit.rank() == 1 or batch_norm != "local"):
            assert all(map(np.array_equal, arrays(statistics), before))
    assert all(torch.isfinite(each).all() for each in statistics)


def test_statistics_that_a_checkpoint_has_brought_survive_a_skipped_step(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    data = local(regression(steps=3))

    def begin():
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        model, optimizer = distributed("skip", model=net)
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    torch.manual_seed(0)
    model, optimizer, checkpoint = begin()
    for x, y in data[:2]:
        step(model, optimizer, x, y)
    checkpoint.save(epoch=0, step=2)
    kept = arrays([model[1].running_mean, model[1].running_var])
    model, optimizer, checkpoint = begin()
    checkpoint.restore()
    x, y = data[2]
    step(model, optimizer, x * float("nan"), y)
    assert all(map(np.array_equal, arrays([model[1].running_mean, model[1].running_var]), kept))


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
    model, optimizer = distributed("skip", model=torch.nn.Linear(8, 4))
    for number, (x, y) in enumerate(local(regression(steps=3))):
        bad = number == 1 and hvkit.rank() == 1
        F.mse_loss(model(x), y).backward(torch.tensor(float("nan") if bad else 1.0))
        optimizer.step()
    printed = capsys.readouterr().err
    left = "still hold NaN or infinite values of an earlier step: call zero_grad() in each step"
    assert (left in printed) == (hvkit.rank() == 0)


def test_a_step_with_a_closure_is_skipped_too():
    model, optimizer = distributed("skip")
    x, y = local(regression(steps=1))[0]

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward(torch.tensor(float("nan") if hvkit.rank() == 1 else 1.0))
        return loss

    before = arrays(model.parameters())
    optimizer.step(closure)
    assert all(map(np.array_equal, arrays(model.parameters()), before))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_nonfinite": "drop"}, "on_nonfinite must be one of .*got 'drop'"),
        ({"on_nonfinite": "skip", "strategy": hvkit.LocalSGD(2)}, "not averaged as a whole"),
        ({"on_nonfinite": "stop", "strategy": hvkit.FullyShard()}, "not averaged as a whole"),
        ({"on_nonfinite": "skip", "compression": hvkit.TopK(0.1)}, "would keep NaN"),
    ],
)
def test_what_cannot_be_checked_is_refused(options, text):
    model = mlp()
    with pytest.raises(ValueError, match=text):
        hvkit.distribute(model, sgd(model.parameters()), **options)


def test_other_ways_to_skip_are_refused():
    model = mlp()
    with pytest.raises(ValueError, match="LBFGS"):
        hvkit.distribute(model, torch.optim.LBFGS(model.parameters()), on_nonfinite="skip")
    model, optimizer = distributed("stop")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = local(regression(steps=1))[0]
    scaler.scale(F.mse_loss(model(x), y)).backward()
    with pytest.raises(ValueError, match="GradScaler skips"):
        scaler.step(optimizer)
