"""PyTorch: checkpoints of a model in a mesh are those of the whole model."""

import functools

import pytest
import torch
from cases import MORE, cases
from mesh_models import CNN, GPT, SMALL, Encoder
from mesh_training import (
    MESHES,
    adamw,
    assert_equal,
    data_for,
    difference,
    distributed,
    held_by_rank,
    images,
    tokens,
    train,
    vectors,
    whole_state,
    with_gradients,
)

import hvkit

OTHER_CUT = {"other cut": {**MESHES["GPipe"], "microbatches": 2, "stages": ["h.0"]}}
MODELS = {
    "GPT": (functools.partial(GPT, layers=4, dropout=0.1), tokens),
    "CNN": (CNN, images),
    "encoder": (Encoder, functools.partial(vectors, shape=(5, 20))),
}


@pytest.mark.parametrize(
    ("mesh", "name", "sharded"),
    cases(
        [
            ("GPipe", "GPT", False),
            ("GPipe", "GPT", True),
            ("1F1B", "CNN", False),
            ("1F1B", "CNN", True),
            ("tensor", "GPT", False),
            ("tensor", "encoder", True),
            ("shard", "GPT", False),
            ("shard", "GPT", True),
        ],
        2,
    ),
)
def test_a_resumed_run_is_the_undisturbed_run(mesh, name, sharded, folder):
    make, data_of = MODELS[name]
    data = data_for(mesh, data_of(4))

    def begin():
        model, own = distributed(make(), **MESHES[mesh])
        return model, own, hvkit.Checkpoint(folder, model=model, optimizer=own, sharded=sharded)

    torch.manual_seed(hvkit.rank())
    model, optimizer, checkpoint = begin()
    assert checkpoint.restore().step == 0
    train(model, optimizer, data[:2])
    checkpoint.save(epoch=0, step=2)
    train(model, optimizer, data[2:])
    undisturbed, whole = held_by_rank(model, optimizer), whole_state(model)

    for trained_before in (0, 1):
        torch.manual_seed(7)
        model, optimizer, checkpoint = begin()
        train(model, optimizer, data[:trained_before])
        assert checkpoint.restore().step == 2
        train(model, optimizer, data[2:])
        assert_equal(held_by_rank(model, optimizer), undisturbed)
        assert difference(whole_state(model), whole) == 0.0


@MORE
def test_a_file_is_that_of_the_plain_model(folder):
    model, optimizer = distributed(SMALL())
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    train(model, optimizer, tokens(2))
    at = checkpoint.save(epoch=0, step=2)
    plain = SMALL()
    plain.load_state_dict(torch.load(at / "model.pt"))
    own = adamw(plain)
    own.load_state_dict(torch.load(at / "optimizer.pt"))
    assert len(own.state) == len(list(plain.parameters()))
    expected = whole_state(model)
    if hvkit.rank() == 0:
        for name, t in plain.state_dict().items():
            assert torch.equal(t, expected[name])


@MORE
def test_a_run_goes_on_in_another_mesh_and_in_none(folder):
    reference, data = SMALL(), tokens(8)
    its = adamw(reference)
    for number, mesh in enumerate(["GPipe", "none", "tensor", "other cut"]):
        steps = data[2 * number : 2 * number + 2]
        torch.manual_seed(number)
        model, optimizer = distributed(SMALL(), **(MESHES | OTHER_CUT)[mesh])
        if number == 0:
            model.load_state_dict(reference.state_dict())
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        if mesh == "tensor":  # also into a model that is divided already
            train(model, optimizer, data[:1])
        assert checkpoint.restore().step == 2 * number
        train(model, optimizer, data_for(mesh, steps))
        train(reference, its, steps)
        checkpoint.save(epoch=0, step=2 * number + 2)
    counted = with_gradients(reference, its)
    assert difference(whole_state(model), reference.state_dict(), counted) < 1e-11
