"""PyTorch: what the script and hvkit see of gradients in a mesh: hooks, NaN, ``hvkit.Monitor``."""

import functools
import json
import math

import numpy as np
import pytest
import torch
from cases import MORE
from mesh_models import GPT, SMALL
from mesh_training import (
    MICROBATCHES,
    adamw,
    both,
    cross_entropy,
    difference,
    differences,
    fewer_on_four,
    of_this_rank,
    tokens,
    whole_state,
    with_gradients,
)
from ranks import error_of
from torch.autograd.graph import register_multi_grad_hook

import hvkit
from hvkit.frameworks.pytorch.model_parallel.slices import local_part
from hvkit.watch.calls import of_run

pytestmark = MORE

DATA = hvkit.size() // 2
MESHES = {
    "stages": {"mesh": hvkit.Mesh(data=DATA, pipeline=2), "microbatches": MICROBATCHES},
    "1F1B": {
        "mesh": hvkit.Mesh(data=DATA, pipeline=2),
        "microbatches": MICROBATCHES,
        "schedule": "1F1B",
    },
    "tensor": {"mesh": hvkit.Mesh(data=DATA, tensor=2), "microbatches": None},
    "shards": {"mesh": hvkit.Mesh(data=DATA, shard=2), "microbatches": None},
}
# Two axes of two ranks each; PyTorch adds up the gradients of several micro-batches of a shard.
TWO_AXES = {
    "shards of stages": {"mesh": hvkit.Mesh(shard=2, pipeline=2), "microbatches": 1},
    "shards of tensors": {"mesh": hvkit.Mesh(shard=2, tensor=2), "microbatches": None},
    "tensors of stages": {
        "mesh": hvkit.Mesh(pipeline=2, tensor=2),
        "microbatches": MICROBATCHES,
    },
}
each_mesh = pytest.mark.parametrize(
    "name", fewer_on_four([pytest.param(name) for name in MESHES], ["stages", "tensor"])
)


def together(options):
    return options["mesh"].pipeline * options["mesh"].tensor


def normalise(model):
    for p in model.parameters():
        p.register_hook(lambda gradient: gradient / gradient.norm())


CASES = [(name, True) for name in MESHES] + [("1F1B", False), ("tensor", False)]
if hvkit.size() == 4:
    CASES = [("stages", True), ("tensor", False), *((name, True) for name in TWO_AXES)]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_a_hook_normalises_the_gradient_of_one_process(name, tied):
    options = (MESHES | TWO_AXES)[name]
    make = functools.partial(GPT, layers=4, tied=tied)
    options = options | {"prepare": normalise, "together": together(options)}
    assert max(differences(make, tokens(3), **options)) < 1e-11


@pytest.mark.two_ranks
def test_a_hook_on_several_divided_parameters_is_refused():
    def count(model):
        register_multi_grad_hook(list(model.parameters()), print)

    with pytest.raises(ValueError, match="would never be called"):
        differences(SMALL, tokens(1), prepare=count, together=1, **MESHES["shards"])


SPOILT = 1


def train(model, optimizer, data, *, factor=1.0, spoil=None):
    """Train with clipping; in one step the loss is multiplied, or a gradient spoilt."""
    for step, (x, y) in enumerate(data):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        (loss * factor if step == SPOILT else loss).backward()
        p = dict(model.named_parameters()).get(spoil)
        if step == SPOILT and p is not None and p.grad is not None:
            local_part(p.grad)[0] = math.nan
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@each_mesh
def test_a_skipped_step_changes_nothing_on_any_rank(name):
    options = MESHES[name]
    one, (model, optimizer) = both(SMALL, on_nonfinite="skip", **options)
    data = tokens(3)
    train(model, optimizer, of_this_rank(data, together(options)), factor=math.nan)
    train(*one, data[:SPOILT] + data[SPOILT + 1 :])
    assert difference(whole_state(model), one[0].state_dict(), with_gradients(*one)) < 1e-11


@each_mesh
def test_stop_names_the_parameter_although_clipping_spreads_it(name):
    options = MESHES[name]
    _, (model, optimizer) = both(SMALL, on_nonfinite="stop", **options)
    data = of_this_rank(tokens(3), together(options))
    kind, text = error_of(lambda: train(model, optimizer, data, spoil="ln_f.weight"))
    assert kind is FloatingPointError
    assert f"in step {of_run(SPOILT + 1)}: rank " in text
    assert text.count("parameter") == text.count("parameter ln_f.weight") > 0


CLIP = 0.5


@each_mesh
def test_a_record_has_the_norm_of_all_gradients_and_counts_each_sample_once(name, folder):
    options = MESHES[name]
    model, data, norms = SMALL(), tokens(6), []
    optimizer = adamw(model)
    with hvkit.Monitor(folder, every=2) as monitor:
        hvkit.distribute(model, optimizer, monitor=monitor, **options)
        for x, y in monitor.batches(of_this_rank(data, together(options))):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            monitor.step(loss=loss.detach())
    text = (folder / "metrics.jsonl").read_text() if hvkit.is_main() else ""
    lines = map(json.loads, hvkit.broadcast(text).splitlines())
    found = [line for line in lines if "samples_per_second" in line]
    assert [each["step"] for each in found] == [2, 4, 6]
    assert [each["gradient_norm"] for each in found] == pytest.approx(norms[1::2], rel=1e-5)
    assert min(norms) > CLIP
    applied = [each["applied_gradient_norm"] for each in found]
    assert applied == pytest.approx([CLIP] * 3, rel=1e-4)
    # Ranks need different times for equal numbers of samples: their sum is n if those times, of
    # which the record has the mean, are n / size / speed.
    speeds = [line["ranks"]["samples_per_second"] for line in found]
    times = [line["seconds"]["step"] for line in found]
    samples = [
        t * hvkit.size() / np.mean(1 / np.array(s)) for t, s in zip(times, speeds, strict=True)
    ]
    assert samples == pytest.approx([len(data[0][0])] * 3, rel=1e-6)
