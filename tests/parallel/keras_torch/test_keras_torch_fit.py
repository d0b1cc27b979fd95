"""``fit`` and ``evaluate`` on several ranks, and what is refused."""

import keras
import numpy as np
import pytest
import torch
from keras_nets import fit, local, loop, mlp, regression, unbuilt, weights
from ranks import largest_difference, same_on_all_ranks, shared_folder

import hvkit
from hvkit import main_rank


def sgd():
    return keras.optimizers.SGD(0.05)


def test_every_rank_has_the_metrics_of_one_process():
    data = regression()
    validation = [np.concatenate(each) for each in zip(*regression(steps=4), strict=True)]
    reference = mlp()
    alone = fit(reference, sgd(), data, validation_data=tuple(validation), epochs=2).history
    model, optimizer = hvkit.distribute(mlp(), sgd())
    mine = tuple(each[hvkit.rank() :: hvkit.size()] for each in validation)
    found = fit(model, optimizer, local(data), validation_data=mine, epochs=2).history
    assert found.keys() == alone.keys() == {"loss", "mae", "val_loss", "val_mae"}
    for name in alone:
        assert found[name] == pytest.approx(alone[name], rel=1e-5)
    assert len(set(map(str, hvkit.allgather(found)))) == 1


def test_only_rank_0_writes_and_all_ranks_stop_together(tmp_path_factory):
    folder = shared_folder(tmp_path_factory)

    class StopsOnOneRank(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and hvkit.rank() == hvkit.size() - 1:
                self.model.stop_training = True

    written = folder / f"of-{hvkit.rank()}.weights.h5"
    callbacks = [keras.callbacks.ModelCheckpoint(written, save_weights_only=True), StopsOnOneRank()]
    model, optimizer = hvkit.distribute(mlp(), sgd())
    fit(model, optimizer, local(regression()), callbacks=callbacks, epochs=3)
    assert int(optimizer.iterations) == 3
    assert written.exists() == hvkit.is_main()


def test_a_step_that_overflows_is_left_out_on_all_ranks():
    optimizer = keras.optimizers.LossScaleOptimizer(sgd())
    model, optimizer = hvkit.distribute(mlp(), optimizer)
    before = weights(model)
    x, y = local(regression(steps=1))[0]
    own = model.trainable_variables
    for on_others in (np.inf, 1.0):
        model.zero_grad()
        loss = ((model(torch.from_numpy(x)) - torch.from_numpy(y)) ** 2).mean()
        optimizer.scale_loss(loss * (on_others if hvkit.rank() else 1.0)).backward()
        optimizer.apply([v.value.grad for v in own], own)
        assert same_on_all_ranks(weights(model))
        assert np.array_equal(weights(model)[0], before[0]) == np.isinf(on_others)


class Scales(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(float(self.model.optimizer.dynamic_scale))


def test_the_steps_that_overflow_are_those_of_one_process():
    """Each rank has its part of the scale, and float32 holds sums that float16 would not."""
    data = [(x, 50 * y) for x, y in regression(steps=20)]

    def train(model, optimizer, data):
        scaler = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**16)
        scales = Scales()
        fit(model, scaler, data, callbacks=[scales])
        return weights(model), scales.seen

    keras.config.set_dtype_policy("mixed_float16")
    try:
        alone, scales = train(mlp(0), sgd(), data)
        mine, parts = train(*hvkit.distribute(mlp(hvkit.rank()), sgd()), local(data))
    finally:
        keras.config.set_dtype_policy("float32")
    assert len(set(scales)) > 3  # it skips some, not one after the other
    assert np.allclose(np.multiply(parts, hvkit.size()), scales)
    assert largest_difference(mine, alone) < 0.01
    assert same_on_all_ranks(mine)


def test_an_optimizer_that_was_not_passed_is_refused():
    model, _ = hvkit.distribute(mlp(), sgd())
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    with pytest.raises(ValueError, match=r"\(Adam\) updates model .* but was not passed"):
        model.fit(*local(regression(steps=1))[0], verbose=0)


def test_a_backend_without_a_port_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(
        ValueError, match="runs on the 'openvino' backend, for which hvkit has no port"
    ):
        hvkit.distribute(mlp(), sgd())


def test_ranks_whose_weights_have_come_apart_stop_together():
    model, optimizer = hvkit.distribute(mlp(), sgd(), check_every=1)
    data = local(regression(steps=3))
    loop(model, optimizer, data[:1])
    if hvkit.rank():
        model.layers[0].kernel.assign(model.layers[0].kernel + 1)
    with pytest.raises(hvkit.RanksDisagreeError, match="dense/kernel"):
        loop(model, optimizer, data[1:])


@pytest.mark.usefixtures("double_precision")
def test_late_weights_are_those_of_rank_0_to_the_last_bit_under_mixed_precision():
    """A layer's call sees weights in 16 bits: what is copied must not be that."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        expected, model = unbuilt(), unbuilt(hvkit.rank())
    finally:
        keras.config.set_dtype_policy("float32")
    expected.build((None, 8))
    optimizer = keras.optimizers.SGD(0.0)
    hvkit.distribute(model, optimizer)
    fit(model, optimizer, local(regression(steps=1)))
    for mine, rank_0 in zip(weights(model), weights(expected), strict=True):
        assert np.array_equal(mine, rank_0)


@pytest.mark.two_ranks
def test_a_pipeline_needs_no_tensorflow():
    """The folder's fixture looks; ``tests/parallel/keras_pipeline`` compares the weights."""
    model, optimizer = hvkit.distribute(mlp(), sgd(), mesh=hvkit.Mesh(pipeline=2))
    history = fit(model, optimizer, regression(), epochs=2).history
    assert history["loss"][1] < history["loss"][0]


class OwnUpdate(keras.optimizers.SGD):
    """Not one of Keras's own, so that ``ShardedOptimizer`` tries it first."""


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.ShardedOptimizer()], ids=str)
def test_settings_that_keras_serialises_import_no_tensorflow(strategy):
    """The folder's fixture looks: Keras itself imports it, to look for its types in a schedule."""
    schedule = keras.optimizers.schedules.CosineDecay(0.05, 30)
    model, optimizer = hvkit.distribute(mlp(), OwnUpdate(schedule), strategy=strategy)
    fit(model, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks(weights(model))


@pytest.mark.two_ranks
@pytest.mark.parametrize("compiled", ["before", "after"])
def test_a_compiler_is_switched_off_with_a_warning(compiled, monkeypatch, caplog):
    monkeypatch.setattr(main_rank, "_logged", set())
    model, optimizer = mlp(), sgd()
    if compiled == "before":
        model.compile(optimizer, "mse", jit_compile=True)
        hvkit.distribute(model, optimizer)
        assert ("ignores jit_compile=True" in caplog.text) == hvkit.is_main()
    else:
        hvkit.distribute(model, optimizer)
        with pytest.warns(UserWarning, match="doesn't support `jit_compile=True`"):
            model.compile(optimizer, "mse", jit_compile=True)
    assert not model.jit_compile


def test_a_rank_without_rows_has_the_metrics_of_the_others_in_their_order():
    (x, y), *_ = regression(steps=1)
    rows = 0 if hvkit.rank() else 5
    one, (model, optimizer) = mlp(), hvkit.distribute(mlp(), sgd())
    one.set_weights(model.get_weights())
    for each in (one, model):
        each.compile(optimizer if each is model else sgd(), "mse", metrics=["mse", "mae"])
    expected = one.evaluate(x[:5], y[:5], verbose=0)
    for _ in range(2):
        assert model.evaluate(x[:rows], y[:rows], verbose=0) == pytest.approx(expected, rel=1e-5)
    assert len({str(each) for each in hvkit.allgather(model.evaluate(x[:rows], y[:rows]))}) == 1
    assert model.predict(x[:rows], verbose=0).shape == (rows, *y.shape[1:])


def test_predict_of_a_loader_without_rows_says_what_to_do():
    model, _ = hvkit.distribute(mlp(), sgd())
    (x, _), *_ = regression(steps=1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x[:0])))
    with pytest.raises(ValueError, match="predict got data without rows"):
        model.predict(loader, verbose=0)
