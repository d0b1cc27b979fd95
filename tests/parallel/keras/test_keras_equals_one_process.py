"""N ranks with batch B train the model that one process trains with batch N*B."""

import keras
import pytest
from cases import cases, each_once
from keras_models import LOOPS, equals_one_process, mlp, regression, subclassed, unbuilt
from ranks import keras_in_float64

import hvkit

OPTIMIZERS = {
    "sgd": lambda factor: keras.optimizers.SGD(0.02 * factor),
    "momentum": lambda factor: keras.optimizers.SGD(0.01 * factor, momentum=0.9),
    "adam": lambda factor: keras.optimizers.Adam(0.01 * factor),
}


@pytest.mark.parametrize(
    ("optimizer", "lr_scaling"),
    cases([("adam", "none"), ("sgd", "linear"), ("momentum", "none")]),
)
@pytest.mark.parametrize("loop", LOOPS)
def test_twenty_steps_give_the_weights_of_one_process(loop, optimizer, lr_scaling):
    data = regression(steps=20)
    equals_one_process(mlp, OPTIMIZERS[optimizer], LOOPS[loop], data, lr_scaling=lr_scaling)


@pytest.mark.two_ranks
@pytest.mark.parametrize(("make", "loop"), cases(each_once([unbuilt, subclassed], list(LOOPS))))
def test_models_that_their_first_batch_builds(make, loop):
    equals_one_process(make, OPTIMIZERS["adam"], LOOPS[loop], regression(steps=20))


LINEAR_UPDATES = {
    "sgd": lambda _: keras.optimizers.SGD(0.1),
    "momentum": lambda _: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda _: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "weight decay": lambda _: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
}


@pytest.fixture
def double_precision():
    """In float32, the roundings of 20 steps on 3 ranks come to 1e-6 of a small bias."""
    with keras_in_float64():
        yield


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    ("loop", "optimizer", "strategy"),
    cases(
        [
            *((loop, "nesterov", hvkit.LocalSGD(1)) for loop in LOOPS),
            *each_once(list(LOOPS), list(LINEAR_UPDATES), [hvkit.DiLoCo(1, 1.0, 0.0)]),
        ],
        first=[("function", "nesterov", hvkit.LocalSGD(1))],
    ),
)
def test_rounds_of_one_step_give_the_weights_of_one_process(loop, optimizer, strategy):
    data = [(x.astype("float64"), y.astype("float64")) for x, y in regression(steps=20)]
    make = LINEAR_UPDATES[optimizer]
    equals_one_process(
        mlp, make, LOOPS[loop], data, tolerance=1e-12, lr_scaling="none", strategy=strategy
    )
