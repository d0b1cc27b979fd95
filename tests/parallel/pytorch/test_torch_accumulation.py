"""Gradients that several backward passes add up, and windows that end early."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch_nets import (
    alike,
    alike_gradients,
    arrays,
    backward,
    distributed,
    equals_one_process,
    local,
    mlp,
    raised_everywhere,
    regression,
    weights,
)

import hvkit
from hvkit.frameworks.pytorch.gradients.bucket_layout import CompressedBucket
from hvkit.frameworks.pytorch.gradients.buckets import Bucket


def plain(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize("passed", [True, False], ids=["accumulate=k", "not passed"])
def test_accumulation_equals_the_k_times_larger_batch(passed):
    k = 4

    def steps(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            for part_x, part_y in zip(x.chunk(k), y.chunk(k), strict=True):
                (F.mse_loss(model(part_x), part_y) / k).backward()
            optimizer.step()

    data, accumulate = regression(steps=5, per_rank=3 * k), k if passed else 1
    assert equals_one_process(torch.optim.Adam, steps=steps, data=data, accumulate=accumulate)


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


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def no_change(model):
    """Neither clips nor ends a window."""


def windows(model, optimizer, batches, ends, before_step=clip, scaler=None):
    """Accumulate over batches, and step after those in ``ends``."""
    for i, (x, y) in enumerate(batches):
        loss = F.mse_loss(model(x), 10 * y)
        (scaler.scale(loss) if scaler else loss).backward()
        if i in ends:
            if scaler:
                scaler.unscale_(optimizer)
            before_step(model)
            scaler.step(optimizer) if scaler else optimizer.step()
            if scaler:
                scaler.update()
            optimizer.zero_grad()


def equals_windows_of_one_process(data, ends, batches, accumulate=4, before_step=clip):
    reference = mlp()
    own = before_step if before_step is no_change else clip
    windows(reference, plain(reference.parameters()), data, ends, own)
    model, optimizer = distributed(plain, accumulate=accumulate)
    windows(model, optimizer, batches, ends, before_step)
    assert alike(model)
    assert largest_difference(weights(model), weights(reference)) < 1e-5
    return True


def test_accumulation_reduces_once_in_k_passes(launches):
    windows(*distributed(accumulate=3), local(regression(steps=6)), {2, 5})
    assert len(launches) == 2


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_shorter_last_accumulation_is_reduced_by_the_step(create_graph):
    """Into the bucket's own memory, unless the script has a graph of the gradients."""
    model, optimizer = distributed(accumulate=4)
    for x, y in local(regression(steps=2)):
        F.mse_loss(model(x), y).backward(create_graph=create_graph)
    graphs = [p.grad.grad_fn for p in model.parameters()]
    optimizer.step()
    assert same_on_all_ranks(weights(model))
    assert alike_gradients(model)
    assert [p.grad.grad_fn for p in model.parameters()] == graphs
    assert (None in graphs) == (not create_graph)
    memory = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    assert (len(memory) == 1) == (not create_graph)


def test_clipping_in_a_short_window_is_an_error_unless_the_window_is_ended():
    data, ends = regression(steps=6), {3, 5}
    model, optimizer = distributed(plain, accumulate=4)
    windows(model, optimizer, local(data[:4]), ends)
    between = weights(model)
    assert raised_everywhere(
        lambda: windows(model, optimizer, local(data[4:]), {1}),
        "accumulate=4 averages once in 4 passes",
        "hvkit.reduce_gradients(model)",
        kind=ValueError,
    )
    assert largest_difference(weights(model), between) == 0

    def end_and_clip(model):
        hvkit.reduce_gradients(model)
        clip(model)

    assert equals_windows_of_one_process(data, ends, local(data), before_step=end_and_clip)


@pytest.mark.parametrize("closures", [False, True])
def test_a_closure_may_end_a_short_window(closures):
    """Rank 0 has no gradients in the last pass."""
    data = local(regression(steps=3))
    model, optimizer = distributed(plain, accumulate=4)

    def last():
        loss = F.mse_loss(model(data[2][0]), data[2][1])
        if hvkit.rank() or not closures:
            loss.backward()
        return loss

    for batch in data[:2] if not closures else data[:2][: 2 * hvkit.rank()]:
        backward(model, batch)
    optimizer.step(last)
    assert alike(model)
    assert alike_gradients(model)


def test_an_overflow_on_one_rank_in_a_short_window_skips_the_step_on_all():
    model, optimizer = distributed(plain, accumulate=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    data = local(regression(steps=6))
    windows(model, optimizer, data[:4], {3}, scaler=scaler)
    before = weights(model)
    x, y = data[5]
    last = data[4], (x, y * float("inf") if hvkit.rank() else y)
    windows(model, optimizer, last, {1}, scaler=scaler)
    assert largest_difference(weights(model), before) == 0
    assert hvkit.allgather(scaler.get_scale()) == [512.0] * hvkit.size()
    windows(model, optimizer, data[:4], {3}, scaler=scaler)
    assert alike(model)


def sharded(data, batch_size=6):
    """A loader whose batches are this rank's parts of those of ``data``."""
    x, y = (torch.cat(each) for each in zip(*data, strict=True))
    return hvkit.shard(DataLoader(TensorDataset(x, y), batch_size=batch_size))


@pytest.mark.parametrize("ends", [{3, 5, 9, 11}, {3, 7, 11}], ids=["epochs", "over epochs"])
def test_windows_over_a_sharded_loader_may_end_with_the_epoch(ends):
    data = regression(steps=6)
    loader = sharded(data)
    batches = (batch for _ in range(2) for batch in loader)
    assert equals_windows_of_one_process(data + data, ends, batches)


def test_passes_over_parts_of_the_last_batch_may_end_a_short_window():
    def parts(data):
        for x, y in data:
            yield from zip(x.chunk(2), y.chunk(2), strict=True)

    data = regression(steps=3, per_rank=12)
    assert equals_windows_of_one_process(parts(data), {3, 5}, parts(sharded(data, 12)))


@pytest.mark.parametrize("done", [2, 4])
def test_the_rest_of_an_epoch_may_end_with_a_short_window(done):
    """Also if it is one batch."""
    data = regression(steps=5)
    loader = sharded(data)
    loader.load_state_dict({"epoch": 1, "samples": 6 * hvkit.size() * done})
    ends = set(range(1, 5 - done, 2)) | {4 - done}
    assert equals_windows_of_one_process(data[done:], ends, loader, accumulate=2)


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


@pytest.mark.parametrize("by", ["a thread", "the loop"])
def test_batches_may_be_fetched_ahead(by):
    """Threads of different ranks are at the last batch in different passes."""
    data, ends = regression(steps=5), {3, 4, 8, 9}
    loader = sharded(data)
    with ThreadPoolExecutor(1) as thread:

        def fetch(*call):
            return thread.submit(*call).result() if by == "a thread" else call[0](*call[1:])

        depth = 1 if by == "the loop" else 0 if hvkit.rank() else 2
        batches = (b for _ in range(2) for b in fetched_ahead(loader, depth, fetch))
        # Who clips would have to end the last window, since not all ranks know that it is.
        assert equals_windows_of_one_process(data + data, ends, batches, before_step=no_change)


def test_a_loader_that_rests_at_its_last_batch_leaves_accumulation_on(launches):
    data = regression(steps=8)
    model, optimizer = distributed(accumulate=2)
    resting = iter(sharded(data[:2]))
    assert len([next(resting), next(resting)]) == 2
    windows(model, optimizer, local(data), {1, 3, 5, 7})
    # Both passes of the first window, and the last of the other three.
    assert len(launches) == 5


class Skipping(nn.Module):
    """Each rank leaves out a layer of its own; each layer is a segment, maybe within another."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
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
        model, optimizer = distributed(plain, Skipping(use_reentrant), accumulate=2, **options)
        launches.clear()
        for i, (x, _) in enumerate(local(regression(steps=6))):
            model(x.requires_grad_(), skipped=hvkit.rank() % 3).square().sum().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
        found.append((len(launches), weights(model)))
    (one, nested), (other, flat) = found
    assert one == other
    assert largest_difference(nested, flat) < 1e-6
    assert same_on_all_ranks(nested)


def test_gradients_that_the_script_holds_become_the_means():
    model, _ = distributed(accumulate=2)
    batch = local(regression(steps=1))[0]
    backward(model, batch)
    held = [p.grad for p in model.parameters()]
    backward(model, batch)
    assert same_on_all_ranks(arrays(held))
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
