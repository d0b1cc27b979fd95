"""PyTorch: a pipeline trains the model of one process, whatever the schedule and the model."""

import copy
import functools
import itertools

import pytest
import torch
from cases import MORE, cases
from mesh_models import CNN, GPT, EncoderDecoder, PassesTwo, ResNet, UNet
from mesh_training import (
    MICROBATCHES,
    InMicroBatches,
    difference,
    differences,
    distributed,
    images,
    of_this_rank,
    tokens,
    train,
    vectors,
    whole_state,
)

from hvkit.mesh import SCHEDULES

MODELS = {
    "tied GPT": (functools.partial(GPT, layers=4), tokens),
    "GPT": (functools.partial(GPT, layers=4, tied=False), tokens),
    "CNN": (CNN, images),
    "ResNet": (ResNet, images),
    "two tensors": (PassesTwo, vectors),
    "encoder and decoder": (EncoderDecoder, tokens),
    "U-Net": (UNet, images),
}


FIRST = [("tied GPT", "GPipe"), ("tied GPT", "1F1B"), ("U-Net", "GPipe")]


@pytest.mark.parametrize(("name", "schedule"), cases(itertools.product(MODELS, SCHEDULES), FIRST))
def test_it_trains_the_model_of_one_process(name, schedule):
    make, data_of = MODELS[name]
    # Each schedule takes its own path from the second batch on.
    weights, losses, norms = differences(make, data_of(), schedule=schedule)
    assert weights < 1e-11
    assert losses < 1e-13
    assert norms < 1e-12


@MORE
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_float32_differs_no_more_than_micro_batches_do(schedule):
    """The control is one process that trains in micro-batches, beside one that does not."""
    torch.set_default_dtype(torch.float32)
    make = functools.partial(GPT, layers=4)
    torch.manual_seed(0)
    start = make()
    states = []
    for count in (1, MICROBATCHES):
        model = copy.deepcopy(start)
        train(InMicroBatches(model, count), sgd(model), tokens())
        states.append(model.state_dict())
    control = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    model, optimizer = distributed(start, sgd, schedule=schedule)
    train(model, optimizer, of_this_rank(tokens()))
    assert difference(whole_state(model), states[1]) <= 3 * control


def sgd(model):
    """AdamW would make much of rounding where a gradient is zero."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@MORE
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_results_of_two_levels_pass_by_a_cut(schedule):
    found = differences(UNet, images(6), schedule=schedule, stages=["below"])
    assert max(found) < 1e-11
