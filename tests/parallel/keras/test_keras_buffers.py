"""Variables that a layer assigns in ``call``: averaged on request, and named where they differ."""

import keras
import pytest
import tensorflow as tf
from cases import MORE
from keras_models import alike, eager_tape, fit, graph_tape, local, refit, regression
from ranks import all_but_rank_0, error_of, largest_difference, shared_folder

import hvkit
from hvkit import main_rank


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.layers.Layer):
    """Divides by a running mean, in training each call's batch moves it."""

    def build(self, shape):
        options = {"trainable": False, "initializer": "ones"}
        self.scale = self.add_weight(shape=shape[1:], name="scale", **options)
        self.seen = self.add_weight(shape=(), dtype="int32", name="seen", **options)

    def call(self, x, training=False):
        if training:
            mean = tf.reduce_mean(tf.abs(tf.stop_gradient(x)), axis=0)
            self.scale.assign(0.7 * self.scale + 0.3 * mean)
            self.seen.assign_add(1)
        return x / self.scale


def net(seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    head = [keras.Input((8,)), layers.Dense(6), Scaled(), layers.BatchNormalization()]
    return keras.Sequential([*head, layers.Dense(4)])


def sgd():
    return keras.optimizers.SGD(0.05)


@pytest.fixture(autouse=True)
def _warns_again():
    main_rank._logged.clear()


def said(caplog):
    """What rank 0 has warned of, on every rank."""
    return hvkit.broadcast([each for each in caplog.messages if "same on all ranks" in each])


@MORE
@pytest.mark.parametrize("loop", [eager_tape, graph_tape])
def test_averaged_variables_are_those_of_one_process_if_they_are_means(loop):
    data = regression(steps=1)
    reference = net(0)
    eager_tape(reference, sgd(), data)
    model = net(hvkit.rank())
    model, optimizer = hvkit.distribute(model, sgd(), batch_norm="sync")
    loop(model, optimizer, local(data))
    average = tf.function(hvkit.average_buffers) if loop is graph_tape else hvkit.average_buffers
    average(model)
    scales = [[each.layers[1].scale.numpy()] for each in (model, reference)]
    assert largest_difference(*scales) < 1e-5
    assert alike(model)


@MORE
def test_variables_that_layers_assign_are_named_at_an_epochs_end_and_at_a_save(
    caplog, tmp_path_factory
):
    model, optimizer = hvkit.distribute(net(0), sgd())
    fit(model, optimizer, local(regression(steps=2)))
    (text,) = said(caplog)
    assert f"scale of {all_but_rank_0()}" in text
    assert "moving_mean" not in text
    assert "hvkit.average_buffers(module)" in text
    caplog.clear()
    main_rank._logged.clear()
    folder = shared_folder(tmp_path_factory)
    hvkit.Checkpoint(folder, model=model, optimizer=optimizer).save(epoch=1, step=2)
    assert f"scale of model of {all_but_rank_0()}" in said(caplog)[0]


@MORE
@pytest.mark.two_ranks
def test_a_callback_averages_them_so_that_nothing_is_said(caplog):
    model, optimizer = hvkit.distribute(net(0), sgd())
    average = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: hvkit.average_buffers(model)
    )
    model.compile(optimizer, "mse")
    refit(model, local(regression(steps=2)), callbacks=[average])
    assert not said(caplog)
    assert alike(model)


@MORE
@pytest.mark.two_ranks
def test_a_recurrent_layers_states_are_its_ranks_own(caplog):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.SimpleRNN(3, stateful=True), keras.layers.Dense(4)]
    model = keras.Sequential([keras.Input(batch_shape=(6, 2, 4)), *layers])
    model, optimizer = hvkit.distribute(model, sgd())
    data = [(x.reshape(-1, 2, 4), y) for x, y in local(regression(steps=2))]
    fit(model, optimizer, data)
    refit(model, data)
    assert not said(caplog)


def test_other_things_are_refused():
    error, text = error_of(lambda: hvkit.average_buffers(keras.optimizers.SGD()))
    assert error is TypeError
    assert "a torch.nn.Module, or a Keras model or layer" in text
