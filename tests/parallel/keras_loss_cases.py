"""Losses of Keras whose mean is not over samples, for tests on each backend."""

import random

import keras
import numpy as np
import pytest
from keras import layers, losses
from ranks import largest_difference, same_on_all_ranks

import hvkit
from hvkit import main_rank

WORDS, CLASSES, LENGTH, STEPS = 20, 5, 8, 4


def sequences(per_rank=3):
    """Words, 0 beyond the end of a text, and classes: texts of rank r are longer than of r - 1."""
    rng = np.random.default_rng(0)
    rows = STEPS * per_rank * hvkit.size()
    lengths = 1 + np.arange(rows) % hvkit.size() * 3 + rng.integers(0, 2, rows)
    shown = np.arange(LENGTH) < lengths[:, None]
    words = rng.integers(1, WORDS, (rows, LENGTH)) * shown
    return words.astype(np.int32), rng.integers(0, CLASSES, (rows, LENGTH)), shown


def tagger(seed, masks):
    """A class for each word."""
    random.seed(seed)
    inner = [layers.Embedding(WORDS, 6, mask_zero=masks), layers.Dense(8, "tanh")]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *inner, layers.Dense(CLASSES)])


def classes(**options):
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def masked_embedding():
    words, targets, _ = sequences()
    return lambda seed: tagger(seed, True), classes(), (words, targets), {}


def ignored_class():
    words, targets, shown = sequences()
    loss = classes(ignore_class=-1)
    return lambda seed: tagger(seed, False), loss, (words, np.where(shown, targets, -1)), {}


def weighted_mean():
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")
    return lambda seed: tagger(seed, False), loss, (words, targets, shown * 1.5), {}


def weights_and_mask():
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")
    return lambda seed: tagger(seed, True), loss, (words, targets, shown * targets / 3), {}


def mean_of_weighted_samples():
    words, targets, shown = sequences()
    return lambda seed: tagger(seed, False), classes(), (words, targets, shown * 1.5), {}


def sum_of_losses():
    words, targets, _ = sequences()
    return lambda seed: tagger(seed, False), classes(reduction="sum"), (words, targets), {}


def two_outputs(penalised=False):
    words, targets, _ = sequences()

    def make(seed):
        random.seed(seed)
        x = keras.Input((LENGTH,), dtype="int32")
        penalty = "l2" if penalised else None
        h = layers.Embedding(WORDS, 6, mask_zero=True, embeddings_regularizer=penalty)(x)
        h = layers.Dense(8, "tanh", activity_regularizer=penalty)(h)
        tags = layers.Dense(CLASSES, name="tags")(h)
        first = layers.Dense(1, name="first")(layers.Flatten()(layers.Dense(2)(h)))
        return keras.Model(x, {"tags": tags, "first": first})

    data = words, {"tags": targets, "first": targets[:, :1].astype(float)}
    loss = {"tags": classes(), "first": "mse"}
    return make, loss, data, {"loss_weights": {"tags": 1.0, "first": 0.3}}


CASES = {
    "masked embedding": masked_embedding,
    "ignored class": ignored_class,
    "mean with sample weights": weighted_mean,
    "sample weights and a mask": weights_and_mask,
    "mean of weighted samples": mean_of_weighted_samples,
    "sum": sum_of_losses,
    "two outputs": two_outputs,
    "penalties": lambda: two_outputs(penalised=True),
}


def mine(data):
    return keras.tree.map_structure(lambda each: each[hvkit.rank() :: hvkit.size()], data)


def trained(model, optimizer, loss, data, batch_size, **options):
    model.compile(optimizer=optimizer, loss=loss, **options)
    named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
    return model.fit(**named, batch_size=batch_size, epochs=2, shuffle=False, verbose=0).history


def equals_one_process(case, optimizer=lambda: keras.optimizers.SGD(0.1), strategy=None, **way):
    make, loss, data, options = CASES[case]()
    reference = make(0)
    its = optimizer(), loss, data, 3 * hvkit.size()
    expected = trained(reference, *its, run_eagerly=True, **options)  # no graph to compile
    model, own = hvkit.distribute(
        make(hvkit.rank()), optimizer(), strategy=strategy or hvkit.Synchronous()
    )
    history = trained(model, own, loss, mine(data), 3, **options, **way)
    evaluates_as_one_process(model, reference, data)
    assert same_on_all_ranks(model.get_weights())
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-12), name


def evaluates_as_one_process(model, reference, data):
    """Checks losses of ``evaluate``, also where the last rank has a batch less than the others."""

    def evaluated(model, data, batch_size):
        named = dict(zip(("x", "y", "sample_weight"), data, strict=False))
        return model.evaluate(**named, batch_size=batch_size, verbose=0, return_dict=True)

    for missing in (0, hvkit.size() - 1):
        rows = len(data[0]) - missing
        data = keras.tree.map_structure(lambda each, rows=rows: each[:rows], data)
        expected = evaluated(reference, data, 3 * hvkit.size())
        found = evaluated(model, mine(data), 3)
        if missing:  # in graphs Keras counts batches of any size alike in the loss of an output
            expected, found = expected["loss"], found["loss"]
        assert found == pytest.approx(expected, rel=1e-12)


def mean_of_all(y, p):
    """A mean over the samples of all ranks, by the script itself."""
    squares = keras.ops.mean((y - p) ** 2, axis=-1)
    return hvkit.mean(keras.ops.sum(squares), keras.ops.sum(keras.ops.ones_like(squares)))


def uneven_batches(rows_of_ranks):
    """Batches of other sizes on each rank, the whole of each step, and this rank's."""
    rng = np.random.default_rng(0)
    whole = [
        (rng.normal(size=(sum(rows), 8)), rng.normal(size=(sum(rows), 4))) for rows in rows_of_ranks
    ]
    own = []
    for rows, batch in zip(rows_of_ranks, whole, strict=True):
        start = sum(rows[: hvkit.rank()])
        own.append(tuple(each[start : start + rows[hvkit.rank()]] for each in batch))
    return whole, own


def of_all_pairs(p, gather):
    """A number of all samples together."""
    z = gather(p)
    return keras.ops.log(keras.ops.sum(keras.ops.exp(z @ keras.ops.transpose(z))))


def of_own_pairs(p, gather):
    """A number for each of the rank's own samples, against all."""
    return keras.ops.log(keras.ops.sum(keras.ops.exp(p @ keras.ops.transpose(gather(p))), axis=1))


def gathered_in_batches_of_other_sizes(loss, fit, **options):
    """Trains with samples of all ranks: gathered by the loss, and by layers of batch norm."""
    whole, own = uneven_batches([[6, 2, 5, 3][: hvkit.size()], [2, 6, 4, 4][: hvkit.size()]])

    def make(seed):
        random.seed(seed)
        inner = [layers.Dense(4, use_bias=False), layers.BatchNormalization(), layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *inner])

    def trained(model, optimizer, batches, gather):
        model.compile(optimizer, lambda y, p: loss(p, gather), **options)
        return fit(model, batches)

    reference = make(0)
    expected = trained(reference, keras.optimizers.SGD(0.1), whole, lambda p: p)
    model, optimizer = hvkit.distribute(
        make(hvkit.rank()), keras.optimizers.SGD(0.1), batch_norm="sync"
    )
    found = trained(model, optimizer, own, lambda p: keras.ops.concatenate(hvkit.allgather(p)))
    assert found == pytest.approx(expected, rel=1e-12)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12


def warnings_of(loss, caplog, **options):
    """What rank 0 logs while steps train with a loss of 5 labels; a collective."""

    def make():
        random.seed(0)
        return keras.Sequential([keras.Input((8,)), layers.Dense(CLASSES, "sigmoid")])

    main_rank._logged.clear()
    rng = np.random.default_rng(hvkit.rank())
    data = rng.random((12, 8)), rng.integers(0, 2, (12, CLASSES)).astype(float)
    model, optimizer = hvkit.distribute(make(), keras.optimizers.SGD(0.1))
    caplog.clear()
    trained(model, optimizer, loss, data, 6, **options)
    own = [each.getMessage() for each in caplog.records if each.name == "hvkit"]
    return hvkit.broadcast(own)


def ratio(y, p):
    """A mean over what counts, which another number of samples has on each rank."""
    counts = y[:, 0]
    return keras.ops.sum((y - p)[:, 1] ** 2 * counts) / keras.ops.sum(counts)


NO_MEANS = {"dice": losses.Dice, "tversky": losses.Tversky, "ratio": lambda: ratio}
MEANS = {
    "mean": lambda: lambda y, p: keras.ops.mean((y - p) ** 2),
    "of each sample": lambda: lambda y, p: keras.ops.mean((y - p) ** 2, axis=-1),
    "dice of each sample": lambda: losses.Dice(axis=1),
    "Keras's own": losses.BinaryCrossentropy,
}


def names_losses_that_are_no_means(caplog, **way):
    """Checks that the first step names these, and only these."""
    for name, make in NO_MEANS.items():
        # On PyTorch the ranks also compare what a ratio divides by.
        text, *_ = warnings_of(make(), caplog, **way)
        assert f"loss {name!r} is no mean over samples" in text
    for make in MEANS.values():
        assert not warnings_of(make(), caplog, **way)


def names_a_factor_for_a_sum(caplog):
    """Checks that a factor that older scripts have is named, and another one is not."""
    loss = losses.MeanSquaredError(reduction="sum")
    (text,) = warnings_of(loss, caplog, loss_weights=float(hvkit.size()))
    assert f"loss_weights={hvkit.size()}.0 is the number of ranks" in text
    assert not warnings_of(loss, caplog, loss_weights=0.5)


def names_a_mask_in_a_loop(caplog, step, sgd=None):
    """Checks that a loop of the script's is named if its loss has a mask, and no fit.

    ``step(model, optimizer, loss, x, y)``, with ``sgd(model)`` instead of an optimizer of Keras
    """
    words, targets, shown = sequences()
    for ignored, said in ((None, 0), (-1, 1)):
        main_rank._logged.clear()
        model = tagger(0, False)
        _, optimizer = hvkit.distribute(model, sgd(model) if sgd else keras.optimizers.SGD(0.1))
        caplog.clear()
        y = np.where(shown, targets, 0 if ignored is None else ignored)
        loss = classes(ignore_class=ignored)
        step(model, optimizer, loss, *mine((words, y)))
        own = [each.getMessage() for each in caplog.records if each.name == "hvkit"]
        named = ["hvkit.mean" in each for each in hvkit.broadcast(own)]
        assert sum(named) == said
        if not said or sgd:
            continue
        main_rank._logged.clear()
        caplog.clear()
        trained(model, optimizer, loss, mine((words, y)), 3, metrics=["accuracy"])
        assert not [each for each in caplog.records if each.name == "hvkit"]


class EvaluatesTwice(keras.Sequential):
    def test_step(self, data):
        super().test_step(data)
        return super().test_step(data)


def names_what_evaluate_cannot_correct(caplog):
    """Checks that losses of masks inside of others, and in steps of the script's, are named."""
    words, targets, shown = sequences()
    ignoring = classes(ignore_class=-1)
    data = mine((words, np.where(shown, targets, -1)))
    for kind, loss, said in [
        (keras.Sequential, ignoring, 0),
        (keras.Sequential, lambda y, p: ignoring(y, p), 1),
        (EvaluatesTwice, ignoring, 1),
    ]:
        main_rank._logged.clear()
        inner = layers.Embedding(WORDS, 6), layers.Dense(CLASSES)
        model = kind([keras.Input((LENGTH,), dtype="int32"), *inner])
        _, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
        model.compile(optimizer, loss)
        caplog.clear()
        model.evaluate(*data, batch_size=3, verbose=0)
        own = [each.getMessage() for each in caplog.records if each.name == "hvkit"]
        named = ["evaluate reports losses" in each for each in hvkit.broadcast(own)]
        assert sum(named) == said


class OfNodes(keras.Model):
    """Of graphs, whose edges come first, and are not as many as the samples."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x["nodes"]) + 0 * keras.ops.mean(x["edges"])


def graphs_equal_one_process(as_data):
    """Checks that rows are those of the targets; ``as_data(batches)`` is what ``fit`` takes."""
    rng = np.random.default_rng(0)
    of_ranks = [
        [
            ({"edges": rng.normal(size=(10 + 9 * r, 2)), "nodes": rng.normal(size=(4, 5))}, target)
            for r in range(hvkit.size())
            for target in [rng.normal(size=(4, 2))]
        ]
        for _ in range(STEPS)
    ]
    whole = [keras.tree.map_structure(lambda *parts: np.concatenate(parts), *b) for b in of_ranks]

    def fitted(own, batches):
        random.seed(0 if own is None else hvkit.rank())
        model, optimizer = OfNodes(), keras.optimizers.SGD(0.1)
        model(batches[0][0])
        if own is not None:
            hvkit.distribute(model, optimizer)
        model.compile(optimizer, "mse")
        model.fit(as_data(batches), verbose=0)
        return model.get_weights()

    expected = fitted(None, whole)
    found = fitted(hvkit, [batch[hvkit.rank()] for batch in of_ranks])
    assert largest_difference(found, expected) < 1e-12


def of_weights(model, y, p, ranks):
    penalty = losses.MeanSquaredError(reduction="sum")
    kernel = model.dense.kernel
    return 0.1 * penalty(keras.ops.zeros_like(kernel), kernel) + losses.MeanSquaredError()(y, p)


def with_factor(model, y, p, ranks):
    return 0.1 * ranks * losses.MeanSquaredError(reduction="sum")(y, p)


def of_some(model, y, p, ranks):
    some = keras.ops.where(y[:, 0] > 0)[0]
    return losses.MeanSquaredError()(keras.ops.take(y, some, 0), keras.ops.take(p, some, 0))


OWN_STEPS = {each.__name__: each for each in (of_weights, with_factor, of_some)}


def own_step_equals_one_process(loss_of, update, **way):
    """Checks a ``train_step`` of the script's, whose losses are not those of ``compile``.

    Args:
        loss_of: of the model, targets, predictions, and the number of ranks.
        update: ``update(model, compute)`` trains with what ``compute()`` returns.
        way: options of ``compile``.
    """

    class Own(keras.Model):
        ranks = 1

        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            return {"loss": update(self, lambda: loss_of(self, y, self(x), self.ranks))}

    rng = np.random.default_rng(0)
    data = rng.normal(size=(24 * hvkit.size(), 5)), rng.normal(size=(24 * hvkit.size(), 3))

    def fitted(seed, data, batch_size, optimizer):
        random.seed(seed)
        model = Own()
        model(data[0][:1])
        if batch_size == 4:
            hvkit.distribute(model, optimizer)
            model.ranks = hvkit.size()
        model.compile(optimizer, **way)
        model.fit(*data, batch_size=batch_size, shuffle=False, verbose=0)
        return model.get_weights()

    expected = fitted(0, data, 4 * hvkit.size(), keras.optimizers.SGD(0.1))
    found = fitted(hvkit.rank(), mine(data), 4, keras.optimizers.SGD(0.1))
    assert largest_difference(found, expected) < 1e-12


def reports_with_other_losses():
    """Checks ``evaluate`` where a ``test_step`` and a metric compute losses besides."""
    words, targets, shown = sequences()
    loss = classes(reduction="mean_with_sample_weight")

    class Own(keras.Sequential):
        def test_step(self, data):
            x, y, weights = data
            classes(reduction="sum")(y, self(x))  # for a log
            self._loss_tracker.update_state(self.compute_loss(x, y, self(x), weights))
            return {"loss": self._loss_tracker.result()}

    data = words, targets, shown * 1.5
    for kind, metrics in ((Own, None), (keras.Sequential, [classes(reduction="sum")])):
        reference = kind(tagger(0, False).layers)
        model = kind(tagger(hvkit.rank(), False).layers)
        model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.1))
        found = []
        for each, its, rows in ((reference, data, 3 * hvkit.size()), (model, mine(data), 3)):
            each.compile(optimizer if each is model else "sgd", loss, metrics=metrics)
            found.append(each.evaluate(*its[:2], rows, 0, its[2], return_dict=True)["loss"])
        assert found[1] == pytest.approx(found[0], rel=1e-12)


def fixed_batches_train_and_are_named(caplog):
    """Checks a contrastive loss whose batch size is a number."""

    def contrastive(y, p):
        logits = keras.ops.matmul(p, keras.ops.transpose(p))
        return losses.sparse_categorical_crossentropy(np.arange(6), logits, from_logits=True)

    text, *_ = warnings_of(contrastive, caplog)
    assert "loss 'contrastive' is no mean over samples: it fails with half of a batch" in text


def train_on_batch_in_a_callback_counts_rows():
    """Checks batches of other rows than those of ``fit`` around it."""
    rng = np.random.default_rng(0)
    rows = [[5, 3, 4, 2][: hvkit.size()]]
    whole, own = uneven_batches(rows)
    x, y = rng.normal(size=(6 * hvkit.size(), 8)), rng.normal(size=(6 * hvkit.size(), 4))

    def fitted(seed, data, batch, size):
        random.seed(seed)
        model = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
        optimizer = keras.optimizers.SGD(0.1)
        if size == 3:
            hvkit.distribute(model, optimizer)
        model.compile(optimizer, "mse")
        again = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.train_on_batch(*batch))
        model.fit(*data, batch_size=size, shuffle=False, verbose=0, epochs=2, callbacks=[again])
        return model.get_weights()

    expected = fitted(0, (x, y), whole[0], 3 * hvkit.size())
    assert largest_difference(fitted(hvkit.rank(), mine((x, y)), own[0], 3), expected) < 1e-12
