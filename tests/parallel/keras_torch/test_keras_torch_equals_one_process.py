"""N ranks with batch B train the model that one process trains with batch N*B."""

import keras
import numpy as np
import pytest
import torch
from cases import cases
from keras_nets import (
    LOOPS,
    ConvNet,
    InParts,
    embedded,
    equals_one_process,
    fit,
    images,
    local,
    loop,
    mlp,
    normalised,
    regression,
    seeded,
    texts,
    unbuilt,
    weights,
)
from ranks import largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.usefixtures("double_precision")

# On PyTorch Keras computes in float32 in places, whatever its floatx is.
TOLERANCE = 1e-6

OPTIMIZERS = {
    "sgd": lambda factor: keras.optimizers.SGD(0.02 * factor, momentum=0.9),
    "adam": lambda factor: keras.optimizers.Adam(0.01 * factor),
    "accumulating": lambda factor: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "clipping": lambda factor: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "averaging weights": lambda factor: keras.optimizers.SGD(
        0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=7
    ),
}


@pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, 2))
@pytest.mark.parametrize("train", LOOPS)
def test_twenty_steps_give_the_weights_of_one_process(train, optimizer):
    make = OPTIMIZERS[optimizer]
    equals_one_process(mlp, make, LOOPS[train], regression(), tolerance=TOLERANCE)


def test_ninety_six_steps_of_adam_in_fit():
    equals_one_process(mlp, OPTIMIZERS["adam"], fit, regression(steps=96), tolerance=TOLERANCE)


@pytest.mark.parametrize("train", cases(LOOPS))
def test_a_subclassed_cnn_with_batch_norm(train):
    make, options = OPTIMIZERS["sgd"], {"tolerance": 1e-5, "batch_norm": "sync"}
    equals_one_process(ConvNet, make, LOOPS[train], images(steps=30), **options)


@pytest.mark.parametrize("train", cases(LOOPS))
def test_a_model_that_its_first_batch_builds(train):
    make = OPTIMIZERS["adam"]
    equals_one_process(unbuilt, make, LOOPS[train], regression(), tolerance=TOLERANCE)


def test_a_train_step_that_never_calls_the_model():
    def in_parts(seed):  # the same start everywhere: the first gradients come before rank 0's
        seeded(0)
        return InParts()

    equals_one_process(in_parts, OPTIMIZERS["adam"], fit, regression(), tolerance=TOLERANCE)


def test_an_embedding():
    equals_one_process(embedded, OPTIMIZERS["adam"], fit, texts(), tolerance=TOLERANCE)


def test_a_scaled_learning_rate():
    make, size = OPTIMIZERS["sgd"], hvkit.size()
    options = {"factor": size, "lr_scaling": "linear", "tolerance": TOLERANCE}
    equals_one_process(mlp, make, loop, regression(), **options)


def test_a_warm_up_counts_the_steps_of_the_optimizer():
    model, optimizer = hvkit.distribute(
        mlp(), keras.optimizers.SGD(0.1), lr_scaling="linear", warmup_steps=4
    )
    start = weights(model)
    alone = mlp()
    alone.set_weights(start)
    twin = keras.optimizers.SGD(0.1)
    for step, batch in enumerate(regression(steps=6)):
        twin.learning_rate = 0.1 * (1 + (hvkit.size() - 1) * min(step / 4, 1))
        loop(alone, twin, [batch])
        loop(model, optimizer, local([batch]))
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert largest_difference(weights(model), weights(alone)) < 1e-6


def test_batch_norm_over_the_batches_of_all_ranks():
    make, options = OPTIMIZERS["sgd"], {"batch_norm": "sync"}
    equals_one_process(normalised, make, loop, regression(), tolerance=TOLERANCE, **options)


def test_statistics_of_batch_norm_are_the_means_of_all_ranks():
    model, optimizer = hvkit.distribute(normalised(hvkit.rank()), OPTIMIZERS["sgd"](1))
    alone = [normalised() for _ in range(hvkit.size())]
    batch = regression(steps=1)[0]
    for rank, each in enumerate(alone):
        each.set_weights(weights(model))
        each(batch[0][rank :: hvkit.size()], training=True)
    loop(model, optimizer, local([batch]))
    norm = model.layers[1]
    for name in ("moving_mean", "moving_variance"):
        mean = np.mean([getattr(each.layers[1], name).numpy() for each in alone], axis=0)
        assert largest_difference([getattr(norm, name).numpy()], [mean]) < 1e-6
    assert same_on_all_ranks(weights(model))


def test_models_that_are_built_one_after_the_other_in_one_forward_pass():
    encoder, decoder = unbuilt(hvkit.rank()), unbuilt(10 + hvkit.rank())
    alone, twin = unbuilt(), unbuilt(10)
    hvkit.distribute([encoder, decoder], optimizer := keras.optimizers.SGD(0.1))
    data = [(x, y) for x, y in regression(steps=3)]

    def train(first, second, optimizer, batches):
        for x, y in batches:
            loss = ((second(first(torch.from_numpy(x))) - torch.from_numpy(y)) ** 2).mean()
            loss.backward()
            own = [*first.trainable_variables, *second.trainable_variables]
            optimizer.apply([v.value.grad for v in own], own)
            for v in own:
                v.value.grad = None

    train(encoder, decoder, optimizer, local(data))
    train(alone, twin, keras.optimizers.SGD(0.1), data)
    both = [*weights(alone), *weights(twin)]
    assert largest_difference([*weights(encoder), *weights(decoder)], both) < TOLERANCE


class HoldsPyTorch(keras.Model):
    """With a module of PyTorch, whose buffers Keras does not know."""

    def __init__(self, seed):
        super().__init__()
        seeded(seed)
        self.dense, self.norm = keras.layers.Dense(6), torch.nn.BatchNorm1d(6).double()

    def call(self, inputs):
        return self.norm(self.dense(inputs))


def test_statistics_of_pytorchs_batch_norm_inside_a_layer_are_averaged():
    model, optimizer = HoldsPyTorch(hvkit.rank()), keras.optimizers.SGD(0.1)
    hvkit.distribute(model, optimizer)
    for x, _ in local(regression(steps=3)):
        (model(torch.from_numpy(x), training=True) ** 2).mean().backward()
        own = model.trainable_variables
        optimizer.apply([v.value.grad for v in own], own)
    held = [b.numpy() for b in model.norm.module.buffers()]
    assert any(b.any() for b in held)
    assert same_on_all_ranks([*held, *weights(model)])


def test_two_optimizers_and_one_model_that_is_built_late():
    first, second = mlp(hvkit.rank()), unbuilt(hvkit.rank())
    optimizers = [keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)]
    hvkit.distribute([first, second], optimizers)
    data = local(regression(steps=3))
    first(data[0][0])
    second(data[0][0])
    loop(first, optimizers[0], data)
    loop(second, optimizers[1], data)
    assert same_on_all_ranks([*weights(first), *weights(second)])
