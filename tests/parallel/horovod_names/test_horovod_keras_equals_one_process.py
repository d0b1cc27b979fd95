"""Scripts through Horovod's own names train, under Keras 3, the model that one process trains."""

import importlib
import itertools

import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd
import keras
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from horovod_runs import DATA, OPTIMIZERS, of_all_ranks, of_one_process, pairs_of
from keras_models import LOOPS, embedded, local, mlp, mse, texts, weights, with_state
from ranks import largest_difference, same_on_all_ranks


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("optimizer", cases(["momentum", "adam"]))
def test_the_optimizer_averages(loop, optimizer):
    make = OPTIMIZERS[optimizer]
    found = of_all_ranks(hvd.DistributedOptimizer(make()), loop=LOOPS[loop])
    assert largest_difference(found, of_one_process(make, loop=LOOPS[loop])) < 1e-5


@MORE
@pytest.mark.parametrize(
    ("names", "optimizer"),
    each_once(["horovod.keras", "horovod.tensorflow"], ["clipped", "decayed", "averaged"]),
)
def test_optimizers_with_more_than_an_update(names, optimizer):
    make = OPTIMIZERS[optimizer]
    found = of_all_ranks(importlib.import_module(names).DistributedOptimizer(make()))
    assert largest_difference(found, of_one_process(make)) < 1e-5


@MORE
def test_gradients_are_added_on_request():
    found = of_all_ranks(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), op=hvd.Sum))
    expected = of_one_process(lambda: keras.optimizers.SGD(0.01 * hvd.size()))
    assert largest_difference(found, expected) < 1e-5


@MORE
@pytest.mark.parametrize(
    "options",
    cases(
        [
            {"gradient_predivide_factor": 2.0},
            {"groups": 2},
            {"groups": "of layers"},
            {"compression": hvd.Compression.fp16},
            {"sparse_as_dense": True},
            {"process_set": hvd.global_process_set},
        ],
        3,
        name=lambda options: next(iter(options)),
    ),
)
def test_options_of_how_gradients_travel(options):
    model = mlp(0)
    if "groups" in options and options["groups"] != 2:
        # Their variables have the same names: kernel and bias.
        options = {"groups": [layer.trainable_weights for layer in model.layers]}
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), **options)
    found = of_all_ranks(optimizer, lambda _: model)
    tolerance = 1e-2 if "compression" in options else 1e-5
    assert largest_difference(found, of_one_process(OPTIMIZERS["momentum"])) < tolerance


@pytest.mark.parametrize("sparse_as_dense", cases([False, True]))
def test_rows_of_embeddings(sparse_as_dense):
    data = texts(steps=6)
    optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"](), sparse_as_dense=sparse_as_dense)
    found = of_all_ranks(optimizer, embedded, data)
    assert largest_difference(found, of_one_process(OPTIMIZERS["momentum"], embedded, data)) < 1e-5


@pytest.mark.parametrize(
    ("loop", "mean"),
    cases(itertools.product(LOOPS, [True, False]), [("eager", True)]),
)
def test_several_backward_passes_make_a_step(loop, mean):
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=mean,
    )
    found = of_all_ranks(optimizer, loop=LOOPS[loop])
    rate = 0.05 if mean else 0.1
    expected = of_one_process(lambda: keras.optimizers.SGD(rate, momentum=0.9), data=pairs_of(DATA))
    assert largest_difference(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("loop", "sources"),
    cases(itertools.product(["function", "eager"], ["list", "dict", "one"]), 2),
)
def test_the_tape_averages(loop, sources):
    def step(model, optimizer, x, y, tape_of):
        with tape_of(tf.GradientTape(persistent=True)) as tape:
            loss = mse(y, model(x))
        variables = model.trainable_variables
        match sources:
            case "list":
                gradients = tape.gradient(loss, variables)
            case "dict":
                found = tape.gradient(loss, {v.path: v for v in variables})
                gradients = [found[v.path] for v in variables]
            case "one":
                gradients = [tape.gradient(loss, v) for v in variables]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def train(data, tape_of):
        model, optimizer = with_state(mlp(0), keras.optimizers.Adam(0.01))
        function = tf.function(step) if loop == "function" else step
        for x, y in data:
            function(model, optimizer, tf.constant(x), tf.constant(y), tape_of)
        return weights(model)

    found = train(local(DATA), hvd_tensorflow.DistributedGradientTape)
    assert same_on_all_ranks(found)
    assert largest_difference(found, train(DATA, lambda tape: tape)) < 1e-5
