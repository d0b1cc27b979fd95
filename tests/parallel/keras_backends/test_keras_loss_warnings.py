"""Losses that hvkit cannot make the mean over all ranks are named."""

import keras
import numpy as np
import pytest
from cases import MORE
from keras import layers, losses, ops
from keras_models import gradients_of, on_pytorch, on_tensorflow, seeded, update
from loss_problems import CLASSES, LENGTH, WORDS, classes, ignored_class, mine, tagger, trained

import hvkit
from hvkit import main_rank

pytestmark = [MORE, pytest.mark.usefixtures("double_precision")]


def sgd():
    return keras.optimizers.SGD(0.1)


@pytest.fixture
def said(caplog):
    """Calls a function, and returns the warnings of rank 0 meanwhile; a collective."""

    def said(function, *args, **options):
        main_rank._logged.clear()
        caplog.clear()
        function(*args, **options)
        own = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        return hvkit.broadcast(own)

    return said


def train(loss, **options):
    """Steps of a model with 5 labels."""
    seeded(0)
    model = keras.Sequential([keras.Input((8,)), layers.Dense(CLASSES, "sigmoid")])
    rng = np.random.default_rng(hvkit.rank())
    data = rng.random((12, 8)), rng.integers(0, 2, (12, CLASSES)).astype(float)
    trained(*hvkit.distribute(model, sgd()), loss, data, 6, **options)


def ratio(y, p):
    """A mean over what counts, which another number of samples has on each rank."""
    counts = y[:, 0]
    return ops.sum((y - p)[:, 1] ** 2 * counts) / ops.sum(counts)


NO_MEANS = {"dice": losses.Dice(), "tversky": losses.Tversky(), "ratio": ratio}
MEANS = {
    "a mean": lambda y, p: ops.mean((y - p) ** 2),
    "of each sample": lambda y, p: ops.mean((y - p) ** 2, axis=-1),
    "dice of each sample": losses.Dice(axis=1),
    "Keras's own": losses.BinaryCrossentropy(),
}


@pytest.mark.parametrize(
    ("names", "eager"),
    [([*NO_MEANS, *MEANS], True), pytest.param(["dice", "a mean"], False, marks=on_tensorflow)],
)
def test_the_first_step_names_losses_that_are_no_means_over_samples(names, eager, said):
    for name in names:
        # On PyTorch the ranks also compare what a ratio divides by.
        text, *_ = [*said(train, (NO_MEANS | MEANS)[name], run_eagerly=eager), ""]
        assert (f"loss {name!r} is no mean over samples" in text) == (name in NO_MEANS)
        assert name in NO_MEANS or not text


def test_a_factor_for_a_sum_is_named(said):
    """Older scripts have it: the number of ranks."""
    loss = losses.MeanSquaredError(reduction="sum")
    (text,) = said(train, loss, loss_weights=float(hvkit.size()))
    assert f"loss_weights={hvkit.size()}.0 is the number of ranks" in text
    assert not said(train, loss, loss_weights=0.5)


def test_a_loss_with_a_fixed_batch_size_trains_and_is_named(said):
    def contrastive(y, p):
        logits = ops.matmul(p, ops.transpose(p))
        return losses.sparse_categorical_crossentropy(np.arange(6), logits, from_logits=True)

    text, *_ = said(train, contrastive)
    assert "loss 'contrastive' is no mean over samples: it fails with half of a batch" in text


def pytorchs_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    "make_optimizer", [lambda model: sgd(), pytest.param(pytorchs_sgd, marks=on_pytorch)]
)
def test_a_mask_in_a_loop_of_the_scripts_is_named_and_none_in_fit(make_optimizer, said):
    (words, targets), ignoring = ignored_class()
    x, y = mine((words, targets))
    for loss, y, named in ((classes(), np.maximum(y, 0), 0), (ignoring, y, 1)):  # noqa: B020
        model, optimizer = hvkit.distribute(model := tagger(), make_optimizer(model))

        def step(model=model, optimizer=optimizer, loss=loss, y=y):
            compute = lambda: loss(y, model(x))  # noqa: E731
            if isinstance(optimizer, keras.optimizers.Optimizer):
                update(optimizer, model.trainable_variables, compute)
            else:
                gradients_of(compute, model.trainable_variables)
                optimizer.step()

        assert sum("hvkit.mean" in each for each in said(step)) == named
    if isinstance(optimizer, keras.optimizers.Optimizer):
        assert not said(trained, model, optimizer, ignoring, (x, y), 3, metrics=["accuracy"])


class EvaluatesTwice(keras.Sequential):
    def test_step(self, data):
        super().test_step(data)
        return super().test_step(data)


@pytest.mark.parametrize(
    ("kind", "inside", "named"),
    [(keras.Sequential, False, 0), (keras.Sequential, True, 1), (EvaluatesTwice, False, 1)],
)
def test_evaluate_names_what_it_cannot_correct(kind, inside, named, said):
    """Losses of masks inside of others, and in steps of the script's."""
    data, ignoring = ignored_class()
    inner = layers.Embedding(WORDS, 6), layers.Dense(CLASSES)
    model = kind([keras.Input((LENGTH,), dtype="int32"), *inner])
    model, optimizer = hvkit.distribute(model, sgd())
    model.compile(optimizer, (lambda y, p: ignoring(y, p)) if inside else ignoring)
    texts = said(model.evaluate, *mine(data), batch_size=3, verbose=0)
    assert sum("evaluate reports losses" in each for each in texts) == named
