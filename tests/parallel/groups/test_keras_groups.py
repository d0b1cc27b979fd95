"""Two groups of two ranks each train a Keras model of their own on TensorFlow at the same time."""

import keras
import numpy as np
import pytest
from keras_models import LOOPS, eager_tape, fit, in_eager_code, local, mlp, regression, sgd, weights
from ranks import error_of, keras_in_float64, largest_difference, same_on_all_ranks

import hvkit
from hvkit.communication.collectives import gather

FRAMEWORK = "tensorflow"
ROWS, COLUMNS = [(0, 1), (2, 3)], [(0, 2), (1, 3)]


@pytest.fixture(autouse=True)
def _in_float64():
    keras.backend.clear_session()
    with keras_in_float64():
        yield


def data_of(group, steps):
    """Batches of the whole group in float64, and this rank's part of them."""
    seed = group.first + 10 * group.members[-1]
    both = [tuple(each.astype("float64") for each in batch) for batch in regression(steps, 3, seed)]
    return both, local(both, group)


def of_its_own(group, seed):
    """A model: groups have different ones, of other shapes and numbers of weights."""
    if group.first:
        return mlp(seed)
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    hidden = layers.Dense(12, "tanh"), layers.Dense(7, "relu")
    return keras.Sequential([keras.Input((8,)), *hidden, layers.Dense(4)])


def adam(rate=0.01):
    return keras.optimizers.Adam(rate)


def trained_like_one_process(group, make, loop, steps, **options):
    both, own = data_of(group, steps)
    reference = of_its_own(group, seed=group.first)
    start, optimizer = weights(reference), make()
    if options.get("lr_scaling") == "linear":
        optimizer.learning_rate = float(optimizer.learning_rate) * group.size
    in_eager_code(loop)(reference, optimizer, both)

    model, optimizer = of_its_own(group, seed=hvkit.rank()), make()
    hvkit.distribute(model, optimizer, _group=group, **options)
    assert all(np.array_equal(a, b) for a, b in zip(weights(model), start, strict=True))
    loop(model, optimizer, own)

    assert same_on_all_ranks(weights(model), group)
    assert largest_difference(weights(model), weights(reference)) < 1e-12
    assert largest_difference(weights(model), start) > 1e-3


@pytest.mark.parametrize(
    ("loop", "make", "lr_scaling", "group"),
    [
        ("fit", sgd, "linear", ROWS),
        ("function", adam, "none", COLUMNS),
        ("eager", sgd, "linear", COLUMNS),
    ],
    indirect=["group"],
)
def test_each_group_trains_the_model_of_one_process_with_both_batches(
    group, make, lr_scaling, loop
):
    steps = 9 if group.first == 0 else 14
    trained_like_one_process(group, make, LOOPS[loop], steps, lr_scaling=lr_scaling)
    hvkit.barrier()


@pytest.mark.parametrize("loop", ["fit", "eager"])
def test_the_state_of_an_optimizer_is_divided_within_a_group(group, loop):
    steps, strategy = 9 if group.first == 0 else 14, hvkit.ShardedOptimizer()
    trained_like_one_process(group, adam, LOOPS[loop], steps, strategy=strategy)
    hvkit.barrier()


def test_fit_shows_the_metrics_of_the_group_and_stops_when_one_of_its_ranks_does(group):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training |= group.rank == 1 and batch == 2 + group.first

    _, own = data_of(group, 8)
    model, optimizer = of_its_own(group, seed=0), sgd()
    hvkit.distribute(model, optimizer, _group=group)
    model.compile(optimizer, "mse")
    x, y = (np.concatenate(part) for part in zip(*own, strict=True))
    history = model.fit(x, y, batch_size=6, epochs=2, verbose=0, callbacks=[Stop()]).history
    assert int(optimizer.iterations) == 3 + group.first
    assert len(set(gather("test", str(history), group))) == 1
    both = np.concatenate(gather("test", x, group)), np.concatenate(gather("test", y, group))
    loss = model.evaluate(x, y, verbose=0)
    predicted = model.predict(both[0], verbose=0)
    assert abs(loss - np.mean((predicted - both[1]) ** 2)) < 1e-6
    hvkit.barrier()


@pytest.mark.parametrize("batch_norm", ["sync", "average"])
def test_batch_norm_is_that_of_the_group(group, batch_norm):
    def make():
        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential([keras.Input((8,)), layers.BatchNormalization(), layers.Dense(4)])

    both, own = data_of(group, 4)
    model, alone = make(), make()
    optimizer = sgd()
    hvkit.distribute(model, optimizer, batch_norm=batch_norm, _group=group)
    fit(model, optimizer, own)
    assert same_on_all_ranks(weights(model), group)
    if batch_norm == "sync":
        eager_tape(alone, sgd(), both)
        assert largest_difference(weights(model), weights(alone)) < 1e-12
    hvkit.barrier()


def test_weights_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(group):
    model, optimizer = mlp(), sgd()
    hvkit.distribute(model, optimizer, _group=group)
    if hvkit.rank() == 3:
        model.layers[0].kernel.assign_add(np.ones((8, 16)))
    _, own = data_of(group, 1)
    kind, text = error_of(lambda: eager_tape(model, optimizer, own))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"kernel of rank 3 differs from that of rank {group.first}" in text
    else:
        assert kind is None
    hvkit.barrier()


def test_models_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(group):
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(5 if hvkit.rank() == 3 else 4, name="dense")]
    )
    kind, text = error_of(lambda: hvkit.distribute(model, sgd(), _group=group))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"of rank 3 differs from that of rank {group.first}" in text
    else:
        assert kind is None
    hvkit.barrier()


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_gradients_that_are_not_finite_are_a_matter_of_their_group(group, action, capfd):
    model, optimizer = mlp(), sgd()
    hvkit.distribute(model, optimizer, on_nonfinite=action, _group=group)
    _, ((x, y),) = data_of(group, 1)
    if hvkit.rank() == 3:
        x[0, 0] = np.nan
    before = weights(model)
    kind, text = error_of(lambda: fit(model, optimizer, [(x, y)]))
    of_rank_3 = group.members[-1] == 3
    assert kind is (FloatingPointError if of_rank_3 and action == "stop" else None)
    stays = all(np.array_equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert stays == of_rank_3
    text += "".join(gather("test", capfd.readouterr().err, group))
    assert ("rank 3 has a NaN or infinite gradient of parameter" in text) == of_rank_3
    hvkit.barrier()


def test_an_epoch_that_ends_earlier_on_one_rank_of_a_group_is_an_error_there_alone(group):
    model, optimizer = mlp(), sgd()
    hvkit.distribute(model, optimizer, _group=group)
    _, own = data_of(group, 5)
    steps = 4 if hvkit.rank() == 3 else 5
    kind, text = error_of(lambda: fit(model, optimizer, own[:steps]))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert "[5, 4] steps per epoch" in text
    else:
        assert kind is None
    hvkit.barrier()


@pytest.mark.parametrize("loop", ["fit", "eager"])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(1), hvkit.DiLoCo(1, 1.0, 0.0)], ids=str)
def test_rounds_of_one_step_give_the_weights_of_one_process(group, strategy, loop):
    steps = 5 + group.first
    trained_like_one_process(group, sgd, LOOPS[loop], steps, strategy=strategy)
    hvkit.barrier()


@pytest.mark.parametrize("loop", ["function", "eager"])
@pytest.mark.parametrize("strategy", [hvkit.LocalSGD(4), hvkit.DiLoCo(4, overlap=2)], ids=str)
def test_rounds_end_in_each_group_by_itself(group, strategy, loop):
    """The agreed weights are those of the group, which no other rank takes part in."""
    model, optimizer = of_its_own(group, seed=hvkit.rank()), sgd()
    hvkit.distribute(model, optimizer, strategy=strategy, _group=group)
    _, own = data_of(group, 11 if group.first == 0 else 22)
    LOOPS[loop](model, optimizer, own)
    before = gather("test", weights(model), group)
    assert largest_difference(*before) > 1e-6
    with hvkit.settled(model):
        if isinstance(strategy, hvkit.LocalSGD):
            mean = [(a + b) / 2 for a, b in zip(*before, strict=True)]
            assert largest_difference(weights(model), mean) < 1e-12
        assert same_on_all_ranks(weights(model), group)
    hvkit.barrier()


def test_rates_that_differ_within_a_group_are_named_by_their_numbers_among_all_ranks(group):
    model, optimizer = mlp(), sgd()
    hvkit.distribute(model, optimizer, strategy=hvkit.LocalSGD(1), _group=group)
    if hvkit.rank() == 3:
        optimizer.learning_rate = 0.5
    _, own = data_of(group, 1)
    kind, text = error_of(lambda: eager_tape(model, optimizer, own))
    if group.members[-1] == 3:
        assert kind is hvkit.RanksDisagreeError
        assert f"on rank {group.first} but 0.5 on rank 3" in text
    else:
        assert kind is None
    hvkit.barrier()


@pytest.mark.parametrize("strategy", [hvkit.Gossip(), hvkit.ParameterServer(0)], ids=str)
def test_strategies_of_all_ranks_refuse_a_group(group, strategy):
    kind, text = error_of(lambda: hvkit.distribute(mlp(), sgd(), strategy=strategy, _group=group))
    assert kind is ValueError
    assert "needs all ranks, but" in text


def test_what_takes_a_model_for_that_of_all_ranks_refuses_one_of_a_group(group, tmp_path):
    model, optimizer = mlp(), sgd()
    hvkit.distribute(model, optimizer, _group=group)
    for take in (
        lambda: hvkit.Checkpoint(tmp_path, model=model, optimizer=optimizer),
        lambda: hvkit.average_buffers(model),
    ):
        kind, text = error_of(take)
        assert (kind, "is trained by" in text) == (ValueError, True), text
    hvkit.barrier()
