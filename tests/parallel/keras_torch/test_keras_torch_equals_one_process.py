"""N ranks with batch B train the model that one process trains with batch N*B."""

import functools

import keras
import numpy as np
import pytest
import torch
from cases import cases
from keras import layers
from keras_models import (
    LOOPS,
    eager_tape,
    embedded,
    equals_one_process,
    fit,
    local,
    mlp,
    mse,
    normalised,
    regression,
    seeded,
    texts,
    unbuilt,
    update,
    weights,
)
from ranks import batches, largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.usefixtures("double_precision")

# On PyTorch Keras computes in float32 in places, whatever its floatx is.
equals = functools.partial(equals_one_process, tolerance=1e-6, lr_scaling="none")


def sgd(factor=1, **options):
    return keras.optimizers.SGD(0.02 * factor, momentum=0.9, **options)


def adam(factor=1, **options):
    return keras.optimizers.Adam(0.01 * factor, **options)


OPTIMIZERS = {
    "sgd": sgd,
    "adam": adam,
    "accumulating": lambda _: adam(gradient_accumulation_steps=2),
    "clipping": lambda _: sgd(5, global_clipnorm=0.1),
    "averaging weights": lambda _: sgd(use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=7),
}


@pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, 2))
@pytest.mark.parametrize("loop", LOOPS)
def test_twenty_steps_give_the_weights_of_one_process(loop, optimizer):
    equals(mlp, OPTIMIZERS[optimizer], LOOPS[loop], regression())


class ConvNet(keras.Model):
    """Images in, 4 outputs, with batch norm; subclassed, so that its first batch builds it."""

    def __init__(self, seed=0):
        super().__init__()
        seeded(seed)
        # Without biases, whose gradients would be rounding alone.
        self.convolutions = [layers.Conv2D(n, 3, use_bias=False) for n in (4, 8)]
        self.norms = [layers.BatchNormalization() for _ in self.convolutions]
        self.pool, self.out = layers.GlobalAveragePooling2D(), layers.Dense(4)

    def call(self, x, training=False):
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = keras.ops.relu(norm(convolution(x), training=training))
        return self.out(self.pool(x))


def images(steps=30):
    return [(x.astype(float), y.astype(float)) for x, y in batches(steps, 6, (8, 8, 1), (4,))]


class InParts(keras.Model):
    """A ``train_step`` that never calls the model itself."""

    def __init__(self, seed):
        super().__init__()
        seeded(0)  # the same start everywhere: the first gradients come before rank 0's
        self.hidden, self.out = layers.Dense(16, "tanh"), layers.Dense(4)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        self.hidden(x), self.out(self.hidden(x))  # which builds them
        loss = update(self.optimizer, self.trainable_weights, lambda: mse(y, self.call(x)))
        return {"loss": loss.detach()}


@pytest.mark.parametrize(
    ("make", "loop", "data", "options"),
    cases(
        [
            (ConvNet, eager_tape, images, {"batch_norm": "sync", "tolerance": 1e-5}),
            (unbuilt, fit, regression, {}),
            (unbuilt, eager_tape, regression, {}),
            (InParts, fit, regression, {}),
            (mlp, fit, functools.partial(regression, 96), {}),
            (embedded, fit, functools.partial(texts, 20), {}),
            (normalised, eager_tape, regression, {"batch_norm": "sync"}),
            (ConvNet, fit, images, {"batch_norm": "sync", "tolerance": 1e-5}),
        ],
        7,
        name=lambda case: f"{case[0].__name__}-{getattr(case[1], '__name__', 'fit')}",
    ),
)
def test_kinds_of_models(make, loop, data, options):
    make_optimizer = adam if make in (mlp, unbuilt, InParts, embedded) else sgd
    equals(make, make_optimizer, loop, data(), **options)


def test_a_scaled_learning_rate():
    equals(mlp, sgd, eager_tape, regression(), lr_scaling="linear")


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
        eager_tape(alone, twin, [batch])
        eager_tape(model, optimizer, local([batch]))
    assert float(optimizer.learning_rate) == pytest.approx(0.1)
    assert largest_difference(weights(model), weights(alone)) < 1e-6


def test_statistics_of_batch_norm_are_the_means_of_all_ranks():
    model, optimizer = hvkit.distribute(normalised(hvkit.rank()), sgd())
    alone = [normalised() for _ in range(hvkit.size())]
    batch = regression(steps=1)[0]
    for rank, each in enumerate(alone):
        each.set_weights(weights(model))
        each(batch[0][rank :: hvkit.size()], training=True)
    eager_tape(model, optimizer, local([batch]))
    norm = model.layers[1]
    for name in ("moving_mean", "moving_variance"):
        mean = np.mean([getattr(each.layers[1], name).numpy() for each in alone], axis=0)
        assert largest_difference([getattr(norm, name).numpy()], [mean]) < 1e-6
    assert same_on_all_ranks(weights(model))


def test_models_that_are_built_one_after_the_other_in_one_forward_pass():
    def train(first, second, optimizer, data):
        for x, y in data:
            loss = mse(y, second(first(torch.from_numpy(x))))
            loss.backward()
            own = [*first.trainable_variables, *second.trainable_variables]
            optimizer.apply([v.value.grad for v in own], own)
            for v in own:
                v.value.grad = None

    encoder, decoder = unbuilt(hvkit.rank()), unbuilt(10 + hvkit.rank())
    alone, twin = unbuilt(), unbuilt(10)
    hvkit.distribute([encoder, decoder], optimizer := keras.optimizers.SGD(0.1))
    data = regression(steps=3)
    train(encoder, decoder, optimizer, local(data))
    train(alone, twin, keras.optimizers.SGD(0.1), data)
    both = [*weights(alone), *weights(twin)]
    assert largest_difference([*weights(encoder), *weights(decoder)], both) < 1e-6


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
    for model in (first, second):
        model(data[0][0])
    for model, optimizer in zip((first, second), optimizers, strict=True):
        eager_tape(model, optimizer, data)
    assert same_on_all_ranks([*weights(first), *weights(second)])
