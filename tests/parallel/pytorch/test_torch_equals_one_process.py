"""N ranks with batch B train the model that one process trains with batch N*B."""

import pytest
import torch
from nets import arrays, convnet, local, regression, train
from ranks import largest_difference, same_on_all_ranks

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
