"""N ranks with batch B train the model that one process trains with batch N*B."""

import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch_nets import (
    convnet,
    distributed,
    equals_one_process,
    local,
    mlp,
    regression,
    train,
    weights,
)

import hvkit

OPTIMIZERS = {
    "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
}


@pytest.mark.parametrize("lr_scaling", ["none", "linear"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_twenty_steps_give_the_weights_of_one_process(name, lr_scaling):
    data = regression(shape=(1, 8, 8))
    make = OPTIMIZERS[name]
    reference = convnet()
    used = 0.01 * {"none": 1, "linear": hvkit.size()}[lr_scaling]
    train(reference, make(reference.parameters(), used), data)

    model, optimizer = distributed(
        lambda p: make(p, 0.01), convnet(seed=hvkit.rank()), lr_scaling=lr_scaling
    )
    train(model, optimizer, local(data))

    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(reference)) < 1e-5


LINEAR_UPDATES = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "weight decay": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
}


@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(1), hvkit.DiLoCo(1, 1.0, 0.0)])
@pytest.mark.parametrize("name", LINEAR_UPDATES)
def test_rounds_of_one_step_give_the_weights_of_one_process(name, strategy):
    # In float32, the roundings of 20 steps on 3 ranks come near 1e-6 of a small bias.
    assert equals_one_process(
        LINEAR_UPDATES[name],
        build=lambda: mlp().double(),
        data=[(x.double(), y.double()) for x, y in regression(steps=10)],
        within=1e-12,
        strategy=strategy,
    )
