"""PyTorch: checkpoints of a model in a mesh are those of the whole model."""

import functools

import numpy as np
import pytest
import torch
from cases import MORE, cases
from mesh_models import CNN, GPT
from mesh_training import (
    adamw,
    difference,
    distributed,
    images,
    of_this_rank,
    tokens,
    train,
    whole_state,
)
from ranks import shared_folder

import hvkit

MODELS = {"GPT": (functools.partial(GPT, layers=4, dropout=0.1), tokens), "CNN": (CNN, images)}


@pytest.fixture
def folder(tmp_path_factory):
    return shared_folder(tmp_path_factory)


@pytest.mark.parametrize("schedule", cases(["GPipe", "1F1B"]))
@pytest.mark.parametrize("name", cases(MODELS))
def test_a_resumed_run_is_the_undisturbed_run(name, schedule, folder):
    make, data_of = MODELS[name]
    data = of_this_rank(data_of(8))

    def begin():
        model, optimizer = distributed(make(), schedule=schedule)
        parts = {"model": model, "optimizer": optimizer}
        return model, optimizer, hvkit.Checkpoint(folder, **parts)

    torch.manual_seed(hvkit.rank())
    model, optimizer, checkpoint = begin()
    assert checkpoint.restore().step == 0
    train(model, optimizer, data[:4])
    checkpoint.save(epoch=0, step=4)
    train(model, optimizer, data[4:])
    undisturbed = whole_state(model)

    for trained_before in (0, 1):
        torch.manual_seed(7)
        model, optimizer, checkpoint = begin()
        train(model, optimizer, data[:trained_before])
        assert checkpoint.restore().step == 4
        train(model, optimizer, data[4:])
        assert difference(whole_state(model), undisturbed) == 0.0


@MORE
def test_a_file_is_that_of_the_plain_model(folder):
    data = of_this_rank(tokens(3))
    model, optimizer = distributed(GPT(layers=4))
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    train(model, optimizer, data)
    at = checkpoint.save(epoch=0, step=3)
    plain = GPT(layers=4)
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
    data = tokens(9)
    meshes = [
        {"mesh": hvkit.Mesh(pipeline=2), "microbatches": 4},
        {"mesh": None, "microbatches": None},
        {"mesh": hvkit.Mesh(pipeline=2), "microbatches": 2, "stages": ["h.0"]},
    ]
    torch.manual_seed(0)
    reference = GPT(layers=4)
    alone = adamw(reference)
    for number, options in enumerate(meshes):
        steps = data[3 * number : 3 * number + 3]
        torch.manual_seed(0)
        model, optimizer = distributed(GPT(layers=4), **options)
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        assert checkpoint.restore().step == 3 * number
        if options["mesh"]:
            train(model, optimizer, of_this_rank(steps))
        else:
            rank, size = hvkit.rank(), hvkit.size()
            train(model, optimizer, [(x[rank::size], y[rank::size]) for x, y in steps])
        train(reference, alone, steps)
        checkpoint.save(epoch=0, step=3 * number + 3)
    assert difference(whole_state(model), reference.state_dict()) < 1e-11
    assert np.isfinite(difference(whole_state(model), reference.state_dict()))
