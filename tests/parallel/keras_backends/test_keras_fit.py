"""``fit`` and ``evaluate``: metrics of all ranks, common decisions, files from rank 0 only."""

import json

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras_models import ON_TENSORFLOW, alike, mlp, on_tensorflow, subclassed
from ranks import error_of, same_on_all_ranks

import hvkit

ALL_ROWS = 24 * hvkit.size()


def samples(rows, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return x, (x[:, :4] > 0).astype(np.float32)


def mine(rows=ALL_ROWS, seed=0):
    """This rank's part of so many samples."""
    return tuple(each[hvkit.rank() :: hvkit.size()] for each in samples(rows, seed))


def metrics():
    return ["accuracy", keras.metrics.AUC(name="auc"), keras.metrics.RootMeanSquaredError(name="r")]


def loss():
    return keras.losses.BinaryCrossentropy(from_logits=True)


def compiled(seed=0, lr=0.1, make=mlp, **options):
    model, optimizer = hvkit.distribute(make(seed), keras.optimizers.SGD(lr))
    model.compile(optimizer, loss(), **options)
    return model


def fit(model, data, **options):
    return model.fit(*data, **{"batch_size": 4, "shuffle": False, "verbose": 0} | options)


def steps_of_all_ranks(model):
    return hvkit.allgather(int(model.optimizer.iterations.numpy()))


def test_epoch_and_validation_metrics_are_those_of_one_process():
    reference = mlp()
    reference.compile(keras.optimizers.SGD(0.1), loss(), metrics=metrics(), run_eagerly=True)
    options = {"validation_data": samples(17, seed=1), "batch_size": 4 * hvkit.size()}
    expected = fit(reference, samples(ALL_ROWS), epochs=2, **options).history
    model = compiled(hvkit.rank(), metrics=metrics())
    history = fit(model, mine(), validation_data=mine(17, seed=1), epochs=2).history
    assert history.keys() == expected.keys() >= {"val_loss", "val_accuracy", "val_auc", "val_r"}
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-5), name
    assert len(set(hvkit.allgather(json.dumps(history)))) == 1


@pytest.mark.parametrize(("rows", "return_dict"), cases([(1, True), (23, False)]))
def test_evaluate_gives_what_one_process_measures_also_with_empty_parts(rows, return_dict):
    reference = mlp()
    reference.compile(loss=loss(), metrics=metrics(), run_eagerly=True)
    options = {"verbose": 0, "return_dict": return_dict}
    expected = reference.evaluate(*samples(rows), batch_size=4, **options)
    model = compiled(metrics=metrics())
    if ON_TENSORFLOW:
        import tensorflow as tf

        data = [tf.data.Dataset.from_tensor_slices(mine(rows)).batch(4)]
    else:
        data = [*mine(rows), 4]
    with np.errstate(all="ignore"):
        found = model.evaluate(*data, **options)
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_rank_without_rows_has_the_metrics_of_the_others_and_predicts_none():
    (x, y), rows = samples(5), 0 if hvkit.rank() else 5
    one, model = mlp(), compiled(metrics=["mse", "mae"])
    one.compile(loss=loss(), metrics=["mse", "mae"])
    expected = one.evaluate(x, y, verbose=0)
    for _ in range(2):
        found = model.evaluate(x[:rows], y[:rows], verbose=0)
        assert found == pytest.approx(expected, rel=1e-5)
        assert len({str(each) for each in hvkit.allgather(found)}) == 1
    assert model.predict(x[:rows], verbose=0).shape == (rows, *y.shape[1:])


@pytest.mark.two_ranks
def test_a_models_own_metrics_keep_their_local_state():
    model = compiled(metrics=["accuracy"])
    model.evaluate(*samples(8, seed=hvkit.rank()), batch_size=4, verbose=0)
    count = next(v for m in model.metrics for v in m.variables if v.name == "count")
    assert count.numpy() == 8


@pytest.mark.two_ranks
@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_one_batch_has_the_metrics_of_all_ranks(method):
    reference = mlp()
    reference.compile(keras.optimizers.SGD(0.1), loss(), metrics=["mae"])
    expected = getattr(reference, method)(*samples(4 * hvkit.size()))
    found = getattr(compiled(metrics=["mae"]), method)(*mine(4 * hvkit.size()))
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(map(str, hvkit.allgather(found)))) == 1


class OwnNumbers(keras.Sequential):
    """Its ``train_step`` returns numbers of this rank, also in half precision."""

    def train_step(self, data):
        super().train_step(data)
        rank = keras.ops.cast(hvkit.rank(), "float32")
        return {"rank": rank, "half": keras.ops.cast(1.0 + rank, "bfloat16")}


def test_numbers_from_a_custom_train_step_are_averaged():
    history = fit(compiled(make=lambda seed: OwnNumbers(mlp().layers)), mine()).history
    assert history == {"rank": [(hvkit.size() - 1) / 2], "half": [(1 + hvkit.size()) / 2]}


def test_ranks_with_different_local_losses_stop_at_the_same_epoch_and_lower_their_rate_alike():
    """Odd ranks have wrong labels in validation: their loss rises while the others' falls."""
    x, y = samples(40, seed=1)
    model = compiled(lr=0.5)
    stop = keras.callbacks.EarlyStopping(patience=4, restore_best_weights=True)
    lower = keras.callbacks.ReduceLROnPlateau(patience=1, factor=0.5)
    validation = (x, 1 - y) if hvkit.rank() % 2 else (x, y)
    options = {"validation_data": validation, "callbacks": [stop, lower]}
    history = fit(model, mine(), epochs=30, **options).history
    rates = hvkit.allgather(tuple(history["learning_rate"]))
    assert len(set(rates)) == 1
    assert len(rates[0]) < 30
    assert min(rates[0]) < 0.5
    assert alike(model)


class StopAtBatch(keras.callbacks.Callback):
    """One rank stops training in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if hvkit.rank() == 1 and batch == 2:
            self.model.stop_training = True


class StopAtEpoch(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if hvkit.rank() == 0 and epoch == 1:
            self.model.stop_training = True


class StopInAFunction(keras.callbacks.LambdaCallback):
    def __init__(self):
        super().__init__(on_train_batch_end=self.stop)

    def stop(self, batch, logs):
        StopAtBatch.on_train_batch_end(self, batch)


@pytest.mark.parametrize(
    ("callback", "steps"), cases([(StopAtBatch, 3), (StopAtEpoch, 12), (StopInAFunction, 3)])
)
def test_one_rank_that_stops_stops_all_at_the_same_step(callback, steps):
    model = compiled(run_eagerly=callback is StopInAFunction)
    fit(model, mine(), epochs=5, callbacks=[callback()])
    assert steps_of_all_ranks(model) == [steps] * hvkit.size()


@MORE
@pytest.mark.two_ranks
def test_a_callback_list_stops_all_ranks_too_and_stays_as_it_is():
    model = compiled(run_eagerly=True)
    given = keras.callbacks.CallbackList([StopAtBatch()], add_history=True, model=model)
    before = list(given.callbacks)
    for epochs in (1, 2):
        fit(model, mine(), callbacks=given, validation_data=mine(8 * hvkit.size(), seed=1))
        assert steps_of_all_ranks(model) == [3 * epochs] * hvkit.size()
    assert given.callbacks == before


@MORE
@pytest.mark.two_ranks
def test_rank_0_may_have_callbacks_that_others_lack():
    callbacks = [StopAtBatch()] if hvkit.rank() == 0 else []
    model = compiled(run_eagerly=True)
    assert len(fit(model, mine(8 * hvkit.size()), epochs=2, callbacks=callbacks).epoch) == 2


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
            (keras.Sequential, lambda model, x, y: model.fit(x, y, 4, 2, 0)),
        ]
    ),
)
def test_fit_and_a_fit_of_the_models_own_take_their_arguments(kind, fit_it):
    model = compiled(make=lambda seed: kind(mlp().layers), metrics=["accuracy"], run_eagerly=True)
    x, y = samples(8)
    assert len(fit_it(model, x, y).epoch) == 2
    assert len(model.evaluate(x, y, 4, 0)) == 2
    assert model.predict(x, 4, 0).shape == (8, 4)


@MORE
def test_an_epoch_goes_on_after_an_evaluation_inside_it():
    model = compiled(run_eagerly=True)
    data, other = mine(), mine(8 * hvkit.size(), seed=1)
    losses = []
    evaluates = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: losses.append(model.evaluate(*other, 4, 0))
    )
    fit(model, data, callbacks=[evaluates])
    assert len(losses) == 6
    assert same_on_all_ranks([np.array(losses)])
    rows = 24 if hvkit.rank() else 20
    _, text = error_of(lambda: fit(model, (data[0][:rows], data[1][:rows])))
    assert "same number of" in text


def test_a_nan_on_one_rank_stops_all_and_is_seen_by_all():
    model = compiled()
    x, y = mine()
    if hvkit.rank() == 1:
        x[5] = np.nan
    history = fit(model, (x, y), callbacks=[keras.callbacks.TerminateOnNaN()]).history
    assert np.isnan(history["loss"]).all()
    assert steps_of_all_ranks(model) == [2] * hvkit.size()


@pytest.mark.two_ranks
def test_only_rank_0_writes_files_and_shows_progress(tmp_path, capfd):
    own = tmp_path / f"rank{hvkit.rank()}"
    own.mkdir()
    saver = keras.callbacks.ModelCheckpoint(
        own / "best.keras", monitor="val_loss", save_best_only=True, verbose=1
    )
    callbacks = [saver, keras.callbacks.CSVLogger(own / "log.csv")]
    options = {"validation_data": mine(8 * hvkit.size(), seed=1), "callbacks": callbacks}
    fit(compiled(run_eagerly=True), mine(8 * hvkit.size()), verbose=2, epochs=2, **options)
    written = sorted(path.name for path in own.iterdir())
    printed = capfd.readouterr().out
    if hvkit.rank() == 0:
        assert written == ["best.keras", "log.csv"]
        assert "val_loss" in printed
        keras.models.load_model(own / "best.keras")
    else:
        assert (written, printed) == ([], "")
    assert len(set(hvkit.allgather(saver.best))) == 1


def test_parts_of_different_length_are_refused_before_the_first_step():
    model = compiled(make=subclassed)
    error, text = error_of(lambda: fit(model, samples(8 + 8 * hvkit.rank())))
    assert error is hvkit.RanksDisagreeError
    assert "hvkit.shard" in text
    assert "[2, 4" in text


@pytest.mark.two_ranks
@on_tensorflow
@pytest.mark.parametrize("eagerly", cases([False, True]), ids=["graph", "eager"])
def test_a_generator_that_ends_early_on_one_rank_ends_all_with_the_reason(eagerly):
    model = compiled(run_eagerly=eagerly)
    batches = (samples(4) for _ in range(2 if hvkit.rank() == 1 else 3))
    error, text = error_of(lambda: model.fit(batches, verbose=0))
    assert error is hvkit.RanksDisagreeError
    assert text.startswith("some ranks ran out of data while others go on: give every rank")
    assert text.endswith("hvkit.shard(data) does")


def test_backup_and_restore_is_refused_with_the_fix(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    with pytest.raises(ValueError, match=r"use hvkit\.Checkpoint"):
        fit(compiled(), samples(8), callbacks=[backup])
