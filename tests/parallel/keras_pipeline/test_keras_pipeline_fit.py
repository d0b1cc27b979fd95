"""``fit``, ``evaluate`` and ``predict`` of a pipeline, against one process."""

import functools

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras import ops
from keras_models import on_pytorch, on_tensorflow
from ranks import error_of, identical, largest_difference
from stages import (
    MESH,
    MICRO,
    PER_ROW,
    ROWS,
    adam,
    built,
    cnn,
    data,
    distributed,
    fit_equals_one_process,
    in_microbatches,
    mine,
    one_pipeline,
    one_process,
    residual,
    sgd,
    whole,
)

import hvkit
from hvkit.communication.collectives import gather


@pytest.mark.parametrize("make", cases([cnn, residual]))
def test_fit_trains_the_model_of_one_process(make, precision):
    fit_equals_one_process(make, bound=precision)


@MORE
@on_pytorch
def test_tensors_may_go_by_torch_distributed(float64, monkeypatch):
    """As from GPUs; here they are in the host's memory."""
    from hvkit.frameworks.keras.pipeline import pytorch_pipeline

    monkeypatch.setattr(pytorch_pipeline, "sends_from_host", lambda device: False)
    l2 = keras.regularizers.L2(0.05)
    fit_equals_one_process(residual, bound=1e-12, regularizer=l2)


def held_of(variables):
    """How many numbers variables hold, without those that stand for what other ranks hold."""
    sizes = (int(np.prod(v._value.shape)) for v in variables)
    return sum(size for size in sizes if size > 1)


def test_each_rank_holds_the_weights_and_the_state_of_its_stage_only():
    model, optimizer = distributed(residual)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    model.fit(mine(x), mine(y), batch_size=PER_ROW, verbose=0, shuffle=False)
    sizes, held = map(held_of, (model.weights, optimizer.variables[2:]))
    both = np.sum(gather("test", [sizes, held])[:2], axis=0)
    assert 0 < sizes < model.count_params()
    assert both.tolist() == [model.count_params(), 2 * model.count_params()]


@MORE
@one_pipeline
def test_a_model_without_weights_is_built_in_parts(float64):
    def make(**_):
        layers = keras.layers
        return keras.Sequential([*(layers.Dense(8, "tanh") for _ in range(3)), layers.Dense(3)])

    alone = built(make)
    alone.build((None, 64))
    x, y = data(alone, PER_ROW)
    start = alone.get_weights()
    one_process(alone, adam(), x, y)
    model, optimizer = distributed(make)
    model.compile(optimizer, "mse")
    model.predict(x, verbose=0)
    assert identical(whole(model), start)
    assert 0 < held_of(model.weights) < model.count_params()
    model.fit(mine(x), mine(y), batch_size=PER_ROW, shuffle=False, verbose=0)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


def test_regularisation_of_all_stages_is_in_the_loss_and_the_gradients(precision):
    l2 = keras.regularizers.L2(0.05)
    model, _ = fit_equals_one_process(residual, bound=precision, regularizer=l2)
    x, y = data(model, PER_ROW)
    shown = model.evaluate(mine(x), mine(y), batch_size=PER_ROW, verbose=0)[0]
    first, last = (w for i, w in enumerate(whole(model)) if i in (0, 6))
    predicted = model.predict(x, verbose=0)
    expected = np.mean((predicted - y) ** 2) + 0.05 * (np.sum(first**2) + np.sum(last**2))
    assert abs(shown - expected) < 1e-5 * expected


@MORE
@one_pipeline
def test_batch_norm_keeps_the_statistics_of_micro_batches(float64):
    # With two samples in a micro-batch batch norm gives signs, which have no gradients.
    model, alone = fit_equals_one_process(residual, sgd, bound=1e-12, micro=2, norm=True)
    x, _ = data(model, PER_ROW)
    predicted = model.predict(x, verbose=0)
    assert largest_difference([predicted], [alone.predict(x, verbose=0)]) < 1e-12
    for each in (model, alone):  # norm now uses its statistics, and keeps them
        freeze("norm")(each)
    expected, found = in_microbatches(alone, x, 2), model(x, training=True)
    assert largest_difference(*([ops.convert_to_numpy(t)] for t in (found, expected))) < 1e-12
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


def freeze(*names):
    def change(model):
        for name in names:
            model.get_layer(name).trainable = False

    return change


@MORE
@one_pipeline
@pytest.mark.parametrize("names", [["first", "branch"], ["last", "out"]], ids=" ".join)
def test_frozen_layers_stay_as_they_are(names, float64):
    fit_equals_one_process(residual, bound=1e-12, change=freeze(*names))


@MORE
def test_a_frozen_first_stage_counts_steps_all_the_same(float64):
    def change(model):
        for layer in model.layers:
            layer.trainable = layer.name in ("last", "out")

    model, _ = fit_equals_one_process(
        residual,
        functools.partial(adam, global_clipnorm=0.1, gradient_accumulation_steps=2),
        bound=1e-12,
        change=change,
    )
    assert int(model.optimizer.iterations) == 3


@MORE
@one_pipeline
def test_a_first_stage_without_weights(float64):
    def make(**_):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((64,)), layers.Reshape((64,)), layers.Dense(8, name="a"), layers.Dense(3)]
        )

    fit_equals_one_process(make, bound=1e-12)


@MORE
def test_a_last_batch_of_fewer_samples_than_micro_batches(float64):
    fit_equals_one_process(residual, samples=PER_ROW + 3, bound=1e-12)


@MORE
def test_evaluation_before_training():
    alone = built(residual)
    x, y = data(alone, PER_ROW + 2)
    expected = np.mean((alone.predict(x, verbose=0) - y) ** 2)
    model, optimizer = distributed(residual, sgd, seed=0)
    model.compile(optimizer, "mse")
    assert abs(model.evaluate(mine(x), mine(y), verbose=0) - expected) < 1e-6 * expected
    assert largest_difference([model.predict(x, verbose=0)], [alone.predict(x, verbose=0)]) < 1e-6
    one_process(alone, sgd(), x[: PER_ROW * ROWS], y[: PER_ROW * ROWS])
    first = slice(0, PER_ROW)
    model.fit(mine(x)[first], mine(y)[first], batch_size=PER_ROW, verbose=0, shuffle=False)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-6


@MORE
@one_pipeline
def test_single_batches():
    alone = built(residual)
    x, y = data(alone, PER_ROW)
    loss = one_process(alone, sgd(), x, y)
    model, optimizer = distributed(residual, sgd, seed=0)
    model.compile(optimizer, "mse")
    assert abs(model.train_on_batch(x, y) - loss) < 1e-6 * loss
    assert largest_difference(whole(model), alone.get_weights()) < 1e-6
    expected = alone.predict_on_batch(x)
    assert largest_difference([model.predict_on_batch(x)], [expected]) < 1e-5
    model.reset_metrics()  # Keras 3.5 goes on with those of the training
    assert abs(model.test_on_batch(x, y) - np.mean((expected - y) ** 2)) < 1e-5


@MORE
@on_tensorflow  # Keras has them there only
@one_pipeline
def test_several_steps_per_execution(float64):
    compiled = {"steps_per_execution": 3}
    fit_equals_one_process(residual, samples=40, bound=1e-12, compiled=compiled)


@MORE
@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
def test_weights_of_samples_count_in_the_whole_batch(reduction, float64):
    alone = built(residual)
    x, y = data(alone, 2 * PER_ROW)
    # Samples of the first row weigh more.
    weights = np.random.default_rng(1).uniform(0, 2, size=len(x)) + np.arange(len(x)) % ROWS
    expected = one_process(alone, adam(), x, y, weights=weights, reduction=reduction)
    model, optimizer = distributed(residual)
    model.compile(optimizer, keras.losses.MeanSquaredError(reduction=reduction))
    history = model.fit(
        mine(x), mine(y), PER_ROW, sample_weight=mine(weights), shuffle=False, verbose=0
    )
    if reduction != "mean":  # Keras divides what it shows by the weights
        assert history.history["loss"] == pytest.approx([expected], rel=1e-12)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@MORE
@one_pipeline
def test_masks_travel_with_their_tensors_and_embeddings_get_gradients_of_rows(float64):
    def make():
        layers = keras.layers
        words = layers.Embedding(20, 8, mask_zero=True)
        recurrent = [layers.LSTM(8, return_sequences=True, name=name) for name in ("a", "b")]
        return keras.Sequential([keras.Input((6,)), words, *recurrent, layers.Dense(3)])

    def fit(model, optimizer):
        model.compile(optimizer, "mse")  # which leaves out what is masked
        return model.fit(x, y, PER_ROW, shuffle=False, verbose=0).history["loss"]

    clipped = functools.partial(adam, global_clipnorm=0.01)
    x = np.random.default_rng(0).integers(0, 4, size=(16, 6))
    y = np.random.default_rng(1).normal(size=(16, 6, 3))
    alone, model, optimizer = built(make), built(make), clipped()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=MICRO, stages=["b"])
    assert np.allclose(fit(alone, clipped()), fit(model, optimizer), rtol=1e-12, atol=0)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@MORE
@on_tensorflow  # PyTorch's draws from one generator of the process
@one_pipeline
def test_dropout_is_that_of_one_process(float64):
    def make(**_):
        layers = keras.layers
        hidden = [each for _ in range(3) for each in (layers.Dense(16), layers.Dropout(0.4))]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(3)])

    alone = built(make)
    x, y = data(alone, 16)
    one_process(alone, adam(), x, y)
    model, optimizer = distributed(make, seed=0)
    model.compile(optimizer, "mse")
    model.fit(x, y, PER_ROW, shuffle=False, verbose=0)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@MORE
@one_pipeline
def test_several_inputs_and_outputs_in_dicts(float64):
    def make(**_):
        layers = keras.layers
        inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), name="b")}
        x = layers.Dense(8, "tanh", name="hidden")(inputs["a"])
        x = layers.Concatenate()([layers.Dense(8, "tanh", name="middle")(x), inputs["b"]])
        outputs = {"one": layers.Dense(1, name="one")(x), "two": layers.Dense(2, name="two")(x)}
        return keras.Model(inputs, outputs)

    alone = built(make)
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(8, 4)), "b": rng.normal(size=(8, 3))}
    y = {"one": rng.normal(size=(8, 1)), "two": rng.normal(size=(8, 2))}
    alone.compile(adam(), {"one": "mse", "two": "mae"})
    alone.fit(x, y, 8, shuffle=False, verbose=0)
    model, optimizer = distributed(make, seed=0)
    model.compile(optimizer, {"one": "mse", "two": "mae"})
    model.fit(x, y, 8, shuffle=False, verbose=0)
    assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@one_pipeline
def test_another_batch_on_one_rank_is_an_error_that_names_it():
    model, optimizer = distributed(residual)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    for other in ((x + hvkit.rank(), y), (x, y + hvkit.rank())):
        kind, text = error_of(functools.partial(model.train_on_batch, *other))
        assert kind is hvkit.RanksDisagreeError
        assert "rank 1 gets another batch than rank 0" in text
    kind, text = error_of(lambda: model(x, training=hvkit.rank() == 1))
    assert "rank 1 makes another call than rank 0" in text
