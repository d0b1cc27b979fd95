"""N ranks with batch B train the model that one process trains with batch N*B."""

import keras
import pytest
from cases import cases
from models import LOOPS, equals_one_process, mlp, regression, subclassed, unbuilt

OPTIMIZERS = {
    "sgd": lambda factor: keras.optimizers.SGD(0.02 * factor),
    "momentum": lambda factor: keras.optimizers.SGD(0.01 * factor, momentum=0.9),
    "adam": lambda factor: keras.optimizers.Adam(0.01 * factor),
}


@pytest.mark.parametrize("lr_scaling", cases(["none", "linear"]))
@pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, ["adam"]))
@pytest.mark.parametrize("loop", LOOPS)
def test_twenty_steps_give_the_weights_of_one_process(loop, optimizer, lr_scaling):
    data = regression(steps=20)
    equals_one_process(mlp, OPTIMIZERS[optimizer], LOOPS[loop], data, lr_scaling=lr_scaling)


@pytest.mark.parametrize("loop", cases(LOOPS))
@pytest.mark.parametrize("make", [unbuilt, subclassed])
def test_models_that_their_first_batch_builds(make, loop):
    equals_one_process(make, OPTIMIZERS["adam"], LOOPS[loop], regression(steps=20))
