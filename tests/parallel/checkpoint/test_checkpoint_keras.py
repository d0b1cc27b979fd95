"""Keras: a run that is stopped and resumed is, bit for bit, the run that was never stopped."""

import functools
import random
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import mse
from packaging.version import Version
from ranks import same_on_all_ranks, shared_folder

import hvkit
from hvkit.checkpoint import Checkpoint

pytestmark = pytest.mark.two_ranks

layers = keras.layers

# Keras 3.5 on TensorFlow also shuffles a PyDataset with tf.data, whose state nothing can save, and
# leaves out the last steps of an epoch if they are fewer than steps_per_execution.
OLD = Version(keras.__version__) < Version("3.6")


def model(seed):
    """A model with its own dropout on each rank; every run starts with other weights."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed * 10 + hvkit.rank())
    inner = layers.Dense(16, "tanh"), layers.BatchNormalization(), layers.Dropout(0.3)
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(4)])


def batch(step):
    rng = np.random.default_rng([step, hvkit.rank()])
    return tf.constant(rng.normal(size=(6, 8)), tf.float32)


def state(model, optimizer):
    variables = [*model.variables, *optimizer.variables]
    return [np.array(v.numpy()) for v in variables]


def equal(mine, theirs):
    return all(a.tobytes() == b.tobytes() for a, b in zip(mine, theirs, strict=True))


def begin(folder, seed, optimizer=None, callbacks=(), **compiled):
    """A model of all ranks, compiled, its checkpoint, and where that has resumed it."""
    optimizer = optimizer or keras.optimizers.Adam(0.01)
    net, _ = hvkit.distribute(model(seed), optimizer)
    net.compile(optimizer, "mse", **({"run_eagerly": True} | compiled))
    parts = {"callbacks": callbacks} if callbacks else {}
    checkpoint = Checkpoint(folder, keep=None, model=net, optimizer=optimizer, **parts)
    return net, checkpoint, checkpoint.restore()


def run_loop(folder, seed, until, save_at=None):
    net, optimizer = hvkit.distribute(
        model(seed), keras.optimizers.Adam(0.01), lr_scaling="linear", warmup_steps=8
    )
    checkpoint = Checkpoint(folder, model=net, optimizer=optimizer)
    start = checkpoint.restore()

    @tf.function
    def train_step(x, noise):
        noise = noise + keras.random.normal((1,))  # Keras's global seed generator
        with tf.GradientTape() as tape:
            loss = mse(x[:, :4], net(x + 0.1 * noise, training=True))
        variables = net.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    generator = tf.random.get_global_generator()
    for step in range(start.step, until):
        noise = generator.normal((1,)) + random.random() + np.random.normal()
        train_step(batch(step), tf.cast(noise, tf.float32))
        if step + 1 == save_at:
            checkpoint.save(epoch=0, step=step + 1)
    return state(net, optimizer), net


@MORE
def test_a_resumed_custom_loop_is_the_one_that_was_never_stopped(folder):
    whole, _ = run_loop(folder, 1, until=4, save_at=2)
    resumed, net = run_loop(folder, 2, until=4)
    assert equal(resumed, whole)
    assert same_on_all_ranks([w.numpy() for w in net.trainable_weights])


class Data(keras.utils.PyDataset):
    """Batches that ``fit`` shuffles with Python's random state."""

    def __len__(self):
        return 5

    def __getitem__(self, i):
        x = batch(i).numpy()
        return x, x[:, :4]


def run_watched(folder, seed, file):
    """Fit until it stops early; no epoch counts as better than the first."""
    watching = [
        keras.callbacks.ReduceLROnPlateau("loss", patience=2, cooldown=1, min_delta=1e9),
        keras.callbacks.EarlyStopping("loss", 1e9, patience=5, restore_best_weights=True),
        keras.callbacks.ModelCheckpoint(str(file), "loss", save_best_only=True, mode="max"),
    ]
    net, checkpoint, start = begin(folder, seed, callbacks=watching)
    history = net.fit(
        Data(), epochs=20, initial_epoch=start.epoch, verbose=0, shuffle=not OLD,
        callbacks=[*watching, checkpoint.callback()],
    )  # fmt: skip
    return state(net, net.optimizer), history


@MORE
def test_callbacks_that_watch_a_metric_continue_their_counts(folder, tmp_path):
    """Rates fall, training stops, and the first epoch's weights return as in an unbroken run."""
    file = tmp_path / "best.keras"
    whole, history = run_watched(folder, 1, file)
    rates = history.history["learning_rate"]
    assert history.epoch == list(range(6))
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
    best = file.read_bytes() if hvkit.rank() == 0 else None
    if hvkit.rank() == 0:
        for step in (15, 20, 25, 30):
            shutil.rmtree(folder / f"step-{step:09d}")
    resumed, rest = run_watched(folder, 2, file)
    assert rest.epoch == list(range(2, 6))
    assert rest.history["learning_rate"] == rates[2:]
    assert equal(resumed, whole)
    assert best is None or file.read_bytes() == best


class Stop(keras.callbacks.Callback):
    """Ends the run after a number of steps, as a kill would."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_begin(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.steps:
            raise KeyboardInterrupt

    def on_train_batch_end(self, batch, logs=None):
        if self.steps % 5 == 0:  # before the epoch ends
            self.on_train_batch_begin(batch)


def run_until(folder, seed, make_data, *callbacks, every="epoch"):
    net, checkpoint, start = begin(folder, seed, run_eagerly=make_data is Data)
    net.fit(
        make_data(), epochs=2, initial_epoch=start.epoch, verbose=0, shuffle=False,
        callbacks=[checkpoint.callback(every), *callbacks],
    )  # fmt: skip
    return state(net, net.optimizer), start


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What ``run_until`` returns without a stop, trained once for each kind of data."""
    return functools.cache(
        lambda make_data: run_until(shared_folder(tmp_path_factory), 1, make_data)[0]
    )


def dataset():
    arrays = [np.concatenate([batch(i).numpy() for i in range(5)])]
    arrays.append(arrays[0][:, :4])
    return tf.data.Dataset.from_tensor_slices(tuple(arrays)).batch(6)


@pytest.mark.parametrize(("make_data", "stop_after"), cases(each_once([Data, dataset], [8, 10])))
def test_fit_resumed_in_the_middle_of_an_epoch_is_the_one_that_was_never_stopped(
    folder, make_data, stop_after, unbroken
):
    """Step 10 ends an epoch, and the end of the epoch would have saved it."""
    with pytest.raises(KeyboardInterrupt):
        run_until(folder, 1, make_data, Stop(stop_after), every=2)
    resumed, start = run_until(folder, 2, make_data)
    assert (start.epoch, start.step, start.batches) == (1, 8, 3)
    assert equal(resumed, unbroken(make_data))


@MORE
def test_the_callback_may_be_in_a_callback_list(folder):
    net, checkpoint, _ = begin(folder, 1)
    saves = checkpoint.callback(every=2)
    given = keras.callbacks.CallbackList([saves], add_history=True, model=net)
    net.fit(Data(), epochs=1, verbose=0, callbacks=given)
    if hvkit.rank() == 0:
        steps = sorted(int(each.name.removeprefix("step-")) for each in folder.glob("step-*"))
        assert steps == [2, 4, 5]


class StopsInValidation(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        if int(self.model.optimizer.iterations) == 10:
            raise KeyboardInterrupt


@MORE
def test_an_epoch_that_is_repeated_after_a_stop_in_its_validation_has_metrics(folder):
    def run(*callbacks):
        net, checkpoint, start = begin(folder, 1)
        history = net.fit(
            Data(), epochs=2, initial_epoch=start.epoch, verbose=0, validation_data=Data(),
            callbacks=[checkpoint.callback(every=5), *callbacks],
        )  # fmt: skip
        return start, history

    with pytest.raises(KeyboardInterrupt):
        run(StopsInValidation())
    start, history = run()
    assert (start.epoch, start.step) == (1, 5)
    assert min(history.history["loss"]) > 0


def infinite():
    return dataset().repeat()


def unknown_length():
    return dataset().filter(lambda x, y: True)


@MORE
@pytest.mark.parametrize(
    ("make_data", "at_once", "fit_options", "batches"),
    [
        (infinite, 1, {"steps_per_epoch": 5}, 3),
        (unknown_length, 1, {}, 5),
        *([] if OLD else [(dataset, 2, {}, 3), (dataset, 2, {}, 5)]),
    ],
)
def test_a_resumed_fit_takes_the_steps_that_are_left(
    folder, make_data, at_once, fit_options, batches
):
    net, optimizer = hvkit.distribute(model(1), keras.optimizers.SGD(0.01))
    checkpoint = Checkpoint(folder, model=net, optimizer=optimizer)
    checkpoint.save(epoch=1, step=5 + batches, batches=batches)
    callback = checkpoint.callback()  # before restore: it must see the restored progress later
    start = checkpoint.restore()
    options = {"steps_per_execution": at_once, "run_eagerly": make_data is infinite}
    net.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    seen = CountSteps()
    net.fit(
        make_data(), epochs=3, initial_epoch=start.epoch, verbose=0, callbacks=[callback, seen],
        **fit_options,
    )  # fmt: skip
    calls = -(-5 // at_once)
    assert seen.steps == [calls - batches // at_once, calls]


ORDERS = {"last": 3, "first": 0, "in between": 2}


@pytest.mark.parametrize(("place", "ends"), cases(each_once(ORDERS, ["at its end", "killed"])))
def test_a_checkpoint_holds_what_the_next_epoch_begins_with(folder, place, ends):
    """Others swap averages in, lower the rate and set weights at the end of an epoch."""

    def run(seed, name, epochs):
        net = model(seed)
        optimizer = keras.optimizers.Adam(0.05, use_ema=True, ema_momentum=0.8)
        hvkit.distribute(net, optimizer)
        net.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        rate = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10.0)
        kernel = net.layers[0].kernel
        checkpoint = Checkpoint(folder / name, keep=None, model=net, optimizer=optimizer, rate=rate)
        start = checkpoint.restore()
        callbacks = [
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: kernel.assign(kernel * 0.9)),
            rate,
        ]
        callbacks.insert(ORDERS[place], checkpoint.callback())
        options = {"verbose": 0, "shuffle": not OLD, "callbacks": callbacks}
        net.fit(Data(), epochs=epochs, initial_epoch=start.epoch, **options)
        return state(net, optimizer)

    whole = run(1, "whole", 3)
    name = "whole" if ends == "killed" else "stopped"
    if ends == "killed" and hvkit.is_main():
        shutil.rmtree(folder / "whole" / "step-000000015")
    elif ends != "killed":
        run(1, name, 2)
    assert equal(run(2, name, 3), whole)


class CountSteps(keras.callbacks.Callback):
    """The steps that changed the weights of a model, by epoch."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_epoch_begin(self, epoch, logs=None):
        self.steps.append(0)
        self.before = self.model.weights[0].numpy()

    def on_train_batch_end(self, batch, logs=None):
        # Not the optimizer's count: TensorFlow counts a step in which it finds no more data.
        now = self.model.weights[0].numpy()
        self.steps[-1] += int((now != self.before).any())
        self.before = now


@MORE
def test_batches_are_skipped_once(folder):
    optimizer = keras.optimizers.SGD(0.01)
    net, checkpoint, _ = begin(folder, 1, optimizer, run_eagerly=False)
    checkpoint.save(epoch=0, step=3, batches=3)
    checkpoint.restore()
    steps = []
    for _ in range(2):
        net.fit(dataset(), epochs=1, verbose=0, callbacks=[checkpoint.callback()])
        steps.append(int(optimizer.iterations))
    assert steps == [2, 7]


class Shuffled(keras.utils.PyDataset):
    """A dataset that changes its own order between epochs."""

    def __init__(self):
        super().__init__()
        self.order = list(range(10))

    def __len__(self):
        return 5

    def __getitem__(self, i):
        rows = np.array(self.order[2 * i : 2 * i + 2], np.float32)
        return np.repeat(rows[:, None], 8, 1), np.repeat(rows[:, None], 4, 1)

    def on_epoch_end(self):
        random.shuffle(self.order)


@MORE
def test_a_sharded_pydataset_continues_in_its_own_order(folder):
    def run(seed, name):
        net, optimizer = hvkit.distribute(model(seed), keras.optimizers.SGD(0.001))
        net.compile(optimizer=optimizer, loss="mse", run_eagerly=True)
        data = hvkit.shard(Shuffled())
        checkpoint = Checkpoint(folder / name, model=net, optimizer=optimizer, data=data)
        start = checkpoint.restore()
        net.fit(
            data, epochs=3, initial_epoch=start.epoch, shuffle=False, verbose=0,
            callbacks=[checkpoint.callback()],
        )  # fmt: skip
        return state(net, optimizer)

    whole = run(1, "a")
    if hvkit.rank() == 0:
        shutil.rmtree(folder / "a" / "step-000000009")
    assert equal(run(2, "a"), whole)


@MORE
def test_accumulated_gradients_stay_with_their_rank(folder):
    def run(seed, stop, name):
        optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=2)
        net, optimizer = hvkit.distribute(model(seed), optimizer)
        checkpoint = Checkpoint(folder / name, model=net, optimizer=optimizer)
        start = checkpoint.restore()
        for step in range(start.step, stop):
            with tf.GradientTape() as tape:
                loss = mse(batch(step)[:, :4], net(batch(step), training=True))
            variables = net.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        checkpoint.save(epoch=0, step=stop)
        return [w.numpy() for w in net.trainable_weights]

    whole = run(1, 4, "whole")
    run(1, 3, "stopped")
    assert equal(run(2, 4, "stopped"), whole)


@MORE
def test_a_loss_scale_is_a_part_of_the_optimizer(folder):
    def make(seed):
        net = model(seed)
        inner = keras.optimizers.Adam(0.01)
        scaled = keras.optimizers.LossScaleOptimizer(inner, dynamic_growth_steps=2)
        hvkit.distribute(net, scaled, lr_scaling="linear")
        net.compile(optimizer=scaled, loss="mse", jit_compile=False)
        return net, scaled, Checkpoint(folder, model=net, optimizer=scaled)

    net, scaled, checkpoint = make(1)
    net.fit(Data(), verbose=0)
    checkpoint.save(epoch=1, step=5)
    other, other_scaled, checkpoint = make(2)
    checkpoint.restore()
    assert float(other_scaled.dynamic_scale) == float(scaled.dynamic_scale) != 2.0**15
    assert equal(state(other, other_scaled), state(net, scaled))
    assert float(other_scaled.inner_optimizer.learning_rate) == pytest.approx(0.01)
