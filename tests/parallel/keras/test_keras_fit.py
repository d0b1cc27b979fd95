"""``fit`` and ``evaluate``: metrics of all ranks, common decisions, files from rank 0 only."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
from cases import MORE, cases
from keras_models import mlp, subclassed, weights
from ranks import error_of, same_on_all_ranks

import hvkit
from hvkit import RanksDisagreeError


def samples(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return x, (x[:, :4] > 0).astype(np.float32)


def mine(arrays):
    return tuple(each[hvkit.rank() :: hvkit.size()] for each in arrays)


def metrics():
    return ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="r")]


def compiled(seed=0, lr=0.1, make=mlp, **options):
    model, optimizer = hvkit.distribute(make(seed), keras.optimizers.SGD(lr), lr_scaling="none")
    model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True), **options)
    return model


def fit(model, data, **options):
    return model.fit(*data, **{"batch_size": 4, "shuffle": False, "verbose": 0} | options)


def test_epoch_and_validation_metrics_are_those_of_one_process():
    train, validation = samples(24 * hvkit.size()), samples(17, seed=1)
    reference = mlp()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    reference.compile(keras.optimizers.SGD(0.1), loss, metrics=metrics(), run_eagerly=True)
    batch = 4 * hvkit.size()
    expected = fit(reference, train, validation_data=validation, epochs=2, batch_size=batch).history
    model = compiled(hvkit.rank(), metrics=metrics())
    history = fit(model, mine(train), validation_data=mine(validation), epochs=2).history
    assert history.keys() == expected.keys() >= {"val_loss", "val_accuracy", "val_auc", "val_r"}
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-6), name
    assert len(set(hvkit.allgather(json.dumps(history)))) == 1


@pytest.mark.parametrize(("rows", "return_dict"), cases([(1, True), (23, False)]))
def test_evaluate_gives_what_one_process_measures_also_with_empty_parts(rows, return_dict):
    data = samples(rows)
    reference = mlp()
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    reference.compile(loss=loss, metrics=metrics(), run_eagerly=True)
    expected = reference.evaluate(*data, batch_size=4, verbose=0, return_dict=return_dict)
    model = compiled(metrics=metrics())
    with np.errstate(all="ignore"):
        result = model.evaluate(
            tf.data.Dataset.from_tensor_slices(mine(data)).batch(4),
            verbose=0, return_dict=return_dict,
        )  # fmt: skip
    if return_dict:
        assert result == pytest.approx(expected, rel=1e-6)
    else:
        assert list(result) == pytest.approx(expected, rel=1e-6)


@pytest.mark.two_ranks
def test_a_models_own_metrics_keep_their_local_state():
    model = compiled(metrics=["accuracy"])
    data = samples(8, seed=hvkit.rank())
    model.evaluate(*data, batch_size=4, verbose=0)
    count = next(v for m in model.metrics for v in m.variables if v.name == "count")
    assert count.numpy() == 8


class OwnLogs(keras.Model):
    """A ``train_step`` that returns numbers of its own."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def call(self, x):
        return self.inner(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        variables = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return {"mine": loss, "rank": tf.constant(float(hvkit.rank()))}


def test_numbers_from_a_custom_train_step_are_averaged():
    model = compiled(make=lambda seed: OwnLogs())
    history = fit(model, mine(samples(8 * hvkit.size()))).history
    assert history["rank"] == [(hvkit.size() - 1) / 2]
    assert same_on_all_ranks([np.array(history["mine"])])


def validation_that_worsens_on_odd_ranks():
    """Odd ranks have random labels: their loss rises while the others' falls."""
    x, y = samples(40, seed=1)
    return (x, 1 - y) if hvkit.rank() % 2 else (x, y)


def test_ranks_with_different_local_losses_stop_at_the_same_epoch():
    model = compiled(lr=0.5)
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    history = fit(
        model, mine(samples(24 * hvkit.size())), epochs=30, callbacks=[stop],
        validation_data=validation_that_worsens_on_odd_ranks(),
    )  # fmt: skip
    epochs = hvkit.allgather(len(history.epoch))
    assert len(set(epochs)) == 1
    assert epochs[0] < 30
    assert same_on_all_ranks(weights(model))


@MORE
@pytest.mark.two_ranks
def test_the_rate_is_lowered_on_all_ranks_alike():
    model = compiled(lr=0.5)
    lower = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    history = fit(
        model, mine(samples(24 * hvkit.size())), epochs=8, callbacks=[lower],
        validation_data=validation_that_worsens_on_odd_ranks(),
    ).history  # fmt: skip
    assert min(history["learning_rate"]) < 0.5
    assert len(set(hvkit.allgather(tuple(history["learning_rate"])))) == 1


class StopAtBatch(keras.callbacks.Callback):
    """One rank stops training in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if hvkit.rank() == 1 and batch == 2:
            self.model.stop_training = True


class StopAtEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvkit.rank() == 0 and epoch == 1:
            self.model.stop_training = True


@pytest.mark.parametrize(("callback", "steps"), cases([(StopAtBatch, 3), (StopAtEpoch, 12)]))
def test_one_rank_that_stops_stops_all_at_the_same_step(callback, steps):
    model = compiled()
    fit(model, mine(samples(24 * hvkit.size())), epochs=5, callbacks=[callback()])
    assert hvkit.allgather(int(model.optimizer.iterations.numpy())) == [steps] * hvkit.size()


@MORE
@pytest.mark.two_ranks
def test_a_callback_list_stops_all_ranks_too_and_stays_as_it_is():
    model = compiled()
    given = keras.callbacks.CallbackList([StopAtBatch()], add_history=True, model=model)
    before = list(given.callbacks)
    for epochs in (1, 2):
        validation = mine(samples(8 * hvkit.size(), seed=1))
        fit(model, mine(samples(24 * hvkit.size())), callbacks=given, validation_data=validation)
        assert (
            hvkit.allgather(int(model.optimizer.iterations.numpy())) == [3 * epochs] * hvkit.size()
        )
    assert given.callbacks == before


@MORE
@pytest.mark.two_ranks
def test_a_function_as_a_callback_stops_all_ranks_too():
    def stop(batch, logs):
        if hvkit.rank() == 1 and batch == 2:
            model.stop_training = True

    model = compiled()
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    fit(model, mine(samples(24 * hvkit.size())), callbacks=[callback])
    assert hvkit.allgather(int(model.optimizer.iterations.numpy())) == [3] * hvkit.size()


@MORE
@pytest.mark.two_ranks
def test_rank_0_may_have_callbacks_that_others_lack():
    model = compiled()
    callbacks = [StopAtBatch()] if hvkit.rank() == 0 else []
    history = fit(model, mine(samples(8 * hvkit.size())), epochs=2, callbacks=callbacks)
    assert len(history.epoch) == 2


class HandsOn(keras.Sequential):
    def fit(self, *args, patience=1, **kwargs):
        return super().fit(*args, epochs=patience, **kwargs)


class OfItsOwn(keras.Sequential):
    def fit(self, data, times):
        return super().fit(*data, epochs=times, verbose=0)


class TakesAny(keras.Sequential):
    def fit(self, *data):
        return super().fit(*data, epochs=2, verbose=0)


@pytest.mark.two_ranks
@pytest.mark.parametrize(
    ("kind", "fit_it"),
    cases(
        [
            (HandsOn, lambda model, x, y: model.fit(x, y, 4, patience=2, verbose=0)),
            (HandsOn, lambda model, x, y: model.fit(x, y=y, patience=2)),
            (OfItsOwn, lambda model, x, y: model.fit((x, y), 2)),
            (OfItsOwn, lambda model, x, y: model.fit(data=(x, y), times=2)),
            (TakesAny, lambda model, x, y: model.fit(x, y)),
        ]
    ),
)
def test_a_fit_of_the_models_own_takes_its_own_arguments(kind, fit_it):
    model = compiled(make=lambda seed: kind([keras.Input((8,)), keras.layers.Dense(4)]))
    assert len(fit_it(model, *samples(8)).epoch) == 2


@MORE
def test_an_epoch_goes_on_after_an_evaluation_inside_it():
    model = compiled()
    data, other = mine(samples(24 * hvkit.size())), mine(samples(8 * hvkit.size(), seed=1))
    losses = []
    evaluates = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: losses.append(
            model.evaluate(*other, batch_size=4, verbose=0)
        )
    )
    fit(model, data, callbacks=[evaluates])
    assert len(losses) == 6
    assert same_on_all_ranks([np.array(losses)])
    rows = 24 if hvkit.rank() else 20
    error, text = error_of(lambda: fit(model, (data[0][:rows], data[1][:rows])))
    assert error is not None
    assert "same number of" in text


def test_a_nan_on_one_rank_stops_all_and_is_seen_by_all():
    model = compiled()
    x, y = mine(samples(24 * hvkit.size()))
    if hvkit.rank() == 1:
        x[5] = np.nan
    history = fit(model, (x, y), callbacks=[keras.callbacks.TerminateOnNaN()]).history
    assert np.isnan(history["loss"]).all()
    steps = hvkit.allgather(int(model.optimizer.iterations.numpy()))
    assert steps == [2] * hvkit.size()


@pytest.mark.two_ranks
def test_only_rank_0_writes_files_and_shows_progress(tmp_path, capfd):
    own = tmp_path / f"rank{hvkit.rank()}"
    own.mkdir()
    saver = keras.callbacks.ModelCheckpoint(
        own / "best.keras", monitor="val_loss", save_best_only=True, verbose=1
    )
    callbacks = [saver, keras.callbacks.CSVLogger(own / "log.csv")]
    model = compiled()
    fit(
        model, mine(samples(8 * hvkit.size())), callbacks=callbacks, verbose=2, epochs=2,
        validation_data=mine(samples(8 * hvkit.size(), seed=1)),
    )  # fmt: skip
    written = sorted(path.name for path in own.iterdir())
    printed = capfd.readouterr().out
    if hvkit.rank() == 0:
        assert written == ["best.keras", "log.csv"]
        assert "val_loss" in printed
        keras.models.load_model(own / "best.keras")
    else:
        assert written == []
        assert printed == ""
    assert len(set(hvkit.allgather(saver.best))) == 1


def test_parts_of_different_length_are_refused_before_the_first_step():
    model = compiled(make=subclassed)
    data = samples(8 + 8 * hvkit.rank())
    error, text = error_of(lambda: fit(model, data))
    assert error is hvkit.RanksDisagreeError
    assert "hvkit.shard" in text
    assert "[2, 4" in text


@pytest.mark.two_ranks
@pytest.mark.parametrize("eagerly", cases([False, True]), ids=["graph", "eager"])
def test_a_generator_that_ends_early_on_one_rank_ends_all_with_the_reason(eagerly):
    model = compiled(run_eagerly=eagerly)
    x, y = samples(4)
    batches = ((x, y) for _ in range(2 if hvkit.rank() == 1 else 3))
    error, text = error_of(lambda: model.fit(batches, verbose=0))
    assert error is RanksDisagreeError
    assert text.startswith("some ranks ran out of data while others go on: give every rank")
    assert text.endswith("hvkit.shard(data) does")


def test_backup_and_restore_is_refused_with_the_fix(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match=r"use hvkit\.Checkpoint"):
        fit(compiled(), samples(8), callbacks=[backup])


@MORE
@pytest.mark.two_ranks
def test_positional_arguments_reach_fit_and_evaluate():
    model = compiled(metrics=["accuracy"])
    x, y = samples(8)
    assert len(model.fit(x, y, 4, 2, 0).epoch) == 2
    assert len(model.evaluate(x, y, 4, 0)) == 2
    assert model.predict(x, 4, 0).shape == (8, 4)
