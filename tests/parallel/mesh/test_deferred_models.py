"""PyTorch: a model that no rank ever holds as a whole."""

import pytest
import torch
from cases import MORE
from mesh_models import GPT
from mesh_training import adamw, difference, distributed, of_this_rank, tokens, train, whole_state
from ranks import shared_folder

import hvkit

pytestmark = MORE


def deferred(seed, **options):
    torch.manual_seed(seed)
    with hvkit.deferred_init():
        model = GPT(layers=4, **options)
    assert all(p.is_meta for p in model.parameters())
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_the_model_of_one_process(tied):
    torch.manual_seed(0)
    reference = GPT(layers=4, tied=tied)
    data = tokens(6)
    train(reference, adamw(reference), data)
    # Another seed on the other ranks: the first one's counts.
    model, optimizer = distributed(deferred(hvkit.rank(), tied=tied))
    train(model, optimizer, of_this_rank(data))
    assert 0 < sum(p.is_meta for p in model.parameters()) < len(list(model.parameters()))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_a_checkpoint_is_loaded_into_a_model_without_weights(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    data = of_this_rank(tokens(6))
    model, optimizer = distributed(deferred(0))
    checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
    train(model, optimizer, data[:3])
    checkpoint.save(epoch=0, step=3)
    train(model, optimizer, data[3:])
    undisturbed = whole_state(model)
    model, optimizer = distributed(deferred(5))
    assert hvkit.Checkpoint(folder, model=model, optimizer=optimizer).restore().step == 3
    train(model, optimizer, data[3:])
    assert difference(whole_state(model), undisturbed) == 0.0


def test_without_a_mesh_every_rank_makes_the_model():
    model = deferred(hvkit.rank())
    model, _ = hvkit.distribute(model, adamw(model))
    torch.manual_seed(0)
    assert difference(model.state_dict(), GPT(layers=4).state_dict()) == 0.0
