"""PyTorch: a pipeline trains the model of one process, whatever the schedule and the model."""

import functools

import pytest
from mesh_models import CNN, GPT, PassesTwo, ResNet
from mesh_training import differences, images, tokens, vectors

from hvkit.mesh import SCHEDULES

MODELS = {
    "tied GPT": (functools.partial(GPT, layers=4), tokens),
    "GPT": (functools.partial(GPT, layers=4, tied=False), tokens),
    "CNN": (CNN, images),
    "ResNet": (ResNet, images),
    "two tensors": (PassesTwo, vectors),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODELS)
def test_it_trains_the_model_of_one_process(name, schedule):
    make, data = MODELS[name]
    weights, losses, norms = differences(make, data(), schedule=schedule)
    assert weights < 1e-11
    assert losses < 1e-13
    assert norms < 1e-12
