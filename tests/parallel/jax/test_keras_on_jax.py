"""Keras on JAX: ``fit``, ``evaluate`` and ``predict`` on ranks, against one process."""

import itertools
import json
import types

import keras
import numpy as np
import pytest
from cases import MORE, cases, each_once
from keras import layers

import hvkit
from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.arrays import gathered
from hvkit.functions.pickling import host_copy
from hvkit.monitor import measurements
from hvkit.monitor.keras import MeansOfSteps
from hvkit.watch.calls import current_call

ROWS, BATCH, EPOCHS = 192, 24, 2


def data():
    random = np.random.default_rng(0)
    return random.normal(size=(ROWS, 6, 6, 1)).astype("float32"), random.integers(0, 4, ROWS)


def part(rows):
    """This rank's rows: those of each global batch of which it has an equal part."""
    own = BATCH // hvkit.size()
    starts = range(hvkit.rank() * own, ROWS, BATCH)
    return np.concatenate([rows[start : start + own] for start in starts])


def mlp(built=True):
    dense = [layers.Flatten(), layers.Dense(24, "relu"), layers.Dense(4, "softmax")]
    return keras.Sequential([keras.Input((6, 6, 1)), *dense] if built else dense)


def cnn():
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(6, 3, activation="relu", use_bias=False),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3),
            layers.Dense(4, "softmax"),
        ]
    )


def fitted(model, optimizer, strategy=None, **options):
    """The model after ``fit``, with its losses: on the ranks if there is a strategy."""
    x, y = data()
    if strategy is not None:
        model, optimizer = hvkit.distribute(model, optimizer, strategy=strategy, **options)
        x, y = part(x), part(y)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    size = BATCH if strategy is None else BATCH // hvkit.size()
    history = model.fit(x, y, batch_size=size, epochs=EPOCHS, shuffle=False, verbose=0)
    return model, history.history["loss"]


def weights(model):
    return [np.asarray(gathered(v.value)) for v in model.weights]


def assert_same_weights(model, alone, bound=1e-6):
    for mine, theirs in zip(weights(model), weights(alone), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=bound)


def distributed_mlp(**options):
    """A model whose ranks train together with SGD, compiled."""
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.1), **options)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


MODELS = {
    "mlp": (mlp, lambda: keras.optimizers.Adam(1e-3), 1e-6),
    "built in fit": (lambda: mlp(built=False), lambda: keras.optimizers.Adam(1e-3), 1e-6),
    "cnn": (cnn, lambda: keras.optimizers.SGD(0.05), 1e-5),
}


@pytest.mark.parametrize(
    ("name", "strategy"), cases(each_once(MODELS, [hvkit.Synchronous(), hvkit.FullyShard()]))
)
def test_fit_trains_the_model_of_one_process(name, strategy):
    make, optimizer, bound = MODELS[name]
    keras.utils.set_random_seed(0)
    alone, expected = fitted(make(), optimizer())
    keras.utils.set_random_seed(0 if hvkit.rank() == 0 else 7)  # ranks begin with rank 0's
    model, losses = fitted(make(), optimizer(), strategy)
    np.testing.assert_allclose(losses, expected, atol=1e-6)
    assert_same_weights(model, alone, bound)
    largest = max((v.value for v in model.trainable_variables), key=lambda array: array.size)
    divided = isinstance(strategy, hvkit.FullyShard)
    assert largest.size // largest.addressable_data(0).size == (hvkit.size() if divided else 1)


def test_updates_multiply_the_rate_and_warm_up_and_the_user_s_rate_stays():
    class WarmUp(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            step = batch + 8 * self.epochs
            by = min(step / 6, 1)
            self.model.optimizer.learning_rate = 0.02 * (1 + (hvkit.size() - 1) * by)

        def on_epoch_begin(self, epoch, logs=None):
            self.epochs = epoch

    keras.utils.set_random_seed(0)
    alone, (x, y) = mlp(), data()
    alone.compile(keras.optimizers.SGD(0.02), "sparse_categorical_crossentropy")
    alone.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=[WarmUp()])
    keras.utils.set_random_seed(hvkit.rank())
    model, optimizer = hvkit.distribute(
        mlp(), keras.optimizers.SGD(0.02), lr_scaling="linear", warmup_steps=6
    )
    model.compile(optimizer, "sparse_categorical_crossentropy")
    size = BATCH // hvkit.size()
    model.fit(part(x), part(y), batch_size=size, epochs=2, shuffle=False, verbose=0)
    assert_same_weights(model, alone)
    assert float(optimizer.learning_rate) == pytest.approx(0.02)


@MORE
def test_averages_that_ranks_divide_become_the_weights_of_one_process():
    keras.utils.set_random_seed(0)
    alone, _ = fitted(mlp(), keras.optimizers.SGD(0.05, use_ema=True))
    keras.utils.set_random_seed(hvkit.rank())
    optimizer = keras.optimizers.SGD(0.05, use_ema=True)
    model, _ = fitted(mlp(), optimizer, hvkit.ShardedOptimizer())
    assert_same_weights(model, alone)


class StopAfter(keras.callbacks.Callback):
    def __init__(self, steps):
        super().__init__()
        self.left = steps

    def on_train_batch_begin(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@MORE
def test_fit_resumes_in_the_middle_of_an_epoch(tmp_path):
    folder = hvkit.broadcast(tmp_path)
    x, y = map(part, data())

    def run(folder, *callbacks):
        model, optimizer = hvkit.distribute(cnn(), keras.optimizers.Adam(1e-3))
        model.compile(optimizer, "sparse_categorical_crossentropy")
        checkpoint = hvkit.Checkpoint(folder, model=model, optimizer=optimizer)
        start = checkpoint.restore()
        calls = [checkpoint.callback(every=1), *callbacks]
        options = {"batch_size": BATCH // hvkit.size(), "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=2, initial_epoch=start.epoch, callbacks=calls, **options)
        return model, start

    keras.utils.set_random_seed(1)
    whole, _ = run(folder / "whole")
    keras.utils.set_random_seed(1)
    steps = ROWS // BATCH
    with pytest.raises(KeyboardInterrupt):
        run(folder / "stopped", StopAfter(steps + 2))
    resumed, start = run(folder / "stopped")
    assert (start.epoch, start.step, start.batches) == (1, steps + 2, 2)
    for mine, theirs in zip(weights(resumed), weights(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_options_without_keras_on_jax_are_refused_with_the_replacement():
    model = distributed_mlp()
    with pytest.raises(ValueError, match="was passed to hvkit"):
        hvkit.distribute(model, keras.optimizers.SGD(0.1))
    another = mlp()
    for option, value, instead in (
        ("accumulate", 2, "gradient_accumulation_steps"),
        ("on_nonfinite", "skip", "TerminateOnNaN"),
    ):
        with pytest.raises(ValueError, match=f"{option}=.*{instead}"):
            hvkit.distribute(another, keras.optimizers.SGD(0.1), **{option: value})
    with (
        keras.distribution.DataParallel().scope(),
        pytest.raises(ValueError, match="leave set_distribution out"),
    ):
        hvkit.distribute(another, keras.optimizers.SGD(0.1))


@MORE
def test_rank_0_alone_writes_the_files_of_callbacks_and_all_ranks_stop_together(tmp_path, capsys):
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == hvkit.size() - 1 - hvkit.rank()

    x, y = map(part, data())
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras", verbose=1)
    history = distributed_mlp().fit(x, y, callbacks=[saved, Stop()], epochs=9, verbose=2)
    assert len(history.epoch) == 1  # the last rank stops first
    files = {file.name for file in tmp_path.iterdir()}  # each rank has a folder of its own
    assert files == ({"1.keras"} if hvkit.is_main() else set())
    assert bool(capsys.readouterr().out) == hvkit.is_main()


@MORE
def test_callbacks_that_read_the_weights_are_refused_where_a_rank_has_a_part(tmp_path):
    x, y = map(part, data())
    saved = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    best = keras.callbacks.EarlyStopping("loss", restore_best_weights=True)
    divided = distributed_mlp(strategy=hvkit.FullyShard())
    for reads in (saved, best):
        with pytest.raises(ValueError, match=r"holds a part: use the callback\(\) of hvkit"):
            divided.fit(x, y, callbacks=[reads])
    states = distributed_mlp(strategy=hvkit.ShardedOptimizer())  # has whole weights
    assert len(states.fit(x, y, callbacks=[best], verbose=0).epoch) == 1
    with pytest.raises(ValueError, match="BackupAndRestore does not work on several ranks"):
        states.fit(x, y, callbacks=[keras.callbacks.BackupAndRestore(tmp_path)])


@MORE
def test_other_models_stay_a_rank_s_own():
    model = distributed_mlp()
    if hvkit.is_main():
        other = mlp()
        other.set_weights(weights(model))
        x, y = data()
        other.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        other.fit(x[:8], y[:8], verbose=0)
        assert other.predict(x[:8], verbose=0).shape == (8, 4)
    model.fit(*map(part, data()), batch_size=8, verbose=0)
    # The names of its layers have other numbers on rank 0.
    later = distributed_mlp(check_every=1)
    x, y = map(part, data())
    for _ in range(3):
        later.train_on_batch(x[:4], y[:4])


@MORE
def test_ranks_with_other_numbers_of_batches_are_named():
    x, y = data()
    model = distributed_mlp()
    rows = 16 if hvkit.rank() == 1 else 20
    with pytest.raises(hvkit.RanksDisagreeError, match="steps per epoch in rank order"):
        model.fit(x[:rows], y[:rows], batch_size=4, epochs=2, verbose=0)
    batches_of_rank = ((x[i : i + 4], y[i : i + 4]) for i in range(0, rows, 4))
    with pytest.raises(hvkit.RanksDisagreeError, match=r"at another point of fit \("):
        model.fit(batches_of_rank, epochs=2, verbose=0)


def by_batches(rows, size):
    """The rows in batches from a generator, whose number Keras does not know; one has no rows."""
    ends = [0, size, *range(size, len(rows[0]), size), len(rows[0])]
    return (tuple(each[i:end] for each in rows) for i, end in itertools.pairwise(ends))


@pytest.mark.parametrize(
    ("strategy", "generator", "steps", "numbers", "size"),
    cases(
        [
            (hvkit.FullyShard(), False, 1, [10, 11, 12], 16),
            (hvkit.ShardedOptimizer(), False, 1, [0, 8, 3], 4),
            (hvkit.Synchronous(), True, 1, [21, 8, 3], 4),
            (hvkit.Synchronous(), False, 2, [21, 8, 3], 4),
        ],
        2,
    ),
)
def test_evaluate_has_the_metrics_of_all_ranks_and_predict_this_rank_s_rows(
    strategy, generator, steps, numbers, size
):
    """Which may be in other numbers of batches on each rank."""
    x, y = data()
    optimizer = keras.optimizers.SGD(0.1)
    model, _ = hvkit.distribute(mlp(), optimizer, strategy=strategy)
    loss, metric = "sparse_categorical_crossentropy", keras.metrics.SparseCategoricalAccuracy
    model.compile(optimizer, loss, metrics=[metric()], steps_per_execution=steps)
    ends = np.cumsum([0, *numbers[: hvkit.size()]])
    own = slice(*ends[hvkit.rank() : hvkit.rank() + 2])
    model.train_on_batch(x[:8], y[:8])
    one = mlp()
    one.set_weights(weights(model))
    one.compile("sgd", loss, metrics=[metric()])
    expected = one.evaluate(x[: ends[-1]], y[: ends[-1]], batch_size=64, verbose=0)
    rows = x[own], y[own]
    sized = {} if generator else {"batch_size": size}
    for _ in range(2):
        given = [by_batches(rows, size)] if generator else rows
        np.testing.assert_allclose(model.evaluate(*given, verbose=0, **sized), expected, rtol=1e-5)
    if steps == 1:
        given = by_batches(rows[:1], size) if generator else rows[0]
        probabilities = model.predict(given, verbose=0, **sized)
        np.testing.assert_allclose(probabilities, np.asarray(one(rows[0])), atol=1e-6)
        assert probabilities.shape == (numbers[hvkit.rank()], 4)
    if all(numbers):
        options = {"batch_size": 8, "epochs": 2, "verbose": 0}
        history = model.fit(x[:8], y[:8], validation_data=rows, **options)
        assert len(history.history["val_loss"]) == 2


@MORE
@pytest.mark.parametrize("method", ["evaluate", "predict"])
def test_a_rank_that_stops_to_evaluate_is_named(method, monkeypatch):
    class Stop(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            calls.add(current_call())
            self.model.stop_evaluating = hvkit.rank() == 1

        def on_predict_batch_end(self, batch, logs=None):
            calls.add(current_call())
            self.model.stop_predicting = hvkit.rank() == 1

    calls = set()

    monkeypatch.setattr(batches, "_checks", [])  # the error leaves the model without weights
    x, y = data()
    model = distributed_mlp()
    given = [x[:8]] if method == "predict" else [x[:8], y[:8]]
    with pytest.raises(hvkit.RanksDisagreeError, match=f"{method} has stopped on rank 1 alone"):
        getattr(model, method)(*given, batch_size=4, verbose=0, callbacks=[Stop()])
    assert calls == {method}


def test_ranks_with_other_steps_to_evaluate_are_named():
    x, y = data()
    model = distributed_mlp()
    with pytest.raises(hvkit.RanksDisagreeError, match=r"the same steps .* got \[1, 2"):
        model.evaluate(x, y, batch_size=4, steps=1 + hvkit.rank(), verbose=0)


def test_a_keras_that_is_too_old_is_refused(monkeypatch):
    monkeypatch.setattr(keras, "__version__", "3.11.3")
    with pytest.raises(hvkit.HvkitError, match=r"needs Keras 3\.12 or .*3\.11\.3 is installed"):
        hvkit.distribute(mlp(), keras.optimizers.SGD(0.1))


def test_strategies_of_models_apart_are_refused_with_what_to_take():
    with pytest.raises(ValueError, match=r"not for Keras on JAX.*KERAS_BACKEND=torch"):
        hvkit.distribute(mlp(), keras.optimizers.SGD(0.1), strategy=hvkit.LocalSGD(every=2))


def test_an_array_of_which_a_rank_has_a_part_says_how_to_return_it():
    with pytest.raises(TypeError, match=r"shape \(\d+, 2\) is divided among the ranks"):
        host_copy(hvkit.batch(np.ones((2, 2))))


@MORE
def test_a_loop_of_the_script_s_own_divides_what_its_optimizer_builds():
    model, optimizer = hvkit.distribute(
        mlp(), keras.optimizers.Adam(1e-3), strategy=hvkit.ShardedOptimizer()
    )
    optimizer.build(model.trainable_variables)
    moments = [v.value for v in optimizer.variables if "momentum" in v.path and v.value.size > 100]
    assert moments[0].size // moments[0].addressable_data(0).size == hvkit.size()


@MORE
@pytest.mark.parametrize("steps", [1, 2])
def test_a_monitor_records_the_means_of_the_steps_of_fit(tmp_path, steps, monkeypatch):
    monkeypatch.setattr(batches, "_checks", [])  # of this model alone
    # A clock on which steps take no time, and a wait for what they have begun takes 100 seconds.
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)

    def wait_and_read(self, logs, read=MeansOfSteps.read):
        clock.now += 100
        return read(self, logs)

    monkeypatch.setattr(measurements, "time", clock)
    monkeypatch.setattr(MeansOfSteps, "read", wait_and_read)
    folder = hvkit.broadcast(tmp_path)
    x, y = map(part, data())
    monitor = hvkit.Monitor(folder, every=4)
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.1), monitor=monitor)
    loss = "sparse_categorical_crossentropy"
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=steps)
    history = model.fit(x, y, batch_size=BATCH // hvkit.size(), epochs=2, verbose=0).history
    monitor.close()
    text = (folder / "metrics.jsonl").read_text() if hvkit.is_main() else ""
    lines = [json.loads(line) for line in hvkit.broadcast(text).splitlines()]
    records = [line for line in lines if "samples_per_second" in line]
    # Four steps each, less those in which XLA compiles.
    assert [each["steps"] for each in records] == [4 - steps, 4, 4, 4]
    assert all(100 <= each["seconds"]["step"] * each["steps"] < 150 for each in records)
    logged = [line["logged"] for line in lines if "logged" in line]
    for name in ("loss", "accuracy"):
        means = [(a[name] + b[name]) / 2 for a, b in zip(records[::2], records[1::2], strict=True)]
        assert means == pytest.approx(history[name], rel=1e-5)
        assert [each[f"epoch_{name}"] for each in logged] == pytest.approx(history[name])
