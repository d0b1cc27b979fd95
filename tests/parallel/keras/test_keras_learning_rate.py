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
from ranks import same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks

RATE = 0.1
STEPS = 6
X = np.arange(1, 17, dtype=np.float32).reshape(4, 4)
Y = np.ones((4, 2), np.float32)


def linear(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def product(y, predicted):
    return tf.reduce_sum(y * predicted)


def multipliers(scaling, warmup):
    n = hvkit.size()
    full = {"none": 1, "linear": n, "sqrt": n**0.5}[scaling]
    first = 1 / n if scaling == "none" else 1
    return [first + (full - first) * t / warmup if t < warmup else full for t in range(STEPS)]


def parts(optimizer):
    """The optimizers with a rate."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    return getattr(optimizer, "optimizers", [optimizer])


def rates_of(optimizer):
    return [np.float32(part.learning_rate) for part in parts(optimizer)]


def weights(model):
    return [w.numpy() for w in model.weights]


def fit(model, optimizer, each, callbacks=()):
    """Each epoch of ``fit`` is one step; ``each`` is called after it."""
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: each(epoch))
    model.compile(optimizer, loss=product)
    model.fit(
        X, Y, batch_size=4, epochs=STEPS, shuffle=False, verbose=0, callbacks=[look, *callbacks]
    )


def eager(model, optimizer, each, make_step=lambda step: step):
    """A custom loop."""
    scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    def step():
        with tf.GradientTape() as tape:
            loss = product(Y, model(X))
            loss = optimizer.scale_loss(loss) if scaled else loss
        variables = model.trainable_variables
        optimizer.apply(tape.gradient(loss, variables), variables)

    take = make_step(step)
    for i in range(STEPS):
        take()
        each(i)


def graph(model, optimizer, each):
    eager(model, optimizer, each, tf.function)


LOOPS = [fit, graph, eager]


def compare(
    make, loop, rates, *, alone=None, after_step=None, scaling="linear", warmup=0, **options
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
        seen.append(rates_of(optimizer))
        trained.append(weights(model))
        if after_step:
            after_step(optimizer, i)

    loop(model, optimizer, look, **options)

    twin, alone = linear(), (alone or make)()
    by = multipliers(scaling, warmup)
    used = [np.float32(rates[i]) * np.float32(by[i]) for i in range(STEPS)]

    def assign(i):
        expected.append(weights(twin))
        for part in parts(alone):
            part.learning_rate = used[min(i + 1, STEPS - 1)]

    for part in parts(alone):
        part.learning_rate = used[0]
    # TensorFlow may round otherwise in a graph, and otherwise again where XLA compiles fit.
    (eager if loop is eager else graph)(twin, alone, assign)
    for i in range(STEPS):
        for ours, theirs in zip(trained[i], expected[i], strict=True):
            assert ours.tobytes() == theirs.tobytes(), f"step {i}"
    assert same_on_all_ranks(weights(model))
    return seen


def sgd(rate=RATE):
    return keras.optimizers.SGD(rate, momentum=0.5)


def each_has(rates, optimizers=1):
    return [[np.float32(rate)] * optimizers for rate in rates]


CONSTANT = [RATE] * STEPS


@MORE
@pytest.mark.parametrize(
    ("loop", "scaling", "warmup"),
    cases(
        [
            *((graph, *each) for each in (("linear", 0), ("linear", 4), ("none", 4))),
            *((loop, "linear", 4) for loop in (fit, eager)),
        ],
        first=[(graph, "linear", 4)],
    ),
)
def test_updates_use_the_multiplied_rate_and_scripts_see_the_users(loop, scaling, warmup):
    seen = compare(sgd, loop, CONSTANT, scaling=scaling, warmup=warmup)
    assert seen == each_has(CONSTANT)


def test_by_default_the_rate_is_used_as_it_is():
    model = linear(hvkit.rank())
    model, optimizer = hvkit.distribute(model, sgd())
    fit(model, optimizer, lambda i: None)
    twin = linear()
    eager(twin, sgd(), lambda i: None)
    for ours, theirs in zip(weights(model), weights(twin), strict=True):
        assert ours.tobytes() == theirs.tobytes()


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
@pytest.mark.parametrize(("name", "loop"), each_once(list(OPTIMIZERS), [fit, graph]))
def test_optimizers(name, loop):
    if name == "MultiOptimizer" and not hasattr(keras.optimizers, name):
        pytest.skip("this Keras has no MultiOptimizer")
    optimizers = 2 if name == "MultiOptimizer" else 1
    seen = compare(OPTIMIZERS[name], loop, CONSTANT, warmup=4)
    assert seen == each_has(CONSTANT, optimizers)


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

    assert compare(sgd, loop, rates, after_step=set_rate, warmup=4) == each_has(rates)


@MORE
def test_the_scheduler_callback_sets_absolute_rates():
    rates = [0.3 / (i + 1) for i in range(STEPS)]
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])
    assert compare(sgd, fit, rates, callbacks=[scheduler], warmup=4) == each_has(rates)


@MORE
def test_the_scheduler_callback_reads_what_it_has_set():
    read = []

    def halve(epoch, rate):
        read.append(np.float32(rate))
        return rate / 2

    rates = [np.float32(RATE) / 2**i for i in range(STEPS + 1)]
    scheduler = keras.callbacks.LearningRateScheduler(halve)
    seen = compare(sgd, fit, rates[1:], callbacks=[scheduler], warmup=4)
    assert seen == each_has(rates[1:])
    assert read == rates[:STEPS]


@MORE
def test_the_plateau_callback_lowers_the_users_rate():
    plateau = keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=1e9)
    rates = [np.float32(RATE) / 2 ** max(i - 1, 0) for i in range(STEPS)]
    seen = compare(sgd, fit, rates, callbacks=[plateau], warmup=4)
    assert seen == each_has(rates)


@MORE
@pytest.mark.parametrize(("warmup", "loop"), cases(each_once([4, 0], [graph, fit, eager])))
def test_schedules_and_functions(loop, warmup):
    schedule = keras.optimizers.schedules.ExponentialDecay(RATE, 2, 0.5, staircase=True)
    rates = [np.float32(schedule(step)) for step in range(STEPS + 1)]
    seen = compare(lambda: sgd(schedule), loop, rates, alone=sgd, warmup=warmup)
    assert seen == each_has(rates[1:])


def test_a_rate_that_is_a_function():
    seen = compare(lambda: sgd(lambda: RATE), eager, CONSTANT, alone=sgd, warmup=4)
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
    loaded = keras.saving.load_model(tmp_path / "model.keras", {"product": product})
    assert np.float32(loaded.optimizer.learning_rate) == np.float32(RATE)
    assert np.float32(loaded.optimizer.get_config()["learning_rate"]) == np.float32(RATE)


@pytest.mark.parametrize("warmup", [0, 4])
def test_an_update_that_raises_leaves_the_users_rate_in_place(warmup):
    model = linear()
    optimizer = sgd()
    at = []

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


def test_rank_0_logs_the_rate_that_a_step_uses(capfd):
    n = hvkit.size()

    def line(**options):
        hvkit.distribute(linear(), sgd(0.5), **options)
        logged = capfd.readouterr().err
        assert (hvkit.rank() == 0) == (logged != "")
        return hvkit.broadcast(logged)

    assert line() == (
        f"hvkit: {n} ranks; learning rate 0.5, not scaled (the global batch is {n} times one "
        f'rank\'s: lr_scaling="linear" would use {0.5 * n:g})\n'
    )
    assert line(lr_scaling="linear", warmup_steps=30) == (
        f"hvkit: {n} ranks; learning rate 0.5; steps use 0.5 at first and "
        f'{0.5 * n:g} after 30 steps (lr_scaling="linear", warm-up)\n'
    )
