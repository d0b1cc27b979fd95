"""PyTorch: a pipeline trains the model of one process, whatever the schedule and the model."""

import copy
import functools

import pytest
import torch
from cases import MORE, cases, each_once
from mesh_models import CNN, GPT, SMALL, EncoderDecoder, PassesTwo, ResNet, UNet
from mesh_training import (
    MICROBATCHES,
    InMicroBatches,
    adamw,
    difference,
    differences,
    distributed,
    images,
    tokens,
    train,
    vectors,
    whole_state,
)

import hvkit
from hvkit.errors import RanksDisagreeError
from hvkit.mesh import SCHEDULES

MODELS = {
    "tied GPT": (SMALL, tokens),
    "GPT": (functools.partial(GPT, layers=4, tied=False), tokens),
    "CNN": (CNN, images),
    "ResNet": (ResNet, images),
    "two tensors": (PassesTwo, vectors),
    "encoder and decoder": (EncoderDecoder, tokens),
    "U-Net": (UNet, images),
}
FIRST = [("tied GPT", "GPipe"), ("tied GPT", "1F1B"), ("U-Net", "GPipe")]
CASES = [
    *((name, schedule) for name in MODELS for schedule in ("GPipe", "1F1B")),
    *(("tied GPT", schedule) for schedule in SCHEDULES[2:]),
    *each_once(list(MODELS)[1:], SCHEDULES[2:]),
]


@pytest.mark.parametrize(("name", "schedule"), cases(CASES, FIRST))
def test_it_trains_the_model_of_one_process(name, schedule):
    make, data_of = MODELS[name]
    # Each schedule takes its own path from the second batch on.
    weights, losses, norms = differences(make, data_of(4), schedule=schedule)
    assert weights < 1e-11
    assert losses < 1e-13
    assert norms < 1e-12


@MORE
def test_float32_differs_no_more_than_micro_batches_do():
    """The control is one process that trains in micro-batches, beside one that does not."""
    torch.set_default_dtype(torch.float32)
    start, states = SMALL(), []
    for count in (1, MICROBATCHES):
        model = copy.deepcopy(start)
        train(InMicroBatches(model, count), sgd(model), tokens())
        states.append(model.state_dict())
    control = max(float((states[0][n] - states[1][n]).abs().max()) for n in states[0])
    model, optimizer = distributed(start, sgd, schedule="1F1B")
    train(model, optimizer, tokens())
    assert difference(whole_state(model), states[1]) <= 3 * control


def sgd(model):
    """AdamW would make much of rounding where a gradient is zero."""
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


@MORE
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_results_of_two_levels_pass_by_a_cut(schedule):
    found = differences(UNet, images(3), schedule=schedule, stages=["below"])
    assert max(found) < 1e-11


def deferred(seed, **options):
    torch.manual_seed(seed)
    with hvkit.deferred_init():
        model = SMALL(**options)
    assert all(p.is_meta for p in model.parameters())
    return model


@MORE
@pytest.mark.parametrize("tied", [True, False])
def test_a_model_that_no_rank_ever_holds_trains_as_in_one_process(tied):
    reference, data = SMALL(tied=tied), tokens(3)
    train(reference, adamw(reference), data)
    # Another seed on the other ranks: the first one's counts.
    model, optimizer = distributed(deferred(hvkit.rank(), tied=tied))
    train(model, optimizer, data)
    assert 0 < sum(p.is_meta for p in model.parameters()) < len(list(model.parameters()))
    assert difference(whole_state(model), reference.state_dict()) < 1e-11


def test_ranks_that_draw_unequally_often_are_refused_on_every_rank():
    """No rank can tell which draws are those of rank 0's weights."""
    with hvkit.deferred_init():
        if hvkit.rank() == 1:
            torch.rand(3)
        model = SMALL()
    with pytest.raises(RanksDisagreeError, match=r"rank 1 .*\d+ random draws inside .* but \d+ "):
        distributed(model)


@MORE
def test_without_a_mesh_every_rank_makes_the_model():
    expected = SMALL().state_dict()
    model = deferred(hvkit.rank())
    model, _ = hvkit.distribute(model, adamw(model))
    assert difference(model.state_dict(), expected) == 0.0
