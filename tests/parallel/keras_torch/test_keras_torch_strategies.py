"""Every strategy and compression that Keras has, on PyTorch."""

import keras
import numpy as np
import pytest
from cases import cases
from keras_nets import (
    LOOPS,
    equals_one_process,
    fit,
    local,
    loop,
    mlp,
    normalised,
    regression,
    unbuilt,
    weights,
)
from ranks import largest_difference, same_on_all_ranks

import hvkit

EQUAL_TO_ONE_PROCESS = {
    "centralized": hvkit.Centralized(),
    "sharded": hvkit.ShardedOptimizer(),
    "rounds of one step": hvkit.LocalSGD(1),
    "diloco": hvkit.DiLoCo(1, 1.0, 0.0),
}
ALONE = {
    "local sgd": hvkit.LocalSGD(3),
    "diloco": hvkit.DiLoCo(every=3),
    "overlapped": hvkit.DiLoCo(every=3, overlap=1),
    "gossip": hvkit.Gossip(every=3),
    "elastic averaging": hvkit.ElasticAveraging(every=3),
    "parameter server": hvkit.ParameterServer(2),
}
TOP_K = hvkit.TopK(0.5)
COMPRESSIONS = ["fp16", "bf16", "int8", TOP_K, hvkit.PowerSGD(2)]


def sgd():
    return keras.optimizers.SGD(0.05)


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize("strategy", cases(EQUAL_TO_ONE_PROCESS, ["sharded"]))
def test_strategies_that_give_the_weights_of_one_process(strategy):
    chosen = EQUAL_TO_ONE_PROCESS[strategy]
    equals_one_process(mlp, lambda _: sgd(), loop, regression(), tolerance=1e-6, strategy=chosen)


@pytest.mark.parametrize("make", cases([normalised, unbuilt]))
@pytest.mark.parametrize("strategy", cases(ALONE, ["diloco", "gossip", "parameter server"]))
def test_ranks_that_train_alone_leave_fit_with_one_model(strategy, make):
    model, optimizer = hvkit.distribute(make(hvkit.rank()), sgd(), strategy=ALONE[strategy])
    found = fit(model, optimizer, local(regression()), epochs=2).history["loss"]
    assert same_on_all_ranks(weights(model))
    assert found[1] < found[0]


@pytest.mark.parametrize("strategy", cases(ALONE, ["overlapped", "parameter server"]))
def test_settled_shows_one_model_and_puts_back_each_ranks_own(strategy):
    model, optimizer = hvkit.distribute(mlp(), sgd(), strategy=ALONE[strategy])
    loop(model, optimizer, local(regression(steps=5)))
    own = weights(model)
    with hvkit.settled(model):
        assert same_on_all_ranks(weights(model))
    with hvkit.settled(model.layers[0]):  # which is a module of PyTorch, too
        assert same_on_all_ranks(weights(model))
    assert all(map(np.array_equal, weights(model), own))
    assert not same_on_all_ranks(own)


def test_a_round_ends_after_so_many_updates_of_an_accumulating_optimizer():
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    model, optimizer = hvkit.distribute(mlp(), optimizer, strategy=hvkit.LocalSGD(2))
    for step, batch in enumerate(regression(steps=8), 1):
        loop(model, optimizer, local([batch]))
        assert same_on_all_ranks(weights(model)) == (step == 1 or step % 4 in (0, 1))


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


@pytest.mark.parametrize("train", cases(LOOPS))
@pytest.mark.parametrize("compression", cases(COMPRESSIONS, ["bf16", TOP_K], str))
def test_compressed_gradients_train_one_model(compression, train):
    model, optimizer = hvkit.distribute(mlp(hvkit.rank()), sgd(), compression=compression)
    reference = mlp()
    LOOPS[train](model, optimizer, local(regression(steps=3)))
    LOOPS[train](reference, sgd(), regression(steps=3))
    assert same_on_all_ranks(weights(model))
    mine, exact = (
        np.concatenate([w.ravel() for w in weights(each)]) for each in (model, reference)
    )
    assert 0 < largest_difference([mine], [exact]) < 0.2


def test_an_optimizer_that_never_steps_does_not_end_the_rounds_of_another():
    first, second = mlp(hvkit.rank()), mlp(5 + hvkit.rank())
    optimizers = [sgd(), sgd()]
    hvkit.distribute([first, second], optimizers, strategy=hvkit.LocalSGD(3))
    fit(second, optimizers[1], local(regression(steps=4)))
    assert same_on_all_ranks([*weights(first), *weights(second)])


def test_statistics_are_the_same_after_updates_that_are_only_accumulated():
    optimizer = keras.optimizers.SGD(0.05, gradient_accumulation_steps=4)
    model, optimizer = hvkit.distribute(normalised(), optimizer, strategy=hvkit.LocalSGD(1))
    fit(model, optimizer, local(regression(steps=6)))
    assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("strategy", [hvkit.DiLoCo(4, overlap=2), hvkit.LocalSGD(4)], ids=str)
def test_weights_set_between_two_fits_are_where_the_next_begins(strategy):
    model, optimizer = hvkit.distribute(mlp(), keras.optimizers.SGD(0.0), strategy=strategy)
    fit(model, optimizer, local(regression(steps=6)))
    model.set_weights([np.ones_like(w) for w in model.get_weights()])
    fit(model, optimizer, local(regression(steps=6)))
    assert all(np.allclose(w, 1) for w in weights(model))


def test_statistics_that_a_callback_sets_are_kept():
    model, optimizer = hvkit.distribute(normalised(), sgd(), strategy=hvkit.LocalSGD(3))
    ones = [np.ones_like(w) for w in model.get_weights()]
    sets = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: model.set_weights(ones))
    fit(model, optimizer, local(regression(steps=4)), callbacks=[sets])
    assert all(np.allclose(w, 1) for w in weights(model))


def test_demo_trains_one_model():
    model, optimizer = hvkit.distribute(mlp(hvkit.rank()), sgd(), strategy=hvkit.DeMo())
    fit(model, optimizer, local(regression(steps=3)))
    assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("action", ["skip", "stop"])
def test_gradients_that_are_not_finite(action):
    model, optimizer = hvkit.distribute(normalised(), sgd(), on_nonfinite=action)
    good, bad = local(regression(steps=2))
    loop(model, optimizer, [good])
    before = weights(model)
    if hvkit.rank():
        bad[0][0] = np.nan
    if action == "stop":
        with pytest.raises(FloatingPointError, match=r"rank 1 .*dense/kernel"):
            loop(model, optimizer, [bad])
        return
    loop(model, optimizer, [bad])
    assert same_on_all_ranks(weights(model))
    for now, then, weight in zip(weights(model), before, model.weights, strict=True):
        assert np.isfinite(now).all()
        assert not weight.trainable or np.array_equal(now, then)
    assert int(optimizer.iterations) == 1
