"""What Keras on PyTorch does otherwise than on TensorFlow, and what it refuses."""

import keras
import numpy as np
import pytest
import torch
from cases import cases
from keras_models import (
    eager_tape,
    equals_one_process,
    fit,
    joined,
    local,
    mlp,
    normalised,
    refit,
    regression,
    weights,
)
from ranks import same_on_all_ranks

import hvkit
from hvkit import main_rank


def sgd(*_):
    return keras.optimizers.SGD(0.05)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "strategy",
    cases(
        [
            hvkit.ShardedOptimizer(),
            hvkit.Centralized(),
            hvkit.LocalSGD(1),
            hvkit.DiLoCo(1, 1.0, 0.0),
        ],
        name=str,
    ),
)
def test_strategies_that_give_the_weights_of_one_process(strategy):
    options = {"tolerance": 1e-6, "lr_scaling": "none", "strategy": strategy}
    equals_one_process(mlp, sgd, eager_tape, regression(), **options)


@pytest.mark.parametrize(
    "options", [{"strategy": hvkit.LocalSGD(2)}, {"compression": hvkit.TopK(0.5)}], ids=str
)
@pytest.mark.parametrize("scaled", ["optimizer", "compile"])
def test_a_loss_scale_is_refused_where_ranks_would_come_apart(scaled, options):
    model, optimizer = mlp(), sgd()
    if scaled == "optimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    else:
        model.dtype_policy = "mixed_float16"
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        hvkit.distribute(model, optimizer, **options)


def test_statistics_that_a_callback_sets_are_kept():
    model, optimizer = hvkit.distribute(normalised(), sgd(), strategy=hvkit.LocalSGD(3))
    model.compile(optimizer, "mse")
    ones = [np.ones_like(w) for w in weights(model)]
    sets = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.set_weights(ones))
    refit(model, local(regression(steps=4)), callbacks=[sets])
    assert all(np.allclose(w, 1) for w in weights(model))


def test_demo_trains_one_model():
    model, optimizer = hvkit.distribute(mlp(hvkit.rank()), sgd(), strategy=hvkit.DeMo())
    fit(model, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("method", ["fit", "loop"])
def test_ranks_whose_weights_have_come_apart_stop_together(method):
    model, optimizer = hvkit.distribute(mlp(), sgd(), check_every=1)
    train = {"fit": fit, "loop": eager_tape}[method]
    data = local(regression(steps=3))
    train(model, optimizer, data[:1])
    if hvkit.rank():
        model.layers[0].kernel.assign(model.layers[0].kernel + 1)
    with pytest.raises(hvkit.RanksDisagreeError, match="dense/kernel"):
        train(model, optimizer, data[1:])


def test_an_optimizer_that_was_not_passed_is_refused():
    model, _ = hvkit.distribute(mlp(), sgd())
    with pytest.raises(ValueError, match=r"\(Adam\) updates model .* but was not passed"):
        fit(model, keras.optimizers.Adam(), local(regression(steps=1)))


def test_a_backend_without_a_port_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "openvino")
    with pytest.raises(
        ValueError, match="runs on the 'openvino' backend, for which hvkit has no port"
    ):
        hvkit.distribute(mlp(), sgd())


@pytest.mark.two_ranks
def test_a_pipeline_needs_no_tensorflow():
    """The folder's fixture looks; ``tests/parallel/keras_pipeline`` compares the weights."""
    model, optimizer = hvkit.distribute(mlp(), sgd(), mesh=hvkit.Mesh(pipeline=2))
    model.compile(optimizer, "mse")
    losses = refit(model, regression(), epochs=2).history["loss"]
    assert losses[1] < losses[0]


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


def test_predict_of_a_loader_without_rows_says_what_to_do():
    model, _ = hvkit.distribute(mlp(), sgd())
    x, _ = joined(regression(steps=1))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x[:0])))
    with pytest.raises(ValueError, match="predict got data without rows"):
        model.predict(loader, verbose=0)
