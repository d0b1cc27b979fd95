"""The learning rate is the user's everywhere but inside the update.

Each test trains on all ranks with the rates that the user sets, and trains a twin: the same
optimizer in one process, with the multiplied rate in absolute numbers. The gradients are whole
numbers that do not depend on the weights, so that both have the same, bit for bit.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases, each_once
from keras_models import alike, update, weights
from ranks import identical

import hvkit

pytestmark = pytest.mark.two_ranks

RATE = 0.1
STEPS = 6
X = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
Y = np.ones((4, 2), np.float32)
CONSTANT = [RATE] * STEPS


def linear(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def product(y, predicted):
    return tf.reduce_sum(y * predicted)


def sgd(rate=RATE):
    return keras.optimizers.SGD(rate, momentum=0.5)


def multipliers(scaling, warmup):
    n = hvkit.size()
    full = {"none": 1, "linear": n, "sqrt": n**0.5}[scaling]
    first = 1 / n if scaling == "none" else 1
    return [first + (full - first) * t / warmup if t < warmup else full for t in range(STEPS)]


def parts(optimizer):
    """The optimizers with a rate."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "optimizers", [optimizer])


def fit(model, optimizer, each, callbacks=(), eagerly=True):
    """Each epoch of ``fit`` is one step; ``each`` is called after it."""
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: each(epoch))
    options = {"batch_size": 4, "epochs": STEPS, "shuffle": False, "verbose": 0}
    model.compile(optimizer, loss=product, run_eagerly=eagerly)
    model.fit(X, Y, callbacks=[look, *callbacks], **options)


def eager(model, optimizer, each, make_step=lambda step: step):
    """A custom loop."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def compute():
        loss = product(Y, model(X))
        return optimizer.scale_loss(loss) if scaled else loss

    take = make_step(lambda: update(optimizer, model.trainable_variables, compute))
    for i in range(STEPS):
        take()
        each(i)


def graph(model, optimizer, each):
    eager(model, optimizer, each, tf.function)


def compare(
    make, loop, rates, *, alone=None, after_step=None, scaling="linear", warmup=4, **options
):
    """Train on all ranks; check that updates use the multiplied rates.

    Args:
        make: makes the optimizer.
        loop: runs the steps.
        rates: the user's rate of each step, as one process without hvkit would use it.
        alone: makes the optimizer of the twin; ``make`` by default.
        after_step: called with the optimizer and the number of the step; may set the rate.
        **options: passed to the loop on all ranks.

    Returns:
        The rates that the optimizer showed after each step.
    """
    model = linear(hvkit.rank())
    model, optimizer = hvkit.distribute(model, make(), lr_scaling=scaling, warmup_steps=warmup)
    seen, trained, expected = [], [], []

    def look(i):
        seen.append([np.float32(part.learning_rate) for part in parts(optimizer)])
        trained.append(weights(model))
        if after_step:
            after_step(optimizer, i)

    loop(model, optimizer, look, **options)

    twin, alone = linear(), (alone or make)()
    by = multipliers(scaling, warmup)
    used = [np.float32(rates[i]) * np.float32(by[i]) for i in range(STEPS)]

    def assign(i):
        if i >= 0:
            expected.append(weights(twin))
        for part in parts(alone):
            part.learning_rate = used[min(i + 1, STEPS - 1)]

    assign(-1)
    # TensorFlow may round otherwise in a graph.
    (graph if loop is graph else eager)(twin, alone, assign)
    for i in range(STEPS):
        assert identical(trained[i], expected[i]), f"step {i}"
    assert alike(model)
    return seen


def each_has(rates, optimizers=1):
    return [[np.float32(rate)] * optimizers for rate in rates]


@MORE
@pytest.mark.parametrize(
    ("loop", "scaling", "warmup"),
    [(graph, "linear", 4), (graph, "linear", 0), (graph, "none", 4), (eager, "linear", 4)],
)
def test_updates_use_the_multiplied_rate_and_scripts_see_the_users(loop, scaling, warmup):
    seen = compare(sgd, loop, CONSTANT, scaling=scaling, warmup=warmup)
    assert seen == each_has(CONSTANT)


def test_a_warm_up_in_the_compiled_step_of_fit():
    seen = compare(sgd, fit, CONSTANT, eagerly=False)
    assert seen == each_has(CONSTANT)


def test_by_default_the_rate_is_used_as_it_is():
    model, twin = linear(hvkit.rank()), linear()
    hvkit.distribute(model, optimizer := sgd())
    fit(model, optimizer, lambda i: None, eagerly=False)
    eager(twin, sgd(), lambda i: None)
    assert identical(weights(model), weights(twin))


def of_several():
    optimizers = keras.optimizers
    chosen = optimizers.OptimizerMap(optimizers.SGD(RATE))
    chosen[".*bias"] = optimizers.Adam(RATE)
    return optimizers.MultiOptimizer(chosen)


OPTIMIZERS = {
    "Adam": lambda: keras.optimizers.Adam(RATE),
    "AdamW": lambda: keras.optimizers.AdamW(RATE, weight_decay=0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(RATE),
    "MultiOptimizer": of_several,
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=8.0),
}


@MORE
@pytest.mark.parametrize(("name", "loop"), each_once(list(OPTIMIZERS), [fit, eager, graph]))
def test_optimizers(name, loop):
    if name == "MultiOptimizer" and not hasattr(keras.optimizers, name):
        pytest.skip("this Keras has no MultiOptimizer")
    seen = compare(OPTIMIZERS[name], loop, CONSTANT)
    assert seen == each_has(CONSTANT, 2 if name == "MultiOptimizer" else 1)


@pytest.mark.parametrize(
    ("how", "loop"), cases(each_once(["attribute", "assign"], [graph, fit, eager]))
)
def test_rates_that_a_script_sets_in_absolute_numbers(loop, how):
    rates = [RATE, *(0.3 / (i + 1) for i in range(1, STEPS))]

    def set_rate(optimizer, i):
        if i + 1 < STEPS and how == "assign":
            optimizer.learning_rate.assign(rates[i + 1])
        elif i + 1 < STEPS:
            optimizer.learning_rate = rates[i + 1]

    assert compare(sgd, loop, rates, after_step=set_rate) == each_has(rates)


@MORE
@pytest.mark.parametrize("kind", ["absolute", "from the last", "plateau"])
def test_callbacks_set_and_read_the_users_rate(kind):
    read = []

    def halve(epoch, rate):
        read.append(np.float32(rate))
        return rate / 2

    scheduler, plateau = keras.callbacks.LearningRateScheduler, keras.callbacks.ReduceLROnPlateau
    callback, rates = {
        "absolute": (
            scheduler(lambda epoch: 0.3 / (epoch + 1)),
            [0.3 / (i + 1) for i in range(STEPS)],
        ),
        "from the last": (
            scheduler(halve),
            [np.float32(RATE) / 2 ** (i + 1) for i in range(STEPS)],
        ),
        "plateau": (
            plateau("loss", 0.5, patience=1, min_delta=1e9),
            [np.float32(RATE) / 2 ** max(i - 1, 0) for i in range(STEPS)],
        ),
    }[kind]
    assert compare(sgd, fit, rates, callbacks=[callback]) == each_has(rates)
    assert read == ([np.float32(RATE), *rates[:-1]] if kind == "from the last" else [])


@MORE
@pytest.mark.parametrize(("warmup", "loop"), each_once([4, 0], [graph, fit, eager]))
def test_schedules(loop, warmup):
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5, staircase=True)
    rates = [np.float32(schedule(step)) for step in range(STEPS + 1)]
    seen = compare(lambda: sgd(schedule), loop, rates, alone=sgd, warmup=warmup)
    assert seen == each_has(rates[1:])


def test_a_rate_that_is_a_function():
    seen = compare(lambda: sgd(lambda: RATE), eager, CONSTANT, alone=sgd)
    assert seen == each_has(CONSTANT)


@MORE
def test_saved_schedules_and_rates_are_the_users(tmp_path):
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5)
    model, optimizer = hvkit.distribute(linear(), sgd(schedule), lr_scaling="linear")
    config = optimizer.get_config()["learning_rate"]
    assert config["config"]["initial_learning_rate"] == RATE

    model, optimizer = hvkit.distribute(linear(), sgd(), lr_scaling="linear", warmup_steps=4)
    fit(model, optimizer, lambda i: None)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"product": product}).optimizer
    assert np.float32(loaded.learning_rate) == np.float32(RATE)
    assert np.float32(loaded.get_config()["learning_rate"]) == np.float32(RATE)


@pytest.mark.parametrize("warmup", [0, 4])
def test_an_update_that_raises_leaves_the_users_rate_in_place(warmup):
    model, optimizer, at = linear(), sgd(), []

    def fail(*args):
        at.append(float(args[-1]))
        raise MemoryError("no more")

    optimizer.update_step = fail
    hvkit.distribute(model, optimizer, lr_scaling="linear", warmup_steps=warmup)
    for _ in range(2):
        with pytest.raises(MemoryError):
            eager(model, optimizer, lambda i: None)
        assert np.float32(optimizer.learning_rate) == np.float32(RATE)
    assert at == pytest.approx([RATE * (1 if warmup else hvkit.size())] * 2)
