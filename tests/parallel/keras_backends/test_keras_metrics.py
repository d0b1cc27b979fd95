"""Metrics of a user's own: the same numbers on all ranks; what cannot be right is named."""

import keras
import numpy as np
import pytest
from cases import MORE, cases
from keras_models import alike, joined, local, mlp, on_tensorflow, refit, regression, weights
from ranks import error_of, largest_difference

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


def trained(metrics, epochs=1, callbacks=(), run_eagerly=True, make=mlp):
    model, optimizer = hvkit.distribute(make(), keras.optimizers.SGD(0.01))
    model.compile(optimizer, "mse", metrics=metrics, run_eagerly=run_eagerly)
    return model, refit(
        model, local(regression(steps=3)), epochs=epochs, callbacks=[*callbacks]
    ).history


def said(capsys):
    """What rank 0 has printed, on every rank."""
    return hvkit.broadcast(capsys.readouterr().err)


@pytest.mark.parametrize("run_eagerly", cases([True, False]))
def test_a_metric_with_state_in_python_is_the_mean_on_all_ranks_and_named(run_eagerly, capsys):
    _, history = trained([InPython()], run_eagerly=run_eagerly)
    assert history["in_python"] == [(1 + hvkit.size()) / 2]
    assert "metric 'in_python' differs between ranks (" in (text := said(capsys))
    assert "keep the state in add_weight(...)" in text


@pytest.mark.two_ranks
def test_weights_that_a_callback_sets_at_the_end_of_fit_are_compared():
    class Last(keras.callbacks.Callback):
        def on_train_end(self, logs=None):
            if hvkit.rank() == 1:
                self.model.set_weights([2 * w for w in self.model.get_weights()])

    kind, text = error_of(lambda: trained([], callbacks=[Last()]))
    assert kind is hvkit.RanksDisagreeError
    assert "kernel of rank 1 differs from that of rank 0" in text


class AsInKerasGuide(keras.Sequential):
    """Its steps return the metrics of ``compile`` in a dictionary of their own."""

    def train_step(self, data):
        super().train_step(data)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        super().test_step(data)
        return {metric.name: metric.result() for metric in self.metrics}


@MORE
def test_ranks_restore_the_weights_of_the_same_epoch():
    """Each rank alone would take another one for the best."""
    metric, epoch = InPython(), []
    metric.result = lambda: float((len(epoch) + hvkit.rank()) % 2)
    count = keras.callbacks.LambdaCallback(on_epoch_begin=lambda number, logs: epoch.append(number))
    restore = keras.callbacks.EarlyStopping(
        "in_python", mode="max", patience=9, restore_best_weights=True
    )
    model, _ = trained([metric], epochs=3, callbacks=[count, restore])
    assert alike(model)


@pytest.mark.parametrize(
    ("aggregation", "run_eagerly"), cases([("mean", False), ("sum", False), ("sum", True)])
)
def test_a_metric_whose_variables_are_no_sums_is_named(aggregation, run_eagerly, capsys):
    _, history = trained([Assigned(aggregation), Counted()], run_eagerly=run_eagerly)
    text = said(capsys)
    assert "metric 'counted'" not in text
    if aggregation == "mean":
        assert history["ratio"][0] == pytest.approx(0.8)
        assert "metric" not in text
        return
    total = 0.8 * hvkit.size()
    assert history["ratio"][0] == pytest.approx(total)
    assert f"metric 'ratio' is {total:.4g} over all ranks, but at most 0.8 on one" in text
    assert 'aggregation="mean" in add_variable' in text


@MORE
def test_metrics_inside_a_dictionary_of_a_step_are_those_of_all_ranks():
    model = AsInKerasGuide(mlp().layers)
    model, optimizer = hvkit.distribute(model, keras.optimizers.SGD(0.0))
    model.compile(optimizer, "mse", metrics=["mae"])
    data = regression(steps=3)
    history = refit(model, local(data)).history
    x, y = joined(data)
    expected = np.mean(np.abs(model.predict(x, verbose=0) - y))
    assert history["mae"] == [pytest.approx(expected)]
    found = model.evaluate(*joined(local(data)), verbose=0, return_dict=True)
    assert found["mae"] == pytest.approx(expected)


@MORE
@on_tensorflow
@pytest.mark.two_ranks
def test_a_mean_of_all_ranks_inside_a_loss_of_fit():
    """Three ways to write it, which are the same; ``any_rank`` as to leave out a step."""

    def masked_mean(mean_count):
        def loss(y, predicted):
            mask = keras.ops.cast(y > 0, predicted.dtype)
            bad = keras.ops.cast(hvkit.any_rank(keras.ops.any(y > 1e6)), predicted.dtype)
            total = keras.ops.sum(mask * (predicted - y) ** 2)
            return total / mean_count(keras.ops.sum(mask)) + bad

        return loss

    def mean_of_all_ranks(count):
        weighted = hvkit.average({"count": count}, weight=count / count)["count"]
        return (hvkit.average(count) + hvkit.allreduce(count) + weighted) / 3

    data = regression(steps=6)
    alone = mlp()
    alone.compile(keras.optimizers.SGD(0.05), masked_mean(lambda count: count), run_eagerly=True)
    refit(alone, data)
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.05))
    model.compile(optimizer, masked_mean(mean_of_all_ranks))
    refit(model, local(data))
    assert largest_difference(weights(model), weights(alone)) < 1e-6
