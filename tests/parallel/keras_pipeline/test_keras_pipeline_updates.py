"""Updates of a pipeline: clipping, settings of optimizers, and loops of a script."""

import functools
import json

import keras
import numpy as np
import pytest
from cases import MORE
from keras import ops
from keras_models import ON_TENSORFLOW, on_pytorch
from ranks import (
    error_of,
    identical,
    largest_difference,
    same_on_all_ranks,
    shared_folder,
)
from stages import (
    MESH,
    MICRO,
    PER_ROW,
    ROWS,
    adam,
    built,
    data,
    distributed,
    fit_equals_one_process,
    gradients_of,
    in_microbatches,
    mine,
    one_pipeline,
    residual,
    whole,
)

import hvkit
from hvkit.communication.collectives import gather

pytestmark = MORE


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        pytest.param({"clipnorm": 0.05}, marks=one_pipeline),
        pytest.param({"clipvalue": 0.01}, marks=one_pipeline),
    ],
    ids=lambda options: next(iter(options)),
)
def test_clipping_is_by_the_gradients_of_all_stages(options, float64):
    make = functools.partial(keras.optimizers.SGD, 0.5, **options)
    fit_equals_one_process(residual, make, bound=1e-12)


@one_pipeline
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 4), momentum=0.9),
        lambda: adam(gradient_accumulation_steps=2, global_clipnorm=0.5),
        lambda: adam(use_ema=True, ema_momentum=0.9),
        lambda: adam(use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2),
    ],
    ids=["schedule", "accumulation", "ema", "ema overwrites"],
)
def test_settings_of_optimizers(make, float64):
    fit_equals_one_process(residual, make, samples=32, bound=1e-12)


def clipped(gradients, model, bound):
    """The norm before, and the gradients, as scripts clip them on each backend."""
    if ON_TENSORFLOW:
        import tensorflow as tf

        gradients, norm = tf.clip_by_global_norm(gradients, bound)
        return float(norm), gradients
    import torch

    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
    return float(norm), [v.value.grad for v in model.trainable_variables]


@pytest.mark.skipif(ON_TENSORFLOW and ROWS > 1, reason="there a loop clips what is no mean yet")
def test_a_loop_may_clip_by_the_norm_of_all_stages(float64):
    def loop(model, optimizer, compute, x, y):
        for _ in range(3):

            def loss():
                squares = (compute(model, x) - ops.convert_to_tensor(y)) ** 2
                return ops.mean(squares) + sum(model.losses)

            total, gradients = gradients_of(loss, model)
            norm, gradients = clipped(gradients, model, 0.05)
            optimizer.apply(gradients, model.trainable_variables)
        return norm, float(total)

    l2 = keras.regularizers.L2(0.05)
    alone = built(residual, regularizer=l2)
    x, y = data(alone, PER_ROW)
    expected = loop(alone, adam(), in_microbatches, x, y)
    model, optimizer = distributed(residual, seed=0, regularizer=l2)
    found = loop(model, optimizer, lambda model, x: model(x, training=True), mine(x), mine(y))
    assert np.allclose(found[0], expected[0], rtol=1e-12, atol=0)
    assert np.allclose(np.mean(gather("test", found[1])), expected[1], rtol=1e-12, atol=0)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@on_pytorch
def test_gradients_of_several_passes_add_up(float64):
    alone = built(residual)
    x, y = data(alone, PER_ROW)
    model, _ = distributed(residual, seed=0)
    norms = []
    for each, inputs, targets in ((alone, x, y), (model, mine(x), mine(y))):
        for _ in range(2):
            errors = each(inputs, training=True) - ops.convert_to_tensor(targets)
            ops.mean(errors**3).backward()
        gradients = [v.value.grad for v in each.trainable_variables]
        norms.append([float(ops.sqrt(ops.sum(g**2))) for g in gradients])
    assert np.allclose(*norms, rtol=1e-11, atol=0)


@one_pipeline
def test_a_second_gradient_through_one_pass_is_an_error():
    model, _ = distributed(residual)
    x, _ = data(model, PER_ROW)
    if ON_TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            loss = ops.mean(model(x, training=True))
        take = functools.partial(tape.gradient, loss, model.trainable_variables)
    else:
        take = functools.partial(ops.mean(model(x, training=True)).backward, retain_graph=True)
    take()
    kind, text = error_of(take)
    assert kind is RuntimeError
    assert "take the gradient once" in text


@one_pipeline
def test_an_overflow_on_one_stage_skips_the_step_on_all():
    def make(**_):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(4, name="a"), layers.Dense(3, name="b")]
        )

    model = built(make)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 2.0**16)
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=2)
    x = np.full((4, 4), 1e-30, "float32")
    before = whole(model)

    def loss():
        return optimizer.scale_loss(ops.sum(model(x, training=True)))

    _, gradients = gradients_of(loss, model)
    optimizer.apply([gradients[0] * np.inf, *gradients[1:]], model.trainable_variables)
    assert identical(whole(model), before)
    optimizer.apply(gradients, model.trainable_variables)
    assert not identical(whole(model), before)
    assert same_on_all_ranks([optimizer.dynamic_scale.numpy()])


@one_pipeline
def test_a_monitor_records_the_norm_of_the_gradients_of_all_stages(tmp_path_factory):
    folder, rate, states = shared_folder(tmp_path_factory), 0.1, []
    with hvkit.Monitor(folder, every=1) as monitor:
        model, optimizer = built(residual), keras.optimizers.SGD(rate)
        hvkit.distribute(model, optimizer, monitor=monitor, mesh=MESH(), microbatches=MICRO)
        model.compile(optimizer, "mse")
        x, y = data(model, PER_ROW)
        for _ in range(2):  # of the first step, which makes functions, there is no record
            model.fit(x, y, batch_size=PER_ROW, verbose=0)
            states.append(np.concatenate([w.ravel() for w in whole(model)]))
    norm = np.linalg.norm(states[1] - states[0]) / rate
    text = (folder / "metrics.jsonl").read_text() if hvkit.is_main() else ""
    lines = map(json.loads, hvkit.broadcast(text).splitlines())
    found = [line["gradient_norm"] for line in lines if "samples_per_second" in line]
    assert found[-1:] == [pytest.approx(norm, rel=1e-3)]
