"""Metrics of a user's own: the same numbers on all ranks; what cannot be right is named."""

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras_models import alike, local, mlp, regression
from ranks import error_of, largest_difference, my_part

import hvkit
from hvkit import main_rank


class InPython(keras.metrics.Metric):
    """Keeps what it has seen in an attribute."""

    def __init__(self):
        super().__init__(name="in_python")
        self.seen = 0.0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen = 1.0 + hvkit.rank()

    def result(self):
        return self.seen


class Assigned(keras.metrics.Metric):
    """A ratio that each batch sets anew."""

    def __init__(self, aggregation="sum"):
        super().__init__(name="ratio")
        self.ratio = self.add_variable((), "zeros", name="ratio", aggregation=aggregation)

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.ratio.assign(0.8 + 0.0 * keras.ops.mean(y_pred))

    def result(self):
        return self.ratio


class Counted(keras.metrics.Metric):
    """A ratio of sums, and so between the ranks' own."""

    def __init__(self):
        super().__init__(name="counted")
        self.hits = self.add_weight(name="hits", initializer="zeros")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(y_pred > y_true, "float32")))
        self.total.assign_add(keras.ops.cast(keras.ops.size(y_true), "float32"))

    def result(self):
        return self.hits / self.total


@pytest.fixture(autouse=True)
def _nothing_warned_yet(monkeypatch):
    monkeypatch.setattr(main_rank, "_logged", set())


def trained(metrics, epochs=1, callbacks=(), run_eagerly=False, **options):
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.01), **options)
    model.compile(optimizer, "mse", metrics=metrics, run_eagerly=run_eagerly)
    x, y = (np.concatenate(part) for part in zip(*regression(steps=3), strict=True))
    history = model.fit(
        *map(my_part, (x, y)), batch_size=6, epochs=epochs, callbacks=[*callbacks], verbose=0
    )
    return model, history.history


def said(capsys):
    """What rank 0 has printed, on every rank."""
    return hvkit.broadcast(capsys.readouterr().err)


@pytest.mark.parametrize("run_eagerly", cases([True, False]))
def test_a_metric_with_state_in_python_is_the_mean_on_all_ranks_and_named(run_eagerly, capsys):
    _, history = trained([InPython()], run_eagerly=run_eagerly)
    assert history["in_python"] == [(1 + hvkit.size()) / 2]
    assert "metric 'in_python' differs between ranks (" in (text := said(capsys))
    assert "keep the state in add_weight(...)" in text


@MORE
def test_ranks_restore_the_weights_of_the_same_epoch():
    """Each rank alone would take another one for the best."""
    metric = InPython()
    metric.result = lambda: float((epoch[0] + hvkit.rank()) % 2)
    epoch = [0]
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda e, logs: epoch.__setitem__(0, e))
    restore = keras.callbacks.EarlyStopping(
        "in_python", mode="max", patience=9, restore_best_weights=True
    )
    model, _ = trained([metric], epochs=3, callbacks=[count, restore])
    assert alike(model)


@pytest.mark.two_ranks
def test_weights_that_a_callback_sets_at_the_end_of_fit_are_compared():
    class Last(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            if hvkit.rank() == 1:
                self.model.set_weights([2 * w for w in self.model.get_weights()])

    kind, text = error_of(lambda: trained([], callbacks=[Last()]))
    assert kind is hvkit.RanksDisagreeError
    assert "kernel of rank 1 differs from that of rank 0" in text


@MORE
def test_a_metric_whose_variables_are_no_sums_is_named(capsys):
    _, history = trained([Assigned(), Counted()])
    assert history["ratio"][0] == pytest.approx(0.8 * hvkit.size())
    assert f"metric 'ratio' is {0.8 * hvkit.size():.4g} over all ranks, but at most 0.8 on one" in (
        text := said(capsys)
    )
    assert 'aggregation="mean" in add_variable' in text
    assert "metric 'counted'" not in text


def test_variables_that_are_averaged_are_not_named(capsys):
    _, history = trained([Assigned(aggregation="mean")])
    assert history["ratio"][0] == pytest.approx(0.8)
    assert "metric" not in said(capsys)


class OwnNumbers(keras.Sequential):
    """Its ``train_step`` returns half-precision numbers of this rank."""

    def train_step(self, data):
        super().train_step(data)
        return {"own": keras.ops.cast(1.0 + hvkit.rank(), "bfloat16")}


def test_numbers_in_bfloat16_of_a_train_step_are_averaged():
    model = OwnNumbers(mlp().layers)
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse")
    x, y = (np.concatenate(part) for part in zip(*regression(steps=3), strict=True))
    history = model.fit(*map(my_part, (x, y)), batch_size=6, verbose=0)
    assert history.history["own"] == [(1 + hvkit.size()) / 2]


class AsInKerasGuide(keras.Sequential):
    """Its steps return the metrics of ``compile`` in a dictionary of their own."""

    def train_step(self, data):
        super().train_step(data)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        super().test_step(data)
        return {metric.name: metric.result() for metric in self.metrics}


@MORE
def test_metrics_inside_a_dictionary_of_a_step_are_those_of_all_ranks():
    model = AsInKerasGuide(mlp().layers)
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=["mae"])
    x, y = (np.concatenate(part) for part in zip(*regression(steps=3), strict=True))
    part = tuple(map(my_part, (x, y)))
    history = model.fit(*part, batch_size=6, verbose=0).history
    expected = np.mean(np.abs(np.asarray(model(x)) - y))
    assert history["mae"] == [pytest.approx(expected)]
    assert model.evaluate(*part, verbose=0, return_dict=True)["mae"] == pytest.approx(expected)


def test_a_rank_without_rows_has_the_metrics_of_the_others_and_predicts_none():
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", metrics=["mse", "mae"])
    (x, y), *_ = regression(steps=1)
    rows = 0 if hvkit.rank() else len(x)
    first, *others = hvkit.allgather(model.evaluate(x[:rows], y[:rows], verbose=0))
    assert all(each == first for each in others)
    assert model.predict(x[:rows], verbose=0).shape == (rows, *y.shape[1:])


def masked_mean(mean_count):
    def loss(y, predicted):
        mask = keras.ops.cast(y > 0, predicted.dtype)
        # As any_rank would be used to leave out a step.
        bad = keras.ops.cast(hvkit.any_rank(keras.ops.any(y > 1e6)), predicted.dtype)
        return keras.ops.sum(mask * (predicted - y) ** 2) / mean_count(keras.ops.sum(mask)) + bad

    return loss


@MORE
@pytest.mark.two_ranks
def test_a_mean_of_all_ranks_inside_a_loss_of_fit():
    data = regression(steps=6)

    def train(model, optimizer, data, mean_count):
        model.compile(optimizer, masked_mean(mean_count))
        x, y = (np.concatenate(part) for part in zip(*data, strict=True))
        model.fit(x, y, batch_size=len(data[0][0]), shuffle=False, verbose=0)
        return [w.numpy() for w in model.weights]

    alone = train(mlp(), keras.optimizers.SGD(0.05), data, lambda count: count)
    for mean_count in (
        hvkit.average,
        hvkit.allreduce,
        lambda count: hvkit.average({"count": count}, weight=count / count)["count"],
    ):
        mine = train(*hvkit.distribute(mlp(), keras.optimizers.SGD(0.05)), local(data), mean_count)
        assert largest_difference(mine, alone) < 1e-6


@pytest.mark.two_ranks
@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_one_batch_has_the_metrics_of_all_ranks(method):
    (x, y), *_ = regression(steps=1)
    reference = mlp()
    reference.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    expected = getattr(reference, method)(x, y)
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05))
    model.compile(optimizer, "mse", metrics=["mae"])
    found = getattr(model, method)(my_part(x), my_part(y))
    assert found == pytest.approx(expected, rel=1e-6)
    assert len(set(map(str, hvkit.allgather(found)))) == 1
