"""What else Horovod's own names do under Keras 3."""

import copy
import functools
import pickle

import horovod.keras
import horovod.tensorflow as hvd_tensorflow
import horovod.tensorflow.keras as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, each_once
from horovod_runs import DATA, OPTIMIZERS, of_all_ranks, of_one_process, pairs_of
from keras_models import fit, gradients_of, local, mlp, mse, refit, seeded, weights
from ranks import largest_difference, same_on_all_ranks

import hvkit

pytestmark = pytest.mark.two_ranks


@MORE
@pytest.mark.parametrize("scaled", [True, False])
def test_gradients_of_local_layers_stay_on_their_rank(scaled):
    model = mlp(0)
    optimizer = horovod.keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=model.layers[0], scale_local_gradients=scaled
    )
    fit(model, optimizer, local(DATA[:1]))
    alone = mlp(0)
    fit(alone, keras.optimizers.SGD(0.1 / (hvd.size() if scaled else 1)), local(DATA[:1]))
    assert largest_difference(weights(model)[:2], weights(alone)[:2]) < 1e-5
    together = mlp(0)
    fit(together, keras.optimizers.SGD(0.1), DATA[:1])
    assert largest_difference(weights(model)[2:], weights(together)[2:]) < 1e-5


def test_a_wrapped_tape_takes_the_arguments_of_a_tape():
    x, unused = tf.Variable(float(hvd.rank() + 1)), tf.Variable(1.0)
    with tf.GradientTape() as tape:
        y = x * x
    tape = hvd_tensorflow.DistributedGradientTape(tape)
    gradient, zero = tape.gradient(
        y, [x, unused], unconnected_gradients=tf.UnconnectedGradients.ZERO
    )
    assert float(gradient) == pytest.approx(np.mean([2 * (r + 1) for r in range(hvd.size())]))
    assert float(zero) == 0


def test_local_layers_of_a_tape():
    model = mlp(0)
    (x, y), *_ = local(DATA)
    with tf.GradientTape(persistent=True) as own:
        loss = mse(y, model(x))
    plain = own.gradient(loss, model.trainable_variables)
    with tf.GradientTape() as tape:
        loss = mse(y, model(x))
    tape = hvd_tensorflow.PartialDistributedGradientTape(tape, local_layers=model.layers[0])
    found = tape.gradient(loss, model.trainable_variables)
    assert largest_difference(found[:2], [g / hvd.size() for g in plain[:2]]) < 1e-6
    assert same_on_all_ranks([g.numpy() for g in found[2:]])


def with_dropout(seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([keras.Input((8,)), layers.Dense(16), layers.Dropout(0.5)])


@pytest.mark.parametrize("inplace", [False, True])
def test_variables_are_broadcast(inplace):
    model = with_dropout(hvd.rank())
    optimizer = keras.optimizers.Adam(0.01 * (1 + hvd.rank()))
    optimizer.build(model.trainable_variables)
    hvd_tensorflow.broadcast_variables(model.variables, root_rank=0, inplace=inplace)
    hvd_tensorflow.broadcast_variables(optimizer.variables, root_rank=0, inplace=inplace)
    assert largest_difference(weights(model), weights(with_dropout(0))) == 0
    assert float(optimizer.learning_rate) == pytest.approx(0.01)
    seeds = [v.numpy() for v in model.variables if v.name == "seed_generator_state"]
    assert not same_on_all_ranks(seeds)  # or all would drop the same units


def callbacks(**options):
    return [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.1, warmup_epochs=2, **options),
    ]


def test_callbacks_of_fit():
    model = mlp(hvd.rank())
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    history = refit(model, local(DATA), epochs=3, callbacks=callbacks())
    assert same_on_all_ranks(weights(model))
    assert same_on_all_ranks([np.array(history.history["loss"])])
    first = 0.1 / hvd.size() * ((hvd.size() - 1) / 2 + 1)
    assert history.history["lr"] == pytest.approx([first, 0.1, 0.1])


@MORE
def test_momentum_follows_the_rate():
    """As if SGD were written with the rate inside its velocity, of which the rate is a factor."""
    model, plain = mlp(0), mlp(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, "mse")
    refit(model, local(DATA), epochs=2, callbacks=callbacks())

    velocity = [np.zeros_like(w) for w in weights(plain)]
    for step, batch in enumerate([*DATA, *DATA]):
        images, labels = batch
        _, gradients = gradients_of(
            lambda x=images, y=labels: mse(y, plain(x)), plain.trainable_variables
        )
        progress = (step + 1) / len(DATA)
        rate = 0.1 / hvd.size() * (progress * (hvd.size() - 1) / 2 + 1)
        velocity = [0.9 * v + g.numpy() for v, g in zip(velocity, gradients, strict=True)]
        for weight, v in zip(plain.weights, velocity, strict=True):
            weight.assign_sub(rate * v)
    assert largest_difference(weights(model), weights(plain)) < 1e-5


def test_a_rate_is_scheduled():
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=0.4, multiplier=lambda epoch: 0.5**epoch, momentum_correction=False
    )
    model = mlp(0)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    history = model.fit(*local(DATA)[0], epochs=3, verbose=0, callbacks=[schedule])
    assert history.history["lr"] == pytest.approx([0.4, 0.2, 0.1])


def normalised_by(layer):
    def make(seed):
        seeded(seed)
        # Without biases: their gradients are zero but for rounding.
        first, second = (keras.layers.Dense(6, use_bias=False) for _ in range(2))
        tanh = keras.layers.Activation("tanh")
        layers = [first, layer(), tanh, second, layer(), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((8,)), *layers])

    return make


def test_batch_norm_over_all_ranks():
    make = OPTIMIZERS["momentum"]
    all_ranks = normalised_by(hvd_tensorflow.SyncBatchNormalization)
    found = of_all_ranks(hvd.DistributedOptimizer(make()), all_ranks)
    expected = of_one_process(make, normalised_by(keras.layers.BatchNormalization))
    assert largest_difference(found, expected) < 1e-5


@MORE
@pytest.mark.parametrize(
    ("name", "steps"), each_once(["model.keras", "model.h5", "model.h5"], [4, 0])
)
def test_a_model_is_loaded_with_an_optimizer_that_averages(tmp_path, name, steps):
    model = mlp(0)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    model.compile(optimizer, keras.losses.MeanSquaredError(), run_eagerly=True)
    if steps:
        refit(model, local(DATA[:steps]))
    model.save(tmp_path / name)
    loaded = hvd.load_model(tmp_path / name)
    assert type(loaded.optimizer) is keras.optimizers.Adam
    refit(loaded, local(DATA[steps:]))
    assert largest_difference(weights(loaded), of_one_process()) < 1e-5


@MORE
def test_overflows_are_skipped_on_all_ranks():
    model = mlp(0)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=8.0)
    optimizer = hvd.DistributedOptimizer(scaled)
    (x, y), *_ = local(DATA)
    before = weights(model)
    if hvd.rank() == hvd.size() - 1:
        y = y * np.inf
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=len(x), verbose=0)
    assert largest_difference(weights(model), before) == 0
    model.fit(*local(DATA)[1], verbose=0)
    assert largest_difference(weights(model), before) > 0
    assert same_on_all_ranks(weights(model))


def test_names_of_keras_2_are_accepted():
    with pytest.warns(DeprecationWarning, match="write learning_rate="):
        optimizer = keras.optimizers.SGD(lr=0.25)
    with pytest.warns(DeprecationWarning, match="write optimizer.learning_rate"):
        assert float(optimizer.lr) == 0.25
    with pytest.warns(DeprecationWarning, match="write optimizer.learning_rate = "):
        optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.variables() == optimizer.variables
    for backend in (keras.backend, tf.keras.backend):
        with pytest.warns(DeprecationWarning, match="write variable.assign"):
            backend.set_value(optimizer.learning_rate, 0.75)
        with pytest.warns(DeprecationWarning, match="write variable.numpy"):
            assert backend.get_value(optimizer.learning_rate) == 0.75
    model = mlp(0)
    with pytest.warns(DeprecationWarning, match="leave it out"):
        model.compile(optimizer, "mse", experimental_run_tf_function=False)
    with pytest.warns(DeprecationWarning, match="write metric.reset_state"):
        keras.metrics.Mean().reset_states()
    with pytest.warns(DeprecationWarning, match="reset_state"):
        model.reset_states()
    with pytest.warns(DeprecationWarning, match="leave it out"):
        keras.callbacks.ModelCheckpoint("model.keras", period=1)


def test_states_of_recurrent_layers_are_reset():
    layer = keras.layers.LSTM(2, stateful=True)
    stateless = keras.layers.Bidirectional(keras.layers.LSTM(2, return_sequences=True))
    model = keras.Sequential([keras.Input((3, 1), batch_size=2), stateless, layer])
    first = model.predict(np.ones((2, 3, 1)), verbose=0)
    assert np.abs(model.predict(np.ones((2, 3, 1)), verbose=0) - first).max() > 0
    with pytest.warns(DeprecationWarning, match="reset_state"):
        model.reset_states()
    assert np.abs(model.predict(np.ones((2, 3, 1)), verbose=0) - first).max() == 0


def test_names_that_have_no_equal_say_what_to_write():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(AttributeError, match=r"write optimizer.scale_loss\(loss\)"):
        scaled.get_scaled_loss(tf.constant(1.0))
    assert not hasattr(scaled, "get_unscaled_gradients")
    with pytest.raises(ValueError, match=r"period=5.*save_freq=5 \* steps_per_epoch"):
        keras.callbacks.ModelCheckpoint("model.keras", period=5)


def test_nothing_is_averaged_twice():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
        hvd.DistributedOptimizer(optimizer)
    with pytest.raises(ValueError, match=r"pass the plain optimizer"):
        hvkit.distribute(mlp(0), optimizer)
    _, optimizer = hvkit.distribute(mlp(0), keras.optimizers.SGD(0.1))
    with pytest.raises(ValueError, match=r"hvkit.distribute averages"):
        hvd.DistributedOptimizer(optimizer)


def test_state_of_elastic_training():
    model = mlp(hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(model.trainable_variables)
    state = hvd.elastic.KerasState(model, optimizer, epoch=hvd.rank())
    state.sync()
    assert largest_difference(weights(model), weights(mlp(0))) == 0
    assert state.epoch == 0
    kept = weights(model)
    fit(model, optimizer, local(DATA[:2]))
    assert int(optimizer.iterations) == 2
    state.restore()
    assert largest_difference(weights(model), kept) == 0
    assert int(optimizer.iterations) == 0


@pytest.mark.parametrize("names", [horovod.keras, hvd], ids=lambda m: m.__name__)
def test_collectives_on_values(names):
    ranks = range(hvd.size())
    assert float(names.allreduce(float(hvd.rank()), name="mean")) == np.mean(ranks)
    assert list(names.allgather([hvd.rank()])) == list(ranks)
    assert float(names.broadcast(hvd.rank() + 7.0, root_rank=0)) == 7


def test_the_best_model_is_saved_where_the_script_says(tmp_path):
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(tmp_path / "best.keras")
    model = mlp(0)
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    model.fit(*local(DATA)[0], epochs=2, verbose=0, callbacks=[best])
    assert keras.models.load_model(best.filepath).count_params() == model.count_params()


@pytest.mark.parametrize("inplace", [False, True])
def test_a_model_that_is_loaded_on_one_rank_is_sent_to_those_that_have_made_it(inplace, tmp_path):
    """Keras gives the variables of a loaded model other names."""
    model = mlp(hvd.rank())
    if hvd.rank() == 0:
        model.save(tmp_path / "model.keras")
        model = keras.models.load_model(tmp_path / "model.keras")
    hvd_tensorflow.broadcast_variables(model.variables, root_rank=0, inplace=inplace)
    assert largest_difference(weights(model), weights(mlp(0))) == 0


@MORE
def test_sums_that_hold_no_rates_are_not_corrected():
    def trained(correction):
        model = mlp(0)
        adam = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1))
        model.compile(adam, "mse", run_eagerly=True)
        with_or_without = callbacks(momentum_correction=correction)
        refit(model, local(DATA), epochs=2, callbacks=with_or_without)
        return weights(model)

    assert largest_difference(trained(True), trained(False)) == 0


COPIES = {
    "from_config": lambda optimizer: optimizer.from_config(optimizer.get_config()),
    "from_config of the class": lambda o: type(o).from_config(o.get_config()),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "copy of a copy": lambda optimizer: copy.deepcopy(copy.copy(optimizer)),
    "a changed config": lambda o: type(o).from_config(o.get_config() | {"name": "other"}),
    "a config of changes": lambda o: type(o).from_config({"name": "other"} | o.get_config()),
    "a copied config": lambda o: type(o).from_config(copy.deepcopy(o.get_config().copy())),
}


@keras.saving.register_keras_serializable()
class OfTheScript(keras.optimizers.Adam):
    @classmethod
    def from_config(cls, config):
        return cls(**config)


@MORE
@pytest.mark.parametrize(("name", "scaled"), each_once(list(COPIES), [True, False]))
def test_copies_of_an_optimizer_average(name, scaled):
    optimizer = keras.optimizers.Adam(0.01)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
    copied = COPIES[name](hvd.DistributedOptimizer(optimizer))
    found = of_all_ranks(copied, loop=functools.partial(fit, run_eagerly=True))
    assert largest_difference(found, of_one_process()) < 1e-5


@MORE
def test_copies_of_the_scripts_own_optimizer_average():
    first = hvd.DistributedOptimizer(OfTheScript(0.01))
    found = of_all_ranks(OfTheScript.from_config(first.get_config()))
    assert largest_difference(found, of_one_process()) < 1e-5
    scaled = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(OfTheScript(0.01)))
    found = of_all_ranks(copy.deepcopy(scaled.inner_optimizer))
    assert largest_difference(found, of_one_process()) < 1e-5


def test_copies_keep_gradients_of_local_variables_on_their_rank():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    variable = keras.Variable(0.0)
    optimizer.register_local_var(variable)
    for each in (
        optimizer,
        copy.deepcopy(optimizer),
        optimizer.from_config(optimizer.get_config()),
    ):
        variable.assign(0.0)
        each.apply([tf.constant(float(hvd.rank() * hvd.size()))], [variable])
        assert float(variable) == -hvd.rank()


def test_a_config_is_pickled_as_a_plain_one():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5))
    config = pickle.loads(pickle.dumps(optimizer.get_config()))
    assert type(config) is dict
    assert config == keras.optimizers.Adam(0.5).get_config() | {"name": optimizer.name}
    assert hvd_tensorflow.broadcast_object(optimizer.get_config())["learning_rate"] == 0.5


def test_an_optimizer_that_averages_is_not_pickled():
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01))
    with pytest.raises(pickle.PicklingError, match="wrap it where it is loaded"):
        pickle.dumps(optimizer)
    alone = pickle.loads(pickle.dumps(keras.optimizers.Adam(0.5)))
    assert float(alone.learning_rate) == 0.5


@MORE
def test_accumulated_gradients_are_not_broadcast():
    """The callback sends the optimizer's variables after the first of two passes."""
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.05, momentum=0.9),
        backward_passes_per_step=2,
        average_aggregated_gradients=True,
    )
    model = mlp(0)
    model.compile(optimizer, "mse", run_eagerly=True)
    refit(model, local(DATA), callbacks=callbacks()[:1])
    expected = of_one_process(OPTIMIZERS["momentum"], data=pairs_of(DATA))
    assert largest_difference(weights(model), expected) < 1e-5
    assert "gradient_accumulation_steps" not in str(
        {k: v for k, v in optimizer.get_config().items() if v is not None}
    )


def test_a_rate_of_the_scripts_own_optimizer_stays():
    class Own(keras.optimizers.SGD):
        def __init__(self, lr):
            super().__init__(learning_rate=2 * lr)
            self.lr = lr

    optimizer = Own(0.1)
    assert optimizer.lr == 0.1
    assert float(optimizer.learning_rate) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="leave lr out"):
        keras.optimizers.SGD(learning_rate=0.1, lr=0.2)


def test_metrics_that_are_whole_numbers_are_averaged():
    logs = {"n": hvd.rank()}
    hvd.callbacks.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs["n"] == pytest.approx(np.mean(range(hvd.size())))


@MORE
def test_a_model_of_horovods_beside_one_of_hvkits_is_not_warned_of(monkeypatch):
    def warn(optimizer):
        raise AssertionError(optimizer)

    monkeypatch.setattr("hvkit.frameworks.keras.refusals.warn_of_own_models", warn)
    first, optimizer = hvkit.distribute(mlp(0), keras.optimizers.SGD(0.1))
    fit(first, optimizer, local(DATA[:1]))
    fit(mlp(1), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), local(DATA[:1]))
    with pytest.raises(AssertionError):
        fit(mlp(2), keras.optimizers.SGD(0.1), local(DATA[:1]))


def test_a_model_that_is_not_compiled_predicts():
    model = mlp(0)
    (x, _), *_ = DATA
    assert largest_difference([model.predict(x, verbose=0)], [model(x).numpy()]) < 1e-6
