"""``fit`` trains with the mean over all ranks' tokens, weights or samples, and reports it."""

import random

import keras
import pytest
import tensorflow as tf
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
from keras_models import weights
from ranks import keras_in_float64, largest_difference

import hvkit


@pytest.fixture(autouse=True)
def double_precision():
    with keras_in_float64():
        yield


WAYS = {
    "fit": {},
    "eager": {"run_eagerly": True},
    "steps per execution": {"steps_per_execution": 3},
    "jit": {"jit_compile": True},
}


@pytest.mark.parametrize("case", cases(CASES, ["ignored class", "masked embedding"]))
def test_losses_are_means_over_what_all_ranks_have(case):
    equals_one_process(case)


@MORE
@pytest.mark.parametrize("way", [each for each in WAYS if each != "fit"])
@pytest.mark.parametrize("case", ["ignored class", "penalties"])
def test_in_every_way_to_run_a_step(case, way):
    equals_one_process(case, **WAYS[way])


@MORE
@pytest.mark.parametrize("case", ["masked embedding", "two outputs"])
def test_with_accumulated_gradients(case):
    equals_one_process(case, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))


@MORE
def test_with_a_divided_optimizer():
    equals_one_process(
        "masked embedding", lambda: keras.optimizers.Adam(0.01), hvkit.ShardedOptimizer()
    )


def dataset(batches):
    shapes = (tf.TensorSpec((None, 8), tf.float64), tf.TensorSpec((None, 4), tf.float64))
    return tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=shapes)


@pytest.mark.parametrize(
    ("embeds", "eager", "by_mean"),
    cases([(True, False, True), (False, False, False), (True, True, False), (False, True, True)]),
)
def test_batches_of_other_sizes_on_each_rank(embeds, eager, by_mean):
    rows = [[4] * hvkit.size(), [6, 2, 5, 3][: hvkit.size()], [4] * hvkit.size()]
    whole, own = uneven_batches(rows)

    def make(seed):
        random.seed(seed)
        first = [layers.Dense(16, "tanh", kernel_regularizer="l2")]
        if embeds:  # whose gradients are sparse
            whether = layers.Lambda(lambda x: keras.ops.cast(x > 0, "int32"))
            first = [whether, layers.Embedding(2, 3), layers.Flatten()]
        return keras.Sequential([keras.Input((8,)), *first, layers.Dense(4)])

    def fitted(model, optimizer, batches, eager):
        model.compile(optimizer=optimizer, loss=loss, run_eagerly=eager)
        return model.fit(dataset(batches), verbose=0).history["loss"]

    reference = make(0)
    loss = mean_of_all if by_mean else "mse"
    expected = fitted(reference, keras.optimizers.SGD(0.1), whole, True)
    model, optimizer = hvkit.distribute(make(hvkit.rank()), keras.optimizers.SGD(0.1))
    assert fitted(model, optimizer, own, eager) == pytest.approx(expected, rel=1e-12)
    assert largest_difference(weights(model), weights(reference)) < 1e-12


@MORE
@pytest.mark.parametrize("eager", cases([False, True]))
@pytest.mark.parametrize("loss", cases([of_all_pairs, of_own_pairs]))
def test_samples_that_are_gathered_in_batches_of_other_sizes(loss, eager):
    def fit(model, batches):
        return model.fit(dataset(batches), verbose=0).history["loss"]

    gathered_in_batches_of_other_sizes(loss, fit, run_eagerly=eager)


@MORE
@pytest.mark.parametrize("eager", cases([True, False]))
def test_the_first_step_names_losses_that_are_no_means_over_samples(caplog, eager):
    names_losses_that_are_no_means(caplog, run_eagerly=eager)


@MORE
def test_a_factor_for_a_sum_is_named(caplog):
    names_a_factor_for_a_sum(caplog)


@MORE
def test_a_mask_in_a_loop_of_the_scripts_is_named(caplog):
    def step(model, optimizer, loss, x, y):
        with tf.GradientTape() as tape:
            found = loss(y, model(x))
        own = model.trainable_variables
        optimizer.apply(tape.gradient(found, own), own)

    names_a_mask_in_a_loop(caplog, step)


@MORE
def test_evaluate_with_losses_of_the_scripts_besides():
    reports_with_other_losses()


@MORE
def test_evaluate_names_what_it_cannot_correct(caplog):
    names_what_evaluate_cannot_correct(caplog)


@MORE
def test_a_loss_with_a_fixed_batch_size_trains_and_is_named(caplog):
    fixed_batches_train_and_are_named(caplog)


@MORE
def test_batches_of_other_rows_in_a_callback():
    train_on_batch_in_a_callback_counts_rows()


@MORE
def test_rows_are_those_of_the_targets():
    inputs = {
        "edges": tf.TensorSpec((None, 2), tf.float64),
        "nodes": tf.TensorSpec((None, 5), tf.float64),
    }
    shapes = inputs, tf.TensorSpec((None, 2), tf.float64)
    graphs_equal_one_process(
        lambda batches: tf.data.Dataset.from_generator(
            lambda: iter(batches), output_signature=shapes
        )
    )


def update(model, compute):
    with tf.GradientTape() as tape:
        loss = compute()
    own = model.trainable_variables
    model.optimizer.apply(tape.gradient(loss, own), own)
    return loss


@MORE
@pytest.mark.parametrize("eager", cases([False, True]))
@pytest.mark.parametrize("case", cases(OWN_STEPS))
def test_losses_of_a_step_of_the_scripts(case, eager):
    own_step_equals_one_process(OWN_STEPS[case], update, run_eagerly=eager)


@MORE
@pytest.mark.parametrize("eager", [False, True])
def test_a_function_that_is_traced_once_knows_each_steps_rows(eager):
    whole, own = uneven_batches([[4] * hvkit.size(), [6, 2, 5, 3][: hvkit.size()]] * 2)

    class Own(keras.Sequential):
        def train_step(self, data):
            return {"loss": self.inner(*data)}

        @tf.function(reduce_retracing=True)
        def inner(self, x, y):
            return update(self, lambda: self.compute_loss(x, y, self(x)))

    def fitted(seed, batches, distributed):
        random.seed(seed)
        model, optimizer = Own([keras.Input((8,)), layers.Dense(4)]), keras.optimizers.SGD(0.1)
        if distributed:
            hvkit.distribute(model, optimizer)
        for _ in range(2):
            model.compile(optimizer, "mse", run_eagerly=eager)
            model.fit(dataset(batches), verbose=0)
        return weights(model)

    assert largest_difference(fitted(hvkit.rank(), own, True), fitted(0, whole, False)) < 1e-12
