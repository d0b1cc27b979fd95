"""``fit`` trains with the mean over all ranks' tokens, weights or samples, and reports it."""

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras import layers, losses, ops
from keras_models import ON_TENSORFLOW, alike, on_pytorch, on_tensorflow, seeded, update
from loss_problems import (
    EVEN,
    STEPS,
    UNEVEN,
    classes,
    mine,
    named,
    problems,
    sequences,
    tagger,
    trained,
    uneven_batches,
)
from ranks import largest_difference

import hvkit
from hvkit import main_rank

pytestmark = pytest.mark.usefixtures("double_precision")


def sgd(**options):
    return keras.optimizers.SGD(0.1, **options)


def warnings_about_losses(caplog):
    warned = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    return [text for text in warned if "loss" in text]


IN_GRAPHS = ("ignored class", "penalties")


def trains_and_evaluates_as_one_process(problem, make_optimizer=sgd, strategy=None, **way):
    make, loss, data, options = problems()[problem]
    reference = make(0)
    its = make_optimizer(), loss, data, 3 * hvkit.size()
    expected = trained(reference, *its, run_eagerly=ON_TENSORFLOW, **options)
    strategy = strategy or hvkit.Synchronous()
    if problem not in IN_GRAPHS:
        way["run_eagerly"] = ON_TENSORFLOW
    model, own = hvkit.distribute(make(hvkit.rank()), make_optimizer(), strategy=strategy)
    history = trained(model, own, loss, mine(data), 3, **options, **way)

    def evaluated(model, data, batch_size):
        options = {"batch_size": batch_size, "verbose": 0, "return_dict": True}
        return model.evaluate(**named(data), **options)

    expected_now = evaluated(reference, data, 3 * hvkit.size())
    assert evaluated(model, mine(data), 3) == pytest.approx(expected_now, rel=1e-12)
    assert alike(model)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-12), name
    if problem in IN_GRAPHS:
        # The last rank has a batch less. In graphs Keras counts batches of any size alike in the
        # loss of an output.
        data = keras.tree.map_structure(lambda each: each[: 1 - hvkit.size()], data)
        expected_now = evaluated(reference, data, 3 * hvkit.size())["loss"]
        assert evaluated(model, mine(data), 3)["loss"] == pytest.approx(expected_now, rel=1e-12)


@pytest.mark.parametrize("problem", cases(problems(), ["ignored class", "masked embedding"]))
def test_losses_are_means_over_what_all_ranks_have(problem, caplog):
    main_rank._logged.clear()
    trains_and_evaluates_as_one_process(problem)
    assert not warnings_about_losses(caplog)


WAYS = {
    "accumulating": ("penalties", {"make_optimizer": lambda: sgd(gradient_accumulation_steps=2)}),
    "with a divided optimizer": (
        "masked embedding",
        {"make_optimizer": keras.optimizers.Adam, "strategy": hvkit.ShardedOptimizer()},
    ),
}
if ON_TENSORFLOW:  # PyTorch takes a step at a time
    WAYS["many steps at once"] = "penalties", {"steps_per_execution": 3}


@MORE
@pytest.mark.parametrize("way", WAYS)
def test_in_every_way_to_run_a_step(way):
    problem, options = WAYS[way]
    trains_and_evaluates_as_one_process(problem, **options)


def losses_of(model, optimizer, loss, batches, **options):
    """What ``fit`` reports after one epoch of batches of any size."""
    model.compile(optimizer, loss, **options)
    return model.fit((each for each in batches), verbose=0).history["loss"]


def losses_equal_one_process(
    make, rows, *, own_part=uneven_batches, make_loss=lambda distributed: "mse",
    make_optimizer=sgd, batch_norm="average", eager=False, reports=True, **options,
):  # fmt: skip
    """Trains alone on batches of all ranks' rows, and on all ranks; compares loss and weights.

    Args:
        make: the model, of a seed.
        rows: of each rank, by step.
        own_part: the batches of all ranks, and this rank's.
        make_loss: of whether ranks train together.
        reports: whether ``fit`` reports the loss of one process.
    """
    whole, own = own_part(rows)
    reference, model = make(0), make(hvkit.rank())
    alone = {"run_eagerly": ON_TENSORFLOW, **options}
    expected = losses_of(reference, make_optimizer(), make_loss(False), whole, **alone)
    _, optimizer = hvkit.distribute(model, make_optimizer(), batch_norm=batch_norm)
    found = losses_of(model, optimizer, make_loss(True), own, run_eagerly=eager, **options)
    assert not reports or found == pytest.approx(expected, rel=1e-12)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12


def mean_of_all(y, p):
    """A mean over the samples of all ranks, by the script itself."""
    squares = ops.mean((y - p) ** 2, axis=-1)
    return hvkit.mean(ops.sum(squares), ops.sum(ops.ones_like(squares)))


@pytest.mark.parametrize(
    ("embeds", "loss", "steps", "eager"),
    cases(
        [
            (True, mean_of_all, None, False),
            (False, "mse", 2, False),
            (True, "mse", None, True),
            (False, mean_of_all, 2, True),
        ]
    ),
)
def test_batches_of_other_sizes_on_each_rank(embeds, loss, steps, eager, caplog):
    main_rank._logged.clear()

    def make(seed):
        seeded(seed)
        first = [layers.Dense(16, "tanh", kernel_regularizer="l2")]
        if embeds:  # whose gradients are sparse
            whether = layers.Lambda(lambda x: ops.cast(x > 0, "int32"))
            first = [whether, layers.Embedding(2, 3), layers.Flatten()]
        return keras.Sequential([keras.Input((8,)), *first, layers.Dense(4)])

    losses_equal_one_process(
        make, [EVEN, UNEVEN, EVEN, UNEVEN], make_loss=lambda _: loss, eager=eager,
        # On TensorFlow hvkit warns: batches that are accumulated count alike.
        make_optimizer=lambda: sgd(gradient_accumulation_steps=None if ON_TENSORFLOW else steps),
    )  # fmt: skip
    assert not warnings_about_losses(caplog)


def of_all_pairs(p, gather):
    """A number of all samples together."""
    z = gather(p)
    return ops.log(ops.sum(ops.exp(z @ ops.transpose(z))))


def of_own_pairs(p, gather):
    """A number for each of the rank's own samples, against all."""
    return ops.log(ops.sum(ops.exp(p @ ops.transpose(gather(p))), axis=1))


def gathered(z):
    return ops.concatenate(hvkit.allgather(z))


@MORE
@pytest.mark.parametrize(("loss", "eager"), [(of_all_pairs, False), (of_own_pairs, True)])
def test_samples_that_are_gathered_in_batches_of_other_sizes(loss, eager):
    """By the loss, and by layers of batch norm."""

    def make(seed):
        seeded(seed)
        inner = [layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *inner])

    def make_loss(distributed):
        return lambda y, p: loss(p, gathered if distributed else lambda z: z)

    losses_equal_one_process(
        make, [UNEVEN, UNEVEN[::-1]], make_loss=make_loss, batch_norm="sync", eager=eager
    )


class MixedIn(layers.Layer):
    """Adds the mean over the rows of all ranks."""

    def call(self, x):
        rows = ops.tanh(x)
        return x + ops.mean(gathered(rows) if self.gathers else rows, axis=0)


class PenaltyWithin(layers.Layer):
    """Adds a loss in some batches, for those samples whose first number is positive."""

    def call(self, x):
        if bool((x[:, 0] > 0).any()):
            self.add_loss(ops.mean(ops.relu(x[:, 0])))
        return x


@on_pytorch
@MORE
def test_samples_that_a_layer_gathers_before_a_loss_with_weights():
    def weighted(rows):
        return ([(x, y, y[:, 0] ** 2) for x, y in each] for each in uneven_batches(rows))

    layer = MixedIn()

    def make(seed):
        seeded(seed)
        return keras.Sequential([keras.Input((8,)), layers.Dense(8), layer, layers.Dense(4)])

    def make_loss(distributed):
        layer.gathers = distributed
        return losses.MeanSquaredError("mean_with_sample_weight")

    layer.gathers = False
    losses_equal_one_process(make, [UNEVEN] * 3, make_loss=make_loss, own_part=weighted)


@on_pytorch
@pytest.mark.parametrize(("penalised", "loss_weights"), [(False, 0.3), (True, None), (True, 0.3)])
def test_sums_of_weights_that_arrive_with_the_gradients(penalised, loss_weights, monkeypatch):
    from hvkit.frameworks.keras.as_pytorch import PyTorchSampleCounts

    def weighted(rows_of_ranks):
        """Rank 0 alone is penalised; nothing counts in the third batch, on one rank in the next."""
        rng = np.random.default_rng(0)
        whole, own = [], []
        batches = zip(rows_of_ranks, *uneven_batches(rows_of_ranks), strict=True)
        for step, (rows, (x, y), (_, y_own)) in enumerate(batches):
            weights = rng.random(len(y)) * 3
            weights[{2: 0, 3: rows[0]}.get(step, len(y)) :] = 0
            x[:, 0] = np.where(np.arange(len(x)) < rows[0], 1, -1)
            mine = slice(start := sum(rows[: hvkit.rank()]), start + len(y_own))
            whole.append((x, y, weights))
            own.append((x[mine], y_own, weights[mine]))
        return whole, own

    def make(seed):
        seeded(seed)
        inner = [layers.Dense(8, use_bias=False), *[PenaltyWithin()] * penalised, layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *inner])

    started = []
    start = PyTorchSampleCounts.start

    def counted(*args):
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(PyTorchSampleCounts, "start", counted)
    losses_equal_one_process(
        make, [UNEVEN] * 2 + [EVEN] * 3, own_part=weighted, loss_weights=loss_weights,
        make_loss=lambda _: losses.MeanSquaredError("mean_with_sample_weight"),
    )  # fmt: skip
    assert started == [False, True, True, False, True]


class OfNodes(keras.Model):
    """Of graphs, whose edges come first, and are not as many as the samples."""

    def __init__(self, seed):
        super().__init__()
        seeded(seed)
        self.dense = layers.Dense(2)
        self.dense.build((None, 5))
        self.built = True

    def call(self, x):
        return self.dense(x["nodes"]) + 0 * ops.mean(x["edges"])


@MORE
def test_rows_are_those_of_the_targets():
    def batches_of_graphs(rows):
        rng = np.random.default_rng(0)
        of_ranks = [
            [
                (
                    {"edges": rng.normal(size=(10 + 9 * r, 2)), "nodes": rng.normal(size=(n, 5))},
                    rng.normal(size=(n, 2)),
                )
                for r, n in enumerate(of_step)
            ]
            for of_step in rows
        ]
        whole = [keras.tree.map_structure(lambda *of: np.concatenate(of), *b) for b in of_ranks]
        return whole, [batch[hvkit.rank()] for batch in of_ranks]

    # Keras weights what it reports by the rows of the first input.
    losses_equal_one_process(OfNodes, [EVEN] * STEPS, own_part=batches_of_graphs, reports=False)


def of_weights(model, y, p):
    penalty = losses.MeanSquaredError(reduction="sum")
    kernel = model.layers[0].kernel
    return 0.1 * penalty(ops.zeros_like(kernel), kernel) + losses.MeanSquaredError()(y, p)


def with_factor(model, y, p):
    return 0.1 * model.ranks * losses.MeanSquaredError(reduction="sum")(y, p)


def of_some(model, y, p):
    some = ops.where(y[:, 0] > 0)[0]
    return losses.MeanSquaredError()(ops.take(y, some, 0), ops.take(p, some, 0))


class OwnStep(keras.Sequential):
    """A ``train_step`` of the script's, whose losses are not those of ``compile``."""

    ranks, loss_of = 1, None

    def train_step(self, data):
        x, y = data
        compute = lambda: self.loss_of[0](self, y, self(x))  # noqa: E731
        return {"loss": update(self.optimizer, self.trainable_variables, compute)}


@pytest.mark.parametrize(
    ("loss_of", "eager"), cases([(of_weights, False), (with_factor, True), (of_some, False)])
)
def test_losses_of_a_step_of_the_scripts(loss_of, eager):
    rng = np.random.default_rng(0)
    data = rng.normal(size=(24 * hvkit.size(), 8)), rng.normal(size=(24 * hvkit.size(), 3))

    def fitted(seed, ranks, data, batch_size, eager):
        seeded(seed)
        model, optimizer = OwnStep([keras.Input((8,)), layers.Dense(3)]), sgd()
        model.loss_of = (loss_of,)
        if ranks > 1:
            hvkit.distribute(model, optimizer)
            model.ranks = ranks
        model.compile(optimizer, run_eagerly=eager)
        model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
        return model.get_weights()

    expected = fitted(0, 1, data, 4 * hvkit.size(), True)
    found = fitted(hvkit.rank(), hvkit.size(), mine(data), 4, eager)
    assert largest_difference(found, expected) < 1e-12


@MORE
def test_batches_of_other_rows_in_a_callback():
    """``train_on_batch`` takes batches of other rows than ``fit`` around it."""
    rng = np.random.default_rng(0)
    whole, own = uneven_batches([UNEVEN])
    data = rng.normal(size=(6 * hvkit.size(), 8)), rng.normal(size=(6 * hvkit.size(), 4))

    def fitted(model, optimizer, data, batch, size):
        again = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.train_on_batch(*batch))
        model.compile(optimizer, "mse")
        model.fit(*data, batch_size=size, shuffle=False, verbose=0, epochs=2, callbacks=[again])
        return model.get_weights()

    def make(seed):
        seeded(seed)
        return keras.Sequential([keras.Input((8,)), layers.Dense(4)])

    expected = fitted(make(0), sgd(), data, whole[0], 3 * hvkit.size())
    found = fitted(*hvkit.distribute(make(hvkit.rank()), sgd()), mine(data), own[0], 3)
    assert largest_difference(found, expected) < 1e-12


@MORE
def test_evaluate_with_losses_of_the_scripts_besides():
    """A ``test_step`` and a metric compute losses that are no part of what is reported."""
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")

    class Own(keras.Sequential):
        def test_step(self, data):
            x, y, weights = data
            classes(reduction="sum")(y, self(x))  # for a log
            self._loss_tracker.update_state(self.compute_loss(x, y, self(x), weights))
            return {"loss": self._loss_tracker.result()}

    def evaluated(model, optimizer, data, rows, metrics):
        model.compile(optimizer, loss, metrics=metrics)
        options = {"batch_size": rows, "verbose": 0, "return_dict": True}
        return model.evaluate(**named(data), **options)["loss"]

    data = words, targets, shown * 1.5
    for kind, metrics in ((Own, None), (keras.Sequential, [classes(reduction="sum")])):
        reference, model = kind(tagger().layers), kind(tagger(hvkit.rank()).layers)
        expected = evaluated(reference, "sgd", data, 3 * hvkit.size(), metrics)
        found = evaluated(*hvkit.distribute(model, sgd()), mine(data), 3, metrics)
        assert found == pytest.approx(expected, rel=1e-12)


@on_tensorflow
@MORE
@pytest.mark.parametrize("eager", [False, True])
def test_a_function_that_is_traced_once_knows_each_steps_rows(eager):
    import tensorflow as tf

    whole, own = uneven_batches([EVEN, UNEVEN] * 2)

    class Own(keras.Sequential):
        def train_step(self, data):
            return {"loss": self.inner(*data)}

        @tf.function(reduce_retracing=True)
        def inner(self, x, y):
            compute = lambda: self.compute_loss(x, y, self(x))  # noqa: E731
            return update(self.optimizer, self.trainable_variables, compute)

    def make(seed):
        seeded(seed)
        return Own([keras.Input((8,)), layers.Dense(4)])

    reference, model = make(0), make(hvkit.rank())
    hvkit.distribute(model, optimizer := sgd())
    for each, its, batches in ((reference, sgd(), whole), (model, optimizer, own)):
        for _ in range(2):
            losses_of(each, its, "mse", batches, run_eagerly=eager)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12
