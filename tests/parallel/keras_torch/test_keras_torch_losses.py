"""``fit`` trains with the mean over all ranks' tokens, weights or samples, and reports it."""

import random

import keras
import pytest
from keras import layers
from keras_loss_cases import (
    CASES,
    equals_one_process,
    mean_of_all,
    names_a_factor_for_a_sum,
    names_a_mask_in_a_loop,
    names_losses_that_are_no_means,
    uneven_batches,
)
from ranks import largest_difference

import hvkit
from hvkit import main_rank

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("case", CASES)
def test_losses_are_means_over_what_all_ranks_have(case, caplog):
    main_rank._logged.clear()
    equals_one_process(case)
    assert not any("the loss is a mean over" in each for each in caplog.messages)


def test_with_a_divided_optimizer():
    equals_one_process(
        "masked embedding", lambda: keras.optimizers.Adam(0.01), hvkit.ShardedOptimizer()
    )


@pytest.mark.parametrize("by_mean", [False, True])
@pytest.mark.parametrize("accumulated", [None, 2])
def test_batches_of_other_sizes_on_each_rank(accumulated, by_mean, caplog):
    rows = [[6, 2, 5, 3][: hvkit.size()], [4] * hvkit.size(), [6, 2, 5, 3][: hvkit.size()]]
    whole, own = uneven_batches(rows)

    def make(seed):
        random.seed(seed)
        first = layers.Dense(16, "tanh", kernel_regularizer="l2")
        return keras.Sequential([keras.Input((8,)), first, layers.Dense(4)])

    def sgd():
        return keras.optimizers.SGD(0.1, gradient_accumulation_steps=accumulated)

    def fitted(model, optimizer, batches):
        model.compile(optimizer=optimizer, loss=loss)
        return model.fit((each for each in batches), verbose=0).history["loss"]

    reference = make(0)
    loss = mean_of_all if by_mean else "mse"
    expected = fitted(reference, sgd(), whole)
    model, optimizer = hvkit.distribute(make(hvkit.rank()), sgd())
    main_rank._logged.clear()
    assert fitted(model, optimizer, own) == pytest.approx(expected, rel=1e-12)
    assert not any("the loss is a mean over" in each for each in caplog.messages)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12


def test_the_first_step_names_losses_that_are_no_means_over_samples(caplog):
    names_losses_that_are_no_means(caplog)


def test_a_factor_for_a_sum_is_named(caplog):
    names_a_factor_for_a_sum(caplog)


def test_a_mask_in_a_loop_of_the_scripts_is_named(caplog):
    def step(model, optimizer, loss, x, y):
        model.zero_grad()
        loss(y, model(x)).backward()
        own = model.trainable_variables
        optimizer.apply([v.value.grad for v in own], own)

    names_a_mask_in_a_loop(caplog, step)
