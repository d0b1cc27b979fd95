"""``on_nonfinite`` for a model of which each rank has a part."""

import math

import pytest
import torch
from cases import MORE
from mesh_models import GPT
from mesh_training import (
    MICROBATCHES,
    both,
    cross_entropy,
    difference,
    of_this_rank,
    tokens,
    whole_state,
    with_gradients,
)
from ranks import error_of

import hvkit
from hvkit.frameworks.pytorch.model_parallel.gradient_norm import local_part
from hvkit.watch.calls import of_run

pytestmark = MORE

MESHES = {
    "pipeline": {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES},
    "1F1B": {"mesh": hvkit.Mesh(pipeline=2), "microbatches": MICROBATCHES, "schedule": "1F1B"},
    "tensor": {"mesh": hvkit.Mesh(tensor=2), "microbatches": None},
    "shard": {"mesh": hvkit.Mesh(shard=2), "microbatches": None},
}
SPOILT = 2


def together(options):
    return options["mesh"].pipeline * options["mesh"].tensor


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


@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_a_skipped_step_changes_nothing_on_any_rank(options):
    one, (model, optimizer) = both(lambda: GPT(layers=4).double(), on_nonfinite="skip", **options)
    data = tokens(5)
    train(model, optimizer, of_this_rank(data, together(options)), factor=math.nan)
    train(*one, data[:SPOILT] + data[SPOILT + 1 :])
    counted = with_gradients(*one)
    assert difference(whole_state(model), one[0].state_dict(), counted) < 1e-11


@pytest.mark.parametrize("options", MESHES.values(), ids=MESHES)
def test_stop_names_the_parameter_although_clipping_spreads_it(options):
    _, (model, optimizer) = both(GPT, on_nonfinite="stop", **options)
    data = of_this_rank(tokens(5), together(options))
    kind, text = error_of(lambda: train(model, optimizer, data, spoil="ln_f.weight"))
    assert kind is FloatingPointError
    assert f"in step {of_run(SPOILT + 1)}: rank " in text
    assert text.count("parameter") == text.count("parameter ln_f.weight") > 0
