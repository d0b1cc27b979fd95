"""N ranks with batch B train the model that one process trains with batch N*B."""

import pytest
import torch
from ranks import largest_difference, same_on_all_ranks
from torch_nets import arrays, convnet, local, mlp, regression, train

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

    model = convnet(seed=hvkit.rank())
    optimizer = make(model.parameters(), 0.01)
    hvkit.distribute(model, optimizer, lr_scaling=lr_scaling)
    train(model, optimizer, local(data))

    identical = same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-5
    assert identical


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
    data = [(x.double(), y.double()) for x, y in regression()]
    make = LINEAR_UPDATES[name]
    reference = mlp().double()
    train(reference, make(reference.parameters()), data)

    model = mlp(seed=hvkit.rank()).double()
    optimizer = make(model.parameters())
    hvkit.distribute(model, optimizer, strategy=strategy)
    train(model, optimizer, local(data))

    identical = same_on_all_ranks(arrays(model.parameters()))
    assert largest_difference(arrays(model.parameters()), arrays(reference.parameters())) < 1e-12
    assert identical
