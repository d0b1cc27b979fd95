"""Backward passes and what follows before the step: accumulation, clipping, scaling, closures."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import MORE
from ranks import error_of, largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch_nets import arrays, local, mean_over_ranks, mlp, regression, train, train_with_closure

import hvkit
from hvkit.frameworks.pytorch.gradients.buckets import Bucket
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressedBucket


@pytest.mark.parametrize("passed", [True, False], ids=["accumulate=k", "not passed"])
def test_accumulation_equals_the_k_times_larger_batch(passed):
    k = 4
    data = regression(steps=5, per_rank=3 * k)
    reference = mlp()
    train(reference, torch.optim.Adam(reference.parameters(), lr=0.01), data)

    model = mlp()
    model, optimizer = hvkit.distribute(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        lr_scaling="none",
        accumulate=k if passed else 1,
    )
    for x, y in local(data):
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(k), y.chunk(k), strict=True):
            (F.mse_loss(model(part_x), part_y) / k).backward()
        optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


@pytest.fixture
def launches(monkeypatch):
    """The names of the buckets that this rank has sent."""
    names = []
    for kind in Bucket, CompressedBucket:

        def launch(self, wire, launch=kind.launch):
            names.append(self.name)
            launch(self, wire)

        monkeypatch.setattr(kind, "launch", launch)
    return names


def test_accumulation_reduces_once_in_k_passes(launches):
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=3
    )
    for i, (x, y) in enumerate(local(regression(steps=6))):
        F.mse_loss(model(x), y).backward()
        if i % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    assert len(launches) == 2


def test_a_shorter_last_accumulation_is_reduced_by_the_step():
    data = regression(steps=2)
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4
    )
    for x, y in local(data):
        F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert same_on_all_ranks(arrays(model.parameters()))
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])


@MORE
def test_a_compiled_function_may_call_backward():
    def steps(model, optimizer, data):
        @torch.compile(backend="eager")
        def step(x, y):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        for x, y in data:
            step(x, y)

    data = regression(steps=3)
    reference = mlp()
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp()
    steps(*hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1)), local(data))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-6


def test_gradients_that_a_step_reduces_are_views_of_the_bucket():
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4
    )
    (x, y), *_ = local(regression(steps=1))
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1


def test_gradients_that_a_step_reduces_keep_their_graph():
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=4
    )
    (x, y), *_ = local(regression(steps=1))
    F.mse_loss(model(x), y).backward(create_graph=True)
    graphs = [p.grad.grad_fn for p in model.parameters()]
    assert None not in graphs
    optimizer.step()
    assert [p.grad.grad_fn for p in model.parameters()] == graphs
    assert same_on_all_ranks(arrays(p.grad for p in model.parameters()))


def sharded(data):
    """A loader whose batches are this rank's parts of those of ``data``."""
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    return hvkit.shard(DataLoader(TensorDataset(x, y), batch_size=6))


def fetched_ahead(batches, depth, fetch):
    """The batches, each when those up to ``depth`` later have been fetched."""
    there, iterator = deque(), iter(batches)
    while True:
        while iterator and len(there) <= depth:
            if (batch := fetch(next, iterator, None)) is None:
                iterator = None
            else:
                there.append(batch)
        if not there:
            return
        yield there.popleft()


def accumulated(model, optimizer, batches, ends):
    for i, (x, y) in enumerate(batches):
        F.mse_loss(model(x), y).backward()
        if i in ends:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("by", ["a thread", "the loop"])
def test_batches_may_be_fetched_ahead(by):
    """Threads of different ranks are at the last batch in different passes."""
    data, ends = regression(steps=5), {3, 4, 8, 9}
    reference = mlp()
    accumulated(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data + data, ends)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, accumulate=4)
    loader = sharded(data)
    with ThreadPoolExecutor(1) as thread:
        if by == "a thread":
            depth = 0 if hvkit.rank() else 2

            def fetch(*call):
                return thread.submit(*call).result()
        else:
            depth = 1

            def fetch(function, *arguments):
                return function(*arguments)

        batches = (b for _ in range(2) for b in fetched_ahead(loader, depth, fetch))
        accumulated(model, optimizer, batches, ends)
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_a_loader_that_rests_at_its_last_batch_leaves_accumulation_on(launches):
    data = regression(steps=8)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer, accumulate=2)
    resting = iter(sharded(data[:2]))
    assert len([next(resting), next(resting)]) == 2
    accumulated(model, optimizer, local(data), {1, 3, 5, 7})
    # Both passes of the first window, and the last of the other three.
    assert len(launches) == 5


def test_clipping_acts_on_the_mean():
    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(model(x), 100 * y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    data = regression(steps=8)
    reference = mlp()
    steps(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp()
    model, optimizer = hvkit.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lr_scaling="none"
    )
    steps(model, optimizer, local(data))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    model = mlp()
    model, optimizer = hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step, (x, y) in enumerate(local(regression(steps=4))):
        if step == 1 and hvkit.rank() == hvkit.size() - 1:
            y = y * float("inf")
        before = arrays(model.parameters())
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        changed = largest_difference(arrays(model.parameters()), before) > 0
        assert changed == (step != 1)
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert same_on_all_ranks(arrays(model.parameters()))


@pytest.mark.parametrize("compiled_first", [True, False])
def test_compiled_models(compiled_first):
    data = regression(steps=5)
    reference = mlp()
    train(reference, torch.optim.SGD(reference.parameters(), lr=0.1), data)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compiled_first:
        compiled, _ = hvkit.distribute(
            torch.compile(model, backend="aot_eager"), optimizer, lr_scaling="none"
        )
    else:
        hvkit.distribute(model, optimizer, lr_scaling="none")
        compiled = torch.compile(model, backend="aot_eager")
    train(compiled, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


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

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 8, dtype=dtype))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            F.mse_loss(forward(model, x.clone().requires_grad_()), y).backward()
            optimizer.step()

    data = regression(steps=6)
    reference, optimizer = make()
    steps(reference, optimizer, data)
    model, optimizer = hvkit.distribute(*make(), lr_scaling="none")
    steps(model, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5


class Skipping(nn.Module):
    """Each rank leaves out a layer of its own; each layer is a segment, maybe within another."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.use_reentrant = use_reentrant

    def segment(self, layer, inner=None):
        def run(x):
            x = torch.tanh(layer(x))
            return x if inner is None else checkpoint(inner, x, use_reentrant=self.use_reentrant)

        return run

    def forward(self, x, skipped):
        inner = self.segment(self.layers[3])
        for i, layer in enumerate(self.layers[:3]):
            if i != skipped:
                run = self.segment(layer, inner if i == 1 else None)
                x = checkpoint(run, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("options", [{}, {"compression": hvkit.TopK(0.5)}], ids=["plain", "topk"])
def test_checkpointed_segments_are_no_passes_of_their_own(options, launches):
    found = []
    for use_reentrant in True, False:
        torch.manual_seed(0)
        model = Skipping(use_reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        hvkit.distribute(model, optimizer, accumulate=2, **options)
        launches.clear()
        for i, (x, _) in enumerate(local(regression(steps=6))):
            model(x.requires_grad_(), skipped=hvkit.rank() % 3).square().sum().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append((len(launches), arrays(model.parameters())))
    (one, nested), (other, plain) = found
    assert one == other
    assert largest_difference(nested, plain) < 1e-6
    assert same_on_all_ranks(nested)


def test_a_segment_that_fails_leaves_no_pass_behind():
    (x, y), *_ = local(regression(steps=1))
    model = mlp()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def fails(gradient):
        raise RuntimeError("out of memory, say")

    def segment(x):
        x = model[0](x)
        if x.requires_grad:  # computed again, in the backward pass
            x.register_hook(fails)
        return model[2](x)

    with pytest.raises(RuntimeError, match="out of memory"):
        F.mse_loss(checkpoint(segment, x.requires_grad_(), use_reentrant=True), y).backward()
    model.zero_grad()
    F.mse_loss(model(x), y).backward()
    assert same_on_all_ranks([p.grad.numpy() for p in model.parameters()])


def test_a_backward_pass_that_failed_leaves_nothing_behind():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("out of memory, say")

    x, y = local(regression(steps=1))[0]
    model = mlp()
    hvkit.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="out of memory"):
        F.mse_loss(model[2](Fails.apply(torch.tanh(model[0](x)))), y).backward()
    model.zero_grad(set_to_none=False)
    F.mse_loss(model[0](x)[:, :4], y).backward()
    alone = mlp()
    F.mse_loss(alone[0](x)[:, :4], y).backward()
    for p, q in zip(model[0].parameters(), alone[0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, mean_over_ranks(q.grad))
    for p in model[2].parameters():
        assert torch.equal(p.grad, torch.zeros_like(p))


def of_two_dtypes():
    """Whose gradients travel in two buckets."""
    return nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3).double()])


def with_another_rate_on_rank_1(optimizer, call):
    """The class of the error that ``call`` raises."""
    optimizer.param_groups[0]["lr"] += hvkit.rank() == 1
    kind, text = error_of(call)
    optimizer.param_groups[0]["lr"] -= hvkit.rank() == 1
    assert "learning rate" in text
    return kind


def test_gradients_set_after_an_error_of_all_ranks_are_averaged_anew():
    model = of_two_dtypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvkit.distribute(model, optimizer, check_every=1)
    for step in range(4):
        for p in model.parameters():
            p.grad = torch.full_like(p, step + hvkit.rank())
        if step == 1:
            kind = with_another_rate_on_rank_1(optimizer, lambda: hvkit.reduce_gradients(model))
            assert kind is hvkit.RanksDisagreeError
            continue
        hvkit.reduce_gradients(model)
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, step + (hvkit.size() - 1) / 2))
        optimizer.step()


def test_a_pass_after_an_error_of_all_ranks_averages_the_gradients_of_all_its_models():
    models = [of_two_dtypes(), of_two_dtypes()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        hvkit.distribute(model, optimizer, check_every=1)

    def backward(factor):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(factor * p.sum() for model in models for p in model.parameters()).backward()

    for step in range(4):
        if step == 1:
            kind = with_another_rate_on_rank_1(optimizers[0], lambda: backward(7))
            assert kind is hvkit.RanksDisagreeError
            continue
        backward(step + hvkit.rank())
        for p in (p for model in models for p in model.parameters()):
            assert torch.equal(p.grad, torch.full_like(p, step + (hvkit.size() - 1) / 2))
        for optimizer in optimizers:
            optimizer.step()


def test_reduce_gradients_mends_what_was_changed_too_early():
    model = of_two_dtypes()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    hvkit.distribute(model, optimizer, accumulate=2, check_every=1)
    for step in range(4):
        optimizer.zero_grad()
        sum((step + hvkit.rank()) * p.sum() for p in model.parameters()).backward()
        if step == 1:
            for p in model.parameters():
                p.grad.mul_(2)
            kind, text = error_of(optimizer.step)
            assert kind is ValueError
            assert "hvkit.reduce_gradients(model)" in text
            for p in model.parameters():
                p.grad.div_(2)
        hvkit.reduce_gradients(model)
        for p in model.parameters():
            assert torch.equal(p.grad, torch.full_like(p, step + (hvkit.size() - 1) / 2))
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=5),
        lambda p: torch.optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    ],
    ids=["SGD", "LBFGS", "LBFGS with line search"],
)
def test_a_closure_passed_to_step(make):
    data = regression(steps=3)

    reference = mlp()
    train_with_closure(reference, make(reference.parameters()), data)
    model = mlp()
    model, optimizer = hvkit.distribute(model, make(model.parameters()), lr_scaling="none")
    train_with_closure(model, optimizer, local(data))
    assert same_on_all_ranks(arrays(model.parameters()))
    # A line search amplifies rounding, because it compares losses to decide how far to go.
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-3


def test_a_step_inside_backward_is_refused():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hvkit.distribute(model, optimizer)
    model[0].weight.register_post_accumulate_grad_hook(lambda p: optimizer.step())
    with pytest.raises(ValueError, match="call it after backward"):
        model(torch.ones(2, 8)).sum().backward()
