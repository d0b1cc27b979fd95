"""PyTorch: ranks of a pipeline hold what they were said to hold before, and log it."""

import collections
import functools
import re
import weakref

import pytest
import torch
from cases import MORE, each_once
from mesh_models import CNN, GPT, Encoder, Llama
from mesh_training import (
    adamw,
    distributed,
    images,
    part_size,
    tokens,
    train,
    vectors,
)
from torch import nn
from torch.distributed.tensor import DTensor

import hvkit
from hvkit.frameworks.pytorch.model_parallel import memory_forecast as forecasts
from hvkit.frameworks.pytorch.model_parallel.pipeline.staged_forward import StagedForward
from hvkit.watch.spans import observe

pytestmark = MORE

LARGER = {"width": 64, "vocab": 128}
MODELS = {
    "GPT": (functools.partial(GPT, layers=4, **LARGER), tokens),
    "untied GPT": (functools.partial(GPT, layers=4, tied=False, **LARGER), tokens),
    "unfused GPT": (functools.partial(GPT, layers=4, fused=False, **LARGER), tokens),
    "Llama": (functools.partial(Llama, layers=4), tokens),
    "long GPT": (
        functools.partial(GPT, layers=4, length=128),
        functools.partial(tokens, rows=4, length=128),
    ),
    "GPT with dropout": (functools.partial(GPT, layers=4, dropout=0.1), tokens),
    "encoder": (Encoder, functools.partial(vectors, shape=(32, 20))),
    "CNN": (CNN, images),
}


class KeptActivations:
    """Counts what autograd keeps for backward in the stages of this rank, without weights.

    Attributes:
        peak: bytes at once.
    """

    def __init__(self, monkeypatch):
        self.peak, self._kept, self._weights = 0, collections.Counter(), set()
        own = StagedForward.run

        def run(staged, *args):
            with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept[0]):
                return own(staged, *args)

        monkeypatch.setattr(StagedForward, "run", run)

    def begin(self, model):
        held = (*model.parameters(), *model.buffers())
        self._weights = {t.untyped_storage().data_ptr() for t in held if not t.is_meta}
        self.peak = 0

    def _keep(self, t):
        kept, storage = Kept([t]), t.untyped_storage()
        if not t.is_meta and storage.data_ptr() not in self._weights:
            key = storage.data_ptr(), storage.nbytes()
            self._kept[key] += 1
            weakref.finalize(kept, self._kept.subtract, [key])
            self.peak = max(self.peak, sum(bytes for _, bytes in +self._kept))
        return kept


class Kept(list):
    """A tensor, until autograd needs it no longer."""


@pytest.fixture
def predicted(monkeypatch):
    """Rank 0's forecasts of all ranks of the pipeline, as they are made."""
    made = []
    own = forecasts.forecast

    def forecast(*args):
        made[:] = own(*args)
        return made

    monkeypatch.setattr(forecasts, "forecast", forecast)
    return made


def own_of(predicted):
    """This rank's forecast."""
    return hvkit.broadcast(list(predicted))[hvkit.rank()]


@pytest.mark.parametrize("make_optimizer", [adamw, "momentum", "plain"])
def test_parameters_gradients_and_state_are_exactly_those(predicted, make_optimizer):
    momentum = {"momentum": 0.9, "plain": 0.0}

    def optimizer_of(model):
        if callable(make_optimizer):
            return make_optimizer(model)
        return torch.optim.SGD(model.parameters(), 0.1, momentum=momentum[make_optimizer])

    model = GPT(layers=4)
    model.h[1].requires_grad_(False)
    model, optimizer = distributed(model, optimizer_of)
    train(model, optimizer, tokens(2))
    mine, held = own_of(predicted), [p for p in model.parameters() if not p.is_meta]
    assert mine.weights == sum(p.nbytes for p in held)
    assert mine.gradients == sum(p.grad.nbytes for p in held if p.grad is not None)
    state = [t for p in held for t in optimizer.state.get(p, {}).values()]
    assert mine.state == sum(t.nbytes for t in state if isinstance(t, torch.Tensor))


@pytest.mark.parametrize(
    ("name", "schedule"),
    [*each_once(MODELS, ["GPipe", "1F1B"]), ("GPT", "1F1B"), ("GPT", "Interleaved1F1B")],
)
def test_activations_are_those_that_autograd_keeps(predicted, monkeypatch, name, schedule):
    make, data = MODELS[name]
    kept = KeptActivations(monkeypatch)
    model, optimizer = distributed(make(), schedule=schedule)
    train(model, optimizer, data(2))  # the first one takes GPipe
    kept.begin(model)
    train(model, optimizer, data(1))
    said = own_of(predicted).activations
    if schedule == "Interleaved1F1B":  # keeps at most that
        assert 0 < kept.peak < 1.02 * said
    else:
        assert said == pytest.approx(kept.peak, rel=0.15)


@pytest.mark.parametrize(
    ("name", "within"),
    [("GPT", 0.02), ("Llama", 0.15), ("GPT with dropout", 0.02), ("encoder", 0.1)],
)
def test_ranks_that_divide_layers_hold_parts(predicted, name, within):
    mesh, (make, data) = hvkit.Mesh(tensor=2), MODELS[name]
    model, optimizer = distributed(make(), mesh=mesh, microbatches=None)
    batches, kept = data(2), {}
    train(model, optimizer, batches)

    def keep(t):
        held = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
        kept[held.data_ptr()] = held
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(batches[0][0])
    for p in model.parameters():
        kept.pop(p.untyped_storage().data_ptr(), None)
    mine = hvkit.broadcast(list(predicted))[0]
    assert mine.weights == sum(part_size(p) * p.itemsize for p in model.parameters())
    assert mine.gradients == mine.weights
    found = sum(each.nbytes() for each in kept.values())
    assert mine.activations == pytest.approx(found, rel=within)
    state = [t for each in optimizer.state.values() for t in each.values()]
    assert mine.state == sum(t.nbytes for t in state)


def test_it_is_logged(capfd, monkeypatch):
    small = forecasts.Memory(hvkit.rank(), 100_000)
    monkeypatch.setattr(forecasts, "memory_of_rank", lambda *_: small)
    capfd.readouterr()
    model, optimizer = distributed(nn.Sequential(GPT(layers=2)))
    train(model, optimizer, tokens(22, rows=4, length=4))
    logged = capfd.readouterr().err
    said = [
        r"stage 0 on rank 0: [\d.]+ MB weights .* AdamW .* activations .* outputs = [\d.]+ MB of",
        "stage 1 on rank 1: ",
        "each rank waits for other stages 20% of the time in forward and backward passes: GPipe, 4 "
        "micro-batches",
        r"rank 0 has waited for other stages \d+% of the time",
        "a training step of rank 0 needs",
    ]
    assert [bool(re.search(each, logged)) for each in said] == [hvkit.is_main()] * len(said)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_timeline_shows_the_schedule(schedule):
    model, optimizer = distributed(GPT(layers=4), schedule=schedule)
    data = tokens(2)
    train(model, optimizer, data[:1])
    seen = []
    observe(seen.append)
    try:
        train(model, optimizer, data[1:])
    finally:
        observe(seen.append, on=False)
    stage = hvkit.rank()
    shown = [s.name for s in seen if re.fullmatch(rf"(for|back)ward \d of stage {stage}", s.name)]
    order = {
        "GPipe": "f0 f1 f2 f3 b0 b1 b2 b3",
        "1F1B": "f0 b0 f1 b1 f2 b2 f3 b3" if stage else "f0 f1 b0 f2 b1 f3 b2 b3",
    }[schedule]
    names = {"f": "forward", "b": "backward"}
    assert shown == [f"{names[each[0]]} {each[1]} of stage {stage}" for each in order.split()]
