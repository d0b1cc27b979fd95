"""``fit`` trains with the mean over all ranks' tokens, weights or samples, and reports it."""

import random

import keras
import numpy as np
import pytest
import torch
from cases import MORE, cases
from keras import layers
from keras_loss_cases import (
    CASES,
    OWN_STEPS,
    equals_one_process,
    fixed_batches_train_and_are_named,
    gathered_in_batches_of_other_sizes,
    graphs_equal_one_process,
    mean_of_all,
    names_a_factor_for_a_sum,
    names_a_mask_in_a_loop,
    names_losses_that_are_no_means,
    names_what_evaluate_cannot_correct,
    of_all_pairs,
    of_own_pairs,
    own_step_equals_one_process,
    reports_with_other_losses,
    train_on_batch_in_a_callback_counts_rows,
    uneven_batches,
)
from ranks import largest_difference

import hvkit
from hvkit import main_rank
from hvkit.frameworks.keras.pytorch_sample_counts import PyTorchSampleCounts

pytestmark = pytest.mark.usefixtures("double_precision")


@pytest.mark.parametrize("case", cases(CASES, ["ignored class", "masked embedding"]))
def test_losses_are_means_over_what_all_ranks_have(case, caplog):
    main_rank._logged.clear()
    equals_one_process(case)
    assert not any("the loss is a mean over" in each for each in caplog.messages)


@MORE
def test_with_a_divided_optimizer():
    equals_one_process(
        "masked embedding", lambda: keras.optimizers.Adam(0.01), hvkit.ShardedOptimizer()
    )


@pytest.mark.parametrize("by_mean", cases([False, True]))
@pytest.mark.parametrize("accumulated", cases([None, 2]))
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


@pytest.mark.parametrize("loss", [of_all_pairs, of_own_pairs])
def test_samples_that_are_gathered_in_batches_of_other_sizes(loss):
    def fit(model, batches):
        return model.fit((each for each in batches), verbose=0).history["loss"]

    gathered_in_batches_of_other_sizes(loss, fit)


class MixedIn(layers.Layer):
    """Adds the mean over the rows of all ranks."""

    gathers = False

    def call(self, x):
        rows = keras.ops.tanh(x)
        rows = keras.ops.concatenate(hvkit.allgather(rows)) if self.gathers else rows
        return x + keras.ops.mean(rows, axis=0)


@MORE
def test_samples_that_a_layer_gathers_before_a_loss_with_weights(monkeypatch):
    rows = [[6, 2, 5, 3][: hvkit.size()]] * 3
    whole, own = ([(x, y, y[:, 0] ** 2) for x, y in batches] for batches in uneven_batches(rows))

    def fitted(model, optimizer, batches):
        model.compile(optimizer, keras.losses.MeanSquaredError("mean_with_sample_weight"))
        return model.fit((each for each in batches), verbose=0).history["loss"]

    def make(seed):
        random.seed(seed)
        return keras.Sequential([keras.Input((8,)), layers.Dense(8), MixedIn(), layers.Dense(4)])

    reference = make(0)
    expected = fitted(reference, keras.optimizers.SGD(0.1), whole)
    model, optimizer = hvkit.distribute(make(hvkit.rank()), keras.optimizers.SGD(0.1))
    monkeypatch.setattr(MixedIn, "gathers", True)
    assert fitted(model, optimizer, own) == pytest.approx(expected, rel=1e-12)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12


class PenaltyWithin(layers.Layer):
    """Adds a loss in some batches, for those samples whose first number is positive."""

    def call(self, x):
        if bool((x[:, 0] > 0).any()):
            self.add_loss(keras.ops.mean(keras.ops.relu(x[:, 0])))
        return x


@pytest.mark.parametrize("penalised", [False, True])
@pytest.mark.parametrize("loss_weights", [None, 0.3])
def test_sums_of_weights_that_arrive_with_the_gradients(penalised, loss_weights, monkeypatch):
    rows = [[6, 2, 5, 3][: hvkit.size()]] * 2 + [[4] * hvkit.size()] * 3
    rng = np.random.default_rng(0)
    batches = uneven_batches(rows)
    weights = [rng.random(len(y)) * 3 for _, y in batches[0]]
    weights[2][:] = 0  # nothing counts on any rank
    weights[3][4:] = 0  # nor anywhere but on rank 0
    whole, own = [], []
    for (x, y), (_, y_own), of_ranks, w in zip(*batches, rows, weights, strict=True):
        x[:, 0] = -1
        x[: of_ranks[0], 0] = 1  # penalised on rank 0 only
        mine = slice(start := sum(of_ranks[: hvkit.rank()]), start + len(y_own))
        whole.append((x, y, w))
        own.append((x[mine], y_own, w[mine]))

    def make(seed):
        random.seed(seed)
        inner = [layers.Dense(8, use_bias=False), *[PenaltyWithin()] * penalised, layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *inner])

    def fitted(model, optimizer, batches):
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        model.compile(optimizer, loss, loss_weights=loss_weights)
        return model.fit((each for each in batches), verbose=0).history["loss"]

    started = []
    start = PyTorchSampleCounts.start

    def counted(*args):
        started.append(start(*args))
        return started[-1]

    monkeypatch.setattr(PyTorchSampleCounts, "start", counted)
    reference = make(0)
    expected = fitted(reference, keras.optimizers.SGD(0.1), whole)
    model, optimizer = hvkit.distribute(make(hvkit.rank()), keras.optimizers.SGD(0.1))
    assert fitted(model, optimizer, own) == pytest.approx(expected, rel=1e-12)
    assert largest_difference(model.get_weights(), reference.get_weights()) < 1e-12
    assert started == [False, True, True, False, True]


@MORE
def test_the_first_step_names_losses_that_are_no_means_over_samples(caplog):
    names_losses_that_are_no_means(caplog)


@MORE
def test_a_factor_for_a_sum_is_named(caplog):
    names_a_factor_for_a_sum(caplog)


@MORE
def test_a_mask_in_a_loop_of_the_scripts_is_named(caplog):
    def step(model, optimizer, loss, x, y):
        model.zero_grad()
        loss(y, model(x)).backward()
        own = model.trainable_variables
        optimizer.apply([v.value.grad for v in own], own)

    names_a_mask_in_a_loop(caplog, step)


@MORE
def test_evaluate_with_losses_of_the_scripts_besides():
    reports_with_other_losses()


def test_evaluate_names_what_it_cannot_correct(caplog):
    names_what_evaluate_cannot_correct(caplog)


@MORE
def test_a_loss_with_a_fixed_batch_size_trains_and_is_named(caplog):
    fixed_batches_train_and_are_named(caplog)


@MORE
def test_batches_of_other_rows_in_a_callback():
    train_on_batch_in_a_callback_counts_rows()


def test_rows_are_those_of_the_targets():
    graphs_equal_one_process(lambda batches: (each for each in batches))


def update(model, compute):
    model.zero_grad()
    loss = compute()
    loss.backward()
    own = model.trainable_variables
    model.optimizer.apply([v.value.grad for v in own], own)
    return loss


@pytest.mark.parametrize("case", cases(OWN_STEPS))
def test_losses_of_a_step_of_the_scripts(case):
    own_step_equals_one_process(OWN_STEPS[case], update)


def test_a_mask_in_a_loop_with_an_optimizer_of_pytorch_is_named(caplog):
    def step(model, optimizer, loss, x, y):
        loss(y, model(x)).backward()
        optimizer.step()

    names_a_mask_in_a_loop(caplog, step, lambda model: torch.optim.SGD(model.parameters(), 0.1))
