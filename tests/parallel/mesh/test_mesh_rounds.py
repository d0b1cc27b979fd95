"""PyTorch: a checkpoint in the middle of a round between pipelines, or between tensor groups."""

import functools

import numpy as np
import pytest
import torch
from cases import MORE
from mesh_models import CNN, GPT, SMALL
from mesh_training import (
    adamw,
    assert_equal,
    difference,
    distributed,
    held_by_rank,
    images,
    of_this_rank,
    tokens,
    train,
    whole_state,
)
from ranks import error_of

import hvkit

pytestmark = [MORE, pytest.mark.skipif(hvkit.size() < 4, reason="two pipelines are four ranks")]

DILOCO = hvkit.DiLoCo(every=4)
OVERLAP = hvkit.DiLoCo(every=4, overlap=2)
PIPELINE, TENSOR = hvkit.Mesh(pipeline=2), hvkit.Mesh(tensor=2)


def begin(folder, make=SMALL, optimizer=adamw, sharded=False, **options):
    if options.get("mesh", PIPELINE) == TENSOR:
        options["microbatches"] = None
    model, own = distributed(make(), optimizer, **options)
    return model, own, hvkit.Checkpoint(folder, model=model, optimizer=own, sharded=sharded)


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


# Each stage compresses for itself what both hold.
UNTIED = {"optimizer": sgd, "make": functools.partial(GPT, layers=4, tied=False)}
CASES = {
    "1F1B": {"strategy": DILOCO, "schedule": "1F1B"},
    "each rank writes its part": {"strategy": DILOCO, "sharded": True},
    "overlap": {"strategy": OVERLAP},
    "warmup": {"strategy": DILOCO, "lr_scaling": "linear", "warmup_steps": 9},
    "tensor": {"strategy": DILOCO, "mesh": TENSOR},
    "topk": {"strategy": DILOCO, "compression": hvkit.TopK(0.1)} | UNTIED,
    "gradients": {"compression": hvkit.PowerSGD(1)} | UNTIED,
    "batch norm": {"strategy": DILOCO, "make": CNN, "data": images},
}


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_undisturbed_run(case, folder):
    options = dict(CASES[case])
    if options.get("compression"):
        torch.set_default_dtype(torch.float32)
    data = of_this_rank(options.pop("data", tokens)(9))
    torch.manual_seed(0)
    model, optimizer, checkpoint = begin(folder, **options)
    train(model, optimizer, data[:5])
    checkpoint.save(epoch=0, step=5)
    saved = held_by_rank(model)
    train(model, optimizer, data[5:])
    undisturbed, agreed = held_by_rank(model), whole_state(model)
    for trained_before in (0, 2):
        torch.manual_seed(7)
        model, optimizer, checkpoint = begin(folder, **options)
        train(model, optimizer, data[:trained_before])
        assert checkpoint.restore().step == 5
        if trained_before:
            assert_equal(held_by_rank(model), saved)
        train(model, optimizer, data[5:])
        assert_equal(held_by_rank(model), undisturbed)
        assert difference(whole_state(model), agreed) == 0.0


def test_the_agreed_weights_are_shown_before_the_first_batch_of_a_resumed_run(folder):
    """Where it divides the model, each rank's own weights wait until they are no longer shown."""
    x, _ = of_this_rank(tokens(1))[0]
    model, optimizer, checkpoint = begin(folder, strategy=DILOCO)
    train(model, optimizer, of_this_rank(tokens(5)))
    at = checkpoint.save(epoch=0, step=5)
    saved, agreed = held_by_rank(model), whole_state(model)
    if hvkit.rank() == 0:
        file = torch.load(at / "model.pt")
        assert all(torch.equal(file[name], t) for name, t in agreed.items())
        assert any(not torch.equal(file[name], t) for name, t in saved.items())
    with hvkit.settled(model), torch.no_grad():
        expected = model(x)
    model, optimizer, checkpoint = begin(folder, strategy=DILOCO)
    checkpoint.restore()
    kind, text = error_of(lambda: checkpoint.save(epoch=0, step=5))
    assert (kind, "call model(x) first" in text) == (ValueError, True)
    with hvkit.settled(model), torch.no_grad():
        assert torch.equal(model(x), expected)
    assert_equal(held_by_rank(model), saved)
    assert difference(whole_state(model), agreed) == 0.0


MESHES = {
    "tensor": {"mesh": TENSOR},
    "other cut": {"mesh": PIPELINE, "stages": ["h.0"]},
    "none": {"mesh": None, "microbatches": None},
}


@pytest.mark.parametrize("name", MESHES)
def test_another_mesh_begins_a_new_round_with_what_the_ranks_agreed_on(name, folder):
    """With the momentum of the strategy, as another number of ranks does without a mesh."""
    model, optimizer, checkpoint = begin(folder, strategy=DILOCO)
    train(model, optimizer, of_this_rank(tokens(5)))
    checkpoint.save(epoch=0, step=5)
    agreed = whole_state(model)
    model, optimizer, checkpoint = begin(folder, **MESHES[name], strategy=DILOCO)
    assert checkpoint.restore().step == 5
    train(model, optimizer, of_this_rank(tokens(1)) if name != "none" else tokens(1))
    checkpoint.save(epoch=0, step=6)
    if hvkit.rank():
        return
    before, after = (
        dict(np.load(folder / f"step-{step:09}" / "model-strategy.npz")) for step in (5, 6)
    )
    assert before.keys() == after.keys()
    for i, (n, _) in enumerate(SMALL().named_parameters()):
        assert np.array_equal(after[f"velocity.{i}"], before[f"velocity.{i}"])
        assert np.array_equal(after[f"anchor.{i}"], agreed[n].numpy().ravel())
    assert np.abs(after["velocity.0"]).max() > 0
    assert after["counts"].tolist() == [[1], [1]]  # steps of the new round, and rounds ended
