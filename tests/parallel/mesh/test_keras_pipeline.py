"""Keras models on TensorFlow in a pipeline, against one process in the same micro-batches.

On two ranks a pipeline of two stages; on four, started with HOROVOD_DYNAMIC_PROCESS_SETS=1, two
pipelines of two stages.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from ranks import (
    error_of,
    keras_in_float64,
    largest_difference,
    same_on_all_ranks,
    shared_folder,
)

import hvkit
from hvkit.communication.collectives import gather
from hvkit.frameworks.stage_division import sizes_of

ROWS, MICRO, PER_ROW = max(hvkit.size() // 2, 1), 4, 8
MESH = functools.partial(hvkit.Mesh, pipeline=2, data=ROWS)

needs_groups = ROWS > 1 and os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") != "1"
pytestmark = pytest.mark.skipif(
    needs_groups or hvkit.size() not in (2, 4), reason="needs 2 ranks, or 4 and groups of them"
)
one_pipeline = pytest.mark.skipif(ROWS > 1, reason="about one pipeline")


@pytest.fixture(autouse=True)
def _cleared():
    keras.backend.clear_session()


@pytest.fixture(params=["float32", "float64"])
def precision(request):
    """The largest relative difference from one process."""
    with keras_in_float64() if request.param == "float64" else contextlib.nullcontext():
        yield 1e-6 if request.param == "float32" else 1e-12


def cnn(**_):
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(8, 3, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(12, "tanh"),
            layers.Dense(3),
        ]
    )


def residual(regularizer=None, norm=False, **_):
    """Branches and residual connections between single tensors; a nested model."""
    layers = keras.layers
    inputs = keras.Input((64,))
    x = layers.Dense(16, "tanh", name="first", kernel_regularizer=regularizer)(inputs)
    x = layers.Add(name="skip")([x, layers.Dense(16, "tanh", name="branch")(x)])
    if norm:
        x = layers.BatchNormalization(name="norm")(x)
    hidden = keras.Sequential([keras.Input((16,)), layers.Dense(16, "tanh", name="in_nested")])
    x = layers.Add(name="again")([x, hidden(x)])
    if norm:
        x = layers.BatchNormalization(name="norm_again")(x)
    x = layers.Dense(16, "tanh", name="last", kernel_regularizer=regularizer)(x)
    return keras.Model(inputs, layers.Dense(3, name="out")(x))


def built(make, seed=0, **options):
    keras.utils.set_random_seed(seed)
    return make(**options)


def data(model, samples, seed=0):
    """Inputs and targets for all rows."""
    rng = np.random.default_rng(seed)
    kind = keras.config.floatx()
    x = rng.normal(size=(samples * ROWS, *model.input_shape[1:])).astype(kind)
    return x, rng.normal(size=(samples * ROWS, 3)).astype(kind)


def row():
    return hvkit.rank() // 2


def mine(array, per_row=PER_ROW):
    """This row's samples, of arrays that one process reads in batches of all rows."""
    steps = range(0, len(array), per_row * ROWS)
    return np.concatenate([array[s : s + per_row * ROWS][row() :: ROWS] for s in steps])


def in_microbatches(model, x, micro=MICRO, training=True):
    """The model's outputs in one process; each row has micro-batches of its own."""
    places, outputs = [], []
    for r in range(ROWS):
        numbers = np.arange(len(x))[r::ROWS]
        sizes = sizes_of(len(numbers), min(micro, len(numbers)))
        for part in np.split(numbers, np.cumsum(sizes)[:-1]):
            outputs.append(model(x[part], training=training))
            places.append(part)
    order = np.argsort(np.concatenate(places))
    return tf.gather(tf.concat(outputs, 0), order)


def one_process(model, optimizer, x, y, epochs=1, loss="mse", weights=None, micro=MICRO):
    """Train, and return the mean loss of the last epoch."""
    loss, size = keras.losses.get(loss), PER_ROW * ROWS
    for _ in range(epochs):
        losses = []
        for s in range(0, len(x), size):
            kind = None if weights is None else weights[s : s + size]
            with tf.GradientTape() as tape:
                predicted = in_microbatches(model, x[s : s + size], micro)
                found = keras.losses.MeanSquaredError()(y[s : s + size], predicted, kind)
                total = tf.add_n([found, *model.losses])
            gradients = tape.gradient(total, model.trainable_variables)
            optimizer.apply(gradients, model.trainable_variables)
            losses.append((float(total), len(x[s : s + size])))
    if optimizer.use_ema:
        optimizer.finalize_variable_values(model.trainable_variables)
    return np.average([v for v, _ in losses], weights=[n for _, n in losses])


def whole(model):
    """The model's weights, the same on every rank."""
    with hvkit.settled(model):
        found = model.get_weights() if hvkit.is_main() else None
    return hvkit.broadcast(found)


def adam(**options):
    return keras.optimizers.AdamW(0.01, weight_decay=0.01, **options)


def distributed(make, make_optimizer=adam, seed=None, micro=MICRO, **options):
    model = built(make, hvkit.rank() if seed is None else seed, **options)
    optimizer = make_optimizer()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=micro)
    return model, optimizer


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def equals_one_process(
    make,
    make_optimizer=None,
    samples=24,
    epochs=2,
    bound=1e-6,
    compiled=None,
    change=None,
    micro=MICRO,
    **options,
):
    """Train in ``fit`` and compare weights and loss; return both models.

    AdamW would enlarge what float32 rounds off.
    """
    make_optimizer = make_optimizer or (sgd if keras.config.floatx() == "float32" else adam)
    alone = built(make, **options)
    if change:
        change(alone)
    x, y = data(alone, samples)
    start = alone.get_weights()
    loss = one_process(alone, make_optimizer(), x, y, epochs, micro=micro)
    model = built(make, hvkit.rank(), **options)
    if hvkit.rank() == 0:
        model.set_weights(start)
    if change:
        change(model)
    optimizer = make_optimizer()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=micro)
    model.compile(optimizer, "mse", metrics=["mae"], **compiled or {})
    history = model.fit(
        mine(x), mine(y), batch_size=PER_ROW, epochs=epochs, shuffle=False, verbose=0
    ).history
    assert same_on_all_ranks([np.array(history["loss"]), np.array(history["mae"])])
    assert abs(history["loss"][-1] - loss) < 10 * bound * abs(loss)
    found = whole(model)
    assert largest_difference(found, alone.get_weights()) < bound
    assert largest_difference(found, start) > 1e-3
    return model, alone


@pytest.mark.parametrize("make", [cnn, residual])
def test_fit_trains_the_model_of_one_process(make, precision):
    equals_one_process(make, bound=precision)


def test_each_rank_holds_the_weights_and_the_state_of_its_stage_only():
    model, optimizer = distributed(residual)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    model.fit(mine(x), mine(y), batch_size=PER_ROW, verbose=0, shuffle=False)
    sizes = [int(np.prod(v._value.shape)) for v in model.weights]
    held = [int(np.prod(v._value.shape)) for v in optimizer.variables[2:]]
    both = np.sum(gather("test", [sum(sizes), sum(held)])[:2], axis=0)
    assert 0 < sum(sizes) < model.count_params()
    assert both.tolist() == [model.count_params(), 2 * model.count_params()]


def test_a_model_without_weights_is_built_in_parts():
    def make(**_):
        layers = keras.layers
        return keras.Sequential([*(layers.Dense(8, "tanh") for _ in range(3)), layers.Dense(3)])

    with keras_in_float64():
        alone = built(make)
        alone.build((None, 64))
        x, y = data(alone, PER_ROW)
        start = alone.get_weights()
        one_process(alone, adam(), x, y)
        model, optimizer = distributed(make)
        model.compile(optimizer, "mse")
        model.predict(x, verbose=0)
        assert all(map(np.array_equal, whole(model), start))
        held = sum(int(np.prod(v._value.shape)) for v in model.weights)
        assert 0 < held < model.count_params()
        model.fit(mine(x), mine(y), batch_size=PER_ROW, shuffle=False, verbose=0)
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@pytest.mark.parametrize(
    "options",
    [{"global_clipnorm": 0.1}, {"clipnorm": 0.05}, {"clipvalue": 0.01}],
    ids=lambda options: next(iter(options)),
)
def test_clipping_is_by_the_gradients_of_all_stages(options):
    make = functools.partial(keras.optimizers.SGD, 0.5, **options)
    with keras_in_float64():
        equals_one_process(residual, make, bound=1e-12)


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
def test_settings_of_optimizers(make):
    with keras_in_float64():
        equals_one_process(residual, make, samples=32, bound=1e-12)


def test_regularisation_of_all_stages_is_in_the_loss_and_the_gradients(precision):
    l2 = keras.regularizers.L2(0.05)
    model, _ = equals_one_process(residual, bound=precision, regularizer=l2)
    x, y = data(model, PER_ROW)
    shown = model.evaluate(mine(x), mine(y), batch_size=PER_ROW, verbose=0)[0]
    first, last = (w for i, w in enumerate(whole(model)) if i in (0, 6))
    predicted = model.predict(x, verbose=0)
    expected = np.mean((predicted - y) ** 2) + 0.05 * (np.sum(first**2) + np.sum(last**2))
    assert abs(shown - expected) < 1e-5 * expected


@one_pipeline
def test_batch_norm_keeps_the_statistics_of_micro_batches():
    with keras_in_float64():
        # With two samples in a micro-batch batch norm gives signs, which have no gradients.
        model, alone = equals_one_process(residual, sgd, bound=1e-12, micro=2, norm=True)
        x, _ = data(model, PER_ROW)
        predicted = model.predict(x, verbose=0)
        assert largest_difference([predicted], [alone.predict(x, verbose=0)]) < 1e-12
        for each in (model, alone):  # norm now uses its statistics, and keeps them
            freeze("norm")(each)
        expected, found = in_microbatches(alone, x, 2), model(x, training=True)
        assert largest_difference([found.numpy()], [expected.numpy()]) < 1e-12
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


def freeze(*names):
    def change(model):
        for name in names:
            model.get_layer(name).trainable = False

    return change


@pytest.mark.parametrize(
    "names", [["branch", "last"], ["first", "branch"], ["last", "out"]], ids=" ".join
)
def test_frozen_layers_stay_as_they_are(names):
    with keras_in_float64():
        equals_one_process(residual, bound=1e-12, change=freeze(*names))


def test_a_frozen_first_stage_counts_steps_all_the_same():
    def change(model):
        for layer in model.layers:
            layer.trainable = layer.name in ("last", "out")

    with keras_in_float64():
        model, _ = equals_one_process(
            residual,
            functools.partial(adam, global_clipnorm=0.1, gradient_accumulation_steps=2),
            bound=1e-12,
            change=change,
        )
    assert int(model.optimizer.iterations) == 3


def test_a_first_stage_without_weights():
    def make(**_):
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((64,)), layers.Reshape((64,)), layers.Dense(8, name="a"), layers.Dense(3)]
        )

    with keras_in_float64():
        equals_one_process(make, bound=1e-12)


def test_an_uneven_last_batch():
    with keras_in_float64():
        equals_one_process(residual, samples=PER_ROW + 3, bound=1e-12)


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
    assert abs(model.test_on_batch(x, y) - np.mean((expected - y) ** 2)) < 1e-5


@pytest.mark.parametrize("steps", [1, 3])
def test_several_steps_per_execution(steps):
    with keras_in_float64():
        equals_one_process(
            residual, samples=40, bound=1e-12, compiled={"steps_per_execution": steps}
        )


@one_pipeline
def test_weights_of_samples_count_in_the_whole_batch():
    with keras_in_float64():
        alone = built(residual)
        x, y = data(alone, 16)
        weights = np.random.default_rng(1).uniform(0, 2, size=len(x))
        one_process(alone, adam(), x, y, weights=weights)
        model, optimizer = distributed(residual, seed=0)
        model.compile(optimizer, "mse")
        model.fit(x, y, PER_ROW, sample_weight=weights, shuffle=False, verbose=0)
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@one_pipeline
def test_masks_travel_with_their_tensors_and_embeddings_get_gradients_of_rows():
    def make():
        layers = keras.layers
        words = layers.Embedding(20, 8, mask_zero=True)
        recurrent = [layers.LSTM(8, return_sequences=True, name=name) for name in ("a", "b")]
        return keras.Sequential([keras.Input((6,)), words, *recurrent, layers.Dense(3)])

    def fit(model, optimizer):
        model.compile(optimizer, "mse")  # which leaves out what is masked
        return model.fit(x, y, PER_ROW, shuffle=False, verbose=0).history["loss"]

    clipped = functools.partial(adam, global_clipnorm=0.01)
    with keras_in_float64():
        x = np.random.default_rng(0).integers(0, 4, size=(16, 6))
        y = np.random.default_rng(1).normal(size=(16, 6, 3))
        alone, model, optimizer = built(make), built(make), clipped()
        hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=MICRO, stages=["b"])
        assert np.allclose(fit(alone, clipped()), fit(model, optimizer), rtol=1e-12, atol=0)
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@one_pipeline
def test_dropout_is_that_of_one_process():
    def make(**_):
        layers = keras.layers
        hidden = [each for _ in range(3) for each in (layers.Dense(16), layers.Dropout(0.4))]
        return keras.Sequential([keras.Input((64,)), *hidden, layers.Dense(3)])

    with keras_in_float64():
        alone = built(make)
        x, y = data(alone, 16)
        one_process(alone, adam(), x, y)
        model, optimizer = distributed(make, seed=0)
        model.compile(optimizer, "mse")
        model.fit(x, y, PER_ROW, shuffle=False, verbose=0)
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@one_pipeline
def test_several_inputs_and_outputs_in_dicts():
    def make(**_):
        layers = keras.layers
        inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((3,), name="b")}
        x = layers.Dense(8, "tanh", name="hidden")(inputs["a"])
        x = layers.Concatenate()([layers.Dense(8, "tanh", name="middle")(x), inputs["b"]])
        outputs = {"one": layers.Dense(1, name="one")(x), "two": layers.Dense(2, name="two")(x)}
        return keras.Model(inputs, outputs)

    with keras_in_float64():
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
def test_a_loop_with_a_tape_may_clip_by_the_norm_of_all_stages():
    def loop(model, optimizer, compute, x, y):
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((compute(model, x) - y) ** 2) + tf.add_n(model.losses)
            gradients = tape.gradient(loss, model.trainable_variables)
            gradients, norm = tf.clip_by_global_norm(gradients, 0.05)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return float(norm), float(loss)

    l2 = keras.regularizers.L2(0.05)
    with keras_in_float64():
        alone = built(residual, regularizer=l2)
        x, y = data(alone, PER_ROW)
        expected = loop(alone, adam(), in_microbatches, x, y)
        model, optimizer = distributed(residual, seed=0, regularizer=l2)
        found = loop(model, optimizer, lambda model, x: model(x, training=True), x, y)
        assert np.allclose(found, expected, rtol=1e-12, atol=0)
        assert largest_difference(whole(model), alone.get_weights()) < 1e-12


@one_pipeline
def test_a_second_gradient_through_one_pass_is_an_error():
    model, _ = distributed(residual)
    x, _ = data(model, PER_ROW)
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(model(x, training=True))
    tape.gradient(loss, model.trainable_variables)
    kind, text = error_of(lambda: tape.gradient(loss, model.trainable_variables))
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
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(tf.reduce_sum(model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    bad = [g * np.inf if i == 0 and hvkit.rank() == 0 else g for i, g in enumerate(gradients)]
    bad = bad if hvkit.rank() == 0 else [gradients[0] * np.inf, *gradients[1:]]
    optimizer.apply(bad, model.trainable_variables)
    assert all(map(np.array_equal, whole(model), before))
    optimizer.apply(gradients, model.trainable_variables)
    assert not all(map(np.array_equal, whole(model), before))
    assert same_on_all_ranks([np.array(optimizer.dynamic_scale)])


def test_callbacks_save_the_whole_model_and_stop_all_ranks(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model, optimizer = distributed(residual, seed=0)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    saved, files = str(folder / "best.keras"), str(folder / "{epoch}.weights.h5")
    callbacks = [
        keras.callbacks.ModelCheckpoint(saved, monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(files, save_weights_only=True),
        keras.callbacks.EarlyStopping(
            "loss", mode="max", patience=1, restore_best_weights=True, start_from_epoch=1
        ),
    ]
    history = model.fit(
        mine(x),
        mine(y),
        batch_size=PER_ROW,
        epochs=9,
        verbose=0,
        shuffle=False,
        callbacks=callbacks,
    ).history
    assert len(set(gather("test", str(history)))) == 1
    assert len(history["loss"]) == 3  # the loss falls, so the first counted epoch stays the best
    weights = whole(model)
    loaded = keras.models.load_model(saved)
    assert loaded.optimizer.iterations == 3
    alike = built(residual)
    alike.load_weights(folder / "2.weights.h5")
    assert all(map(np.array_equal, alike.get_weights(), weights))
    assert not all(map(np.array_equal, loaded.get_weights(), weights))
    hvkit.barrier()


def test_rank_0_saves_the_whole_model_where_it_is_settled(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    model, optimizer = distributed(residual, seed=0)
    kind, text = error_of(model.get_weights)
    assert (kind, "inside `with hvkit.settled(model):`" in text) == (ValueError, True)
    expected = built(residual).get_weights()
    with hvkit.settled(model, optimizer):
        if hvkit.is_main():
            model.save(folder / "a.keras")
            model.save_weights(folder / "a.weights.h5")
    hvkit.barrier()
    loaded = keras.models.load_model(folder / "a.keras").get_weights()
    assert all(map(np.array_equal, loaded, expected))
    other, _ = distributed(residual, seed=5)
    other.load_weights(folder / "a.weights.h5")
    assert all(map(np.array_equal, whole(other), expected))
    other.set_weights([2 * w for w in expected])
    assert all(np.array_equal(a, 2 * b) for a, b in zip(whole(other), expected, strict=True))


class Run:
    """A script run from its start; every run begins with other weights."""

    def __init__(self, folder, seed, mesh):
        self.model, self.optimizer = built(residual, seed * 10 + hvkit.rank(), norm=True), adam()
        hvkit.distribute(
            self.model,
            self.optimizer,
            mesh=mesh,
            microbatches=MICRO if mesh and mesh.pipeline > 1 else None,
        )
        self.mesh = mesh
        self.model.compile(self.optimizer, "mse", run_eagerly=True)
        self.checkpoint = hvkit.Checkpoint(folder, model=self.model, optimizer=self.optimizer)

    def train(self, until, save_at=None):
        x, y = data(self.model, PER_ROW * 6)
        rows = 1 if self.mesh else 2 * ROWS
        size = PER_ROW * ROWS
        for step in range(self.checkpoint.restore().step, until):
            batch = slice(step * size, (step + 1) * size)
            part = row() if self.mesh else hvkit.rank()
            self.model.train_on_batch(
                x[batch][part :: rows * (ROWS if self.mesh else 1)],
                y[batch][part :: rows * (ROWS if self.mesh else 1)],
            )
            if step + 1 == save_at:
                self.checkpoint.save(epoch=0, step=step + 1)
        return self

    def state(self):
        with hvkit.settled(self.model, self.optimizer):
            if hvkit.is_main():
                both = [*self.model.weights, *self.optimizer.variables]
                found = [np.array(v.numpy()) for v in both]
            else:
                found = None
        return hvkit.broadcast(found)


def test_a_run_that_resumes_ends_as_one_that_never_stopped(tmp_path_factory):
    through = Run(shared_folder(tmp_path_factory), 1, MESH()).train(5).state()
    folder = shared_folder(tmp_path_factory)
    Run(folder, 2, MESH()).train(3, save_at=3)
    resumed = Run(folder, 3, MESH()).train(5)
    assert all(map(np.array_equal, resumed.state(), Run(folder, 4, MESH()).train(5).state()))
    assert np.any(through[0] != Run(folder, 5, MESH()).train(3).state()[0])


def test_a_checkpoint_goes_from_one_mesh_to_another(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)
    saved = Run(folder, 2, MESH()).train(2, save_at=2).state()
    plain = Run(folder, 3, None).train(2)
    assert all(map(np.array_equal, plain.state(), saved))
    plain.train(4, save_at=4)
    again = Run(folder, 4, MESH()).train(4)
    assert all(map(np.array_equal, again.state(), plain.state()))


@one_pipeline
def test_another_batch_on_one_rank_is_an_error_that_names_it():
    model, optimizer = distributed(residual)
    model.compile(optimizer, "mse")
    x, y = data(model, PER_ROW)
    for other in ((x + hvkit.rank(), y), (x, y + hvkit.rank())):
        kind, text = error_of(functools.partial(model.train_on_batch, *other))
        assert kind is hvkit.RanksDisagreeError
        assert "rank 1 makes another batch than rank 0" in text
    kind, text = error_of(lambda: model(x, training=hvkit.rank() == 1))
    assert "rank 1 makes another call than rank 0" in text


def test_rank_0_says_where_it_has_cut(capfd):
    distributed(residual)
    said = "".join(gather("test", capfd.readouterr().err))
    assert "stage 0 (rank 0 of the pipeline)" in said
    assert "% of the weights" in said
    assert "; cut after first" in said


def test_stages_names_the_layer_after_which_to_cut(capfd):
    model, optimizer = built(residual), adam()
    hvkit.distribute(model, optimizer, mesh=MESH(), microbatches=2, stages=["again"])
    assert "; cut after again" in "".join(gather("test", capfd.readouterr().err))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


def shared(**_):
    inputs, dense = keras.Input((8,)), keras.layers.Dense(8, name="twice")
    return keras.Model(inputs, dense(keras.layers.Dense(8, name="between")(dense(inputs))))


def with_activity(**_):
    layers = keras.layers
    active = layers.Dense(8, name="active", activity_regularizer="l2")
    return keras.Sequential([keras.Input((8,)), active, layers.Dense(3)])


def with_synchronised(**_):
    layers = keras.layers
    norm = layers.BatchNormalization(synchronized=True, name="norm")
    return keras.Sequential([keras.Input((8,)), norm, layers.Dense(3)])


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (Subclassed, {}, "has a call() of its own"),
        (shared, {}, "twice is called several times, and must be in one stage"),
        (with_activity, {}, "layer 'active' has an activity_regularizer"),
        (with_synchronised, {}, "layer 'norm' has synchronized=True"),
        (residual, {"stages": ["branch"]}, "cannot be cut after 'branch', only after first, skip"),
        (residual, {"stages": ["first", "skip"]}, "names 2 cuts, but a pipeline of 2 stages has 1"),
        (residual, {"stages": "layers"}, "stages must be 'flops' or 'bytes', or a list of"),
        (residual, {"strategy": hvkit.LocalSGD(2)}, "or write the model as a torch.nn.Module"),
    ],
)
def test_what_cannot_be_in_a_pipeline_is_refused_with_the_reason(make, options, message):
    model = make()
    kind, text = error_of(lambda: hvkit.distribute(model, adam(), mesh=MESH(), **options))
    assert kind is ValueError
    assert message in text


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"tensor": 2}, "write the model as a torch.nn.Module, or use the pipeline axis"),
        ({"shard": 2}, "hvkit.ShardedOptimizer() without a mesh"),
    ],
)
def test_other_axes_are_refused_with_what_to_use(axes, message):
    mesh = hvkit.Mesh(data=ROWS, **axes)
    kind, text = error_of(lambda: hvkit.distribute(built(residual), adam(), mesh=mesh))
    assert kind is ValueError
    assert message in text


@one_pipeline
def test_a_call_in_a_graph_is_refused():
    model, _ = distributed(residual)
    x, _ = data(model, PER_ROW)
    kind, text = error_of(lambda: tf.function(model)(tf.constant(x)))
    assert kind is ValueError
    assert "leave tf.function out around the call" in text


@one_pipeline
def test_a_loss_that_a_layer_adds_is_refused():
    class Adding(keras.layers.Layer):
        def call(self, x):
            self.add_loss(keras.ops.mean(x))
            return x

    def make(**_):
        layers = keras.layers
        adds = Adding(name="adding_1"), Adding(name="adding_2")
        return keras.Sequential(
            [keras.Input((8,)), adds[0], layers.Dense(8), layers.Dense(3), adds[1]]
        )

    model, _ = distributed(make)
    x, _ = data(model, PER_ROW)
    kind, text = error_of(lambda: model(x))
    assert kind is (hvkit.HvkitError if hvkit.rank() else ValueError)
    assert "adds a loss of its own with add_loss()" in text
    kind, text = error_of(lambda: model(x))
    assert "adds a loss of its own with add_loss()" in text
