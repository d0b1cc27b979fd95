"""Keras models on PyTorch that optimizers of PyTorch update, in a loop of the script's own."""

import keras
import numpy as np
import pytest
import torch
from cases import cases
from keras import layers
from keras_models import local, mlp, normalised, regression, seeded, unbuilt, weights
from ranks import largest_difference, same_on_all_ranks

import hvkit


def pytorch_loop(model, optimizer, data):
    for x, y in data:
        optimizer.zero_grad()
        loss = ((model(torch.from_numpy(x), training=True) - torch.from_numpy(y)) ** 2).mean()
        loss.backward()
        optimizer.step()


def with_optimizer(make, seed, kind=torch.optim.Adam, rate=0.01):
    """A model, and an optimizer of all its ``parameters()``, as Keras's guide makes it."""
    model = make(seed)
    return model, kind(model.parameters(), rate)


def trained(make, data, seed, *, kind=torch.optim.Adam, **options):
    model, optimizer = with_optimizer(make, seed, kind)
    if options:
        model, optimizer = hvkit.distribute(model, optimizer, **options)
    seeded(0)
    pytorch_loop(model, optimizer, data)
    return model, optimizer


class Scaled(keras.Model):
    """With parameters of PyTorch, which Keras does not know."""

    def __init__(self, seed):
        super().__init__()
        seeded(seed)
        self.hidden, self.out = layers.Dense(9, "tanh"), layers.Dense(4)
        self.scale = torch.nn.Parameter(torch.rand(4))
        self.build((None, 8))

    def build(self, shape):
        self.hidden.build(shape)
        self.out.build((None, 9))
        self.built = True

    def call(self, x):
        return self.out(self.hidden(x)) * self.scale


EQUAL = {
    "synchronous": hvkit.Synchronous(),
    "sharded": hvkit.ShardedOptimizer(),
    "centralized": hvkit.Centralized(),
}


def dropping(seed):
    """With a seed of its own for dropout, and without what dropout would make unequal."""
    seeded(seed)
    return keras.Sequential([keras.Input((8,)), layers.Dense(9, "tanh"), layers.Dropout(1e-9),
                             layers.Dense(4)])  # fmt: skip


@pytest.mark.parametrize("strategy", cases(EQUAL, ["synchronous", "sharded"]))
@pytest.mark.parametrize("make", cases([mlp, dropping, normalised]))
def test_twenty_steps_give_the_weights_of_one_process(make, strategy):
    data = regression()
    alone, _ = trained(make, data, 0)
    norm = {"batch_norm": "sync"} if make is normalised else {}
    chosen = EQUAL[strategy]
    model, _ = trained(make, local(data), hvkit.rank(), strategy=chosen, check_every=5, **norm)
    assert same_on_all_ranks(weights(model))
    assert largest_difference(weights(model), weights(alone)) < (1e-5 if norm else 1e-6)


def test_parameters_of_pytorch_in_a_model_are_averaged():
    data = regression()
    alone, _ = trained(Scaled, data, 0)
    model, _ = trained(Scaled, local(data), hvkit.rank(), strategy=hvkit.Synchronous())
    assert same_on_all_ranks([model.scale.detach().numpy()])
    np.testing.assert_allclose(model.scale.detach(), alone.scale.detach(), atol=1e-6)
    assert largest_difference(weights(model), weights(alone)) < 1e-6


def test_statistics_of_a_layer_that_comes_later_stay_each_rank_s_own():
    model, optimizer = hvkit.distribute(*with_optimizer(mlp, hvkit.rank()), check_every=1)
    norm = layers.BatchNormalization()
    norm.build((None, 8))
    optimizer.add_param_group({"params": norm.parameters()})
    pytorch_loop(lambda x, training: model(norm(x, training=training)), optimizer,
                 local(regression(steps=3)))  # fmt: skip
    assert same_on_all_ranks(weights(model))
    assert same_on_all_ranks([norm.gamma.numpy()])
    assert not same_on_all_ranks([norm.moving_mean.numpy()])


ALONE = [hvkit.LocalSGD(3), hvkit.DiLoCo(every=3), hvkit.Gossip(every=3), hvkit.ParameterServer(2)]


@pytest.mark.parametrize("strategy", cases(ALONE, [ALONE[0], ALONE[3]]))
def test_ranks_that_train_alone_settle_on_one_model(strategy):
    model, optimizer = trained(normalised, local(regression()), hvkit.rank(), strategy=strategy)
    with hvkit.settled(model, optimizer):
        assert same_on_all_ranks(weights(model))


@pytest.mark.parametrize("strategy", [hvkit.Synchronous(), hvkit.ShardedOptimizer()], ids=str)
def test_a_checkpoint_resumes_the_undisturbed_training(tmp_path, strategy):
    folder, data = hvkit.broadcast(tmp_path), local(regression())

    def begun(seed):
        model, optimizer = with_optimizer(normalised, seed)
        model, optimizer = hvkit.distribute(model, optimizer, strategy=strategy)
        return model, optimizer, hvkit.Checkpoint(folder, model=model, optimizer=optimizer)

    model, optimizer, checkpoint = begun(hvkit.rank())
    pytorch_loop(model, optimizer, data[:8])
    checkpoint.save(epoch=0, step=8)
    pytorch_loop(model, optimizer, data[8:])
    resumed, optimizer, checkpoint = begun(7)
    assert checkpoint.restore().step == 8
    pytorch_loop(resumed, optimizer, data[8:])
    for mine, theirs in zip(weights(resumed), weights(model), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_evaluate_has_the_metrics_of_all_ranks():
    model, _ = trained(mlp, local(regression()), hvkit.rank(), strategy=hvkit.Synchronous())
    model.compile(loss="mse")
    x, y = regression(steps=1)[0]
    expected = ((np.asarray(model.predict(x, verbose=0)) - y) ** 2).mean()
    mine = local([(x, y)])[0]
    assert model.evaluate(*mine, verbose=0) == pytest.approx(expected, rel=1e-5)


def test_fit_of_such_a_model_is_refused():
    model, _ = hvkit.distribute(*with_optimizer(mlp, 0))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"updates model .*, but was not passed"):
        model.fit(*local(regression(steps=1))[0], verbose=0)


def test_unbuilt_models_fully_shard_and_joint_optimizers_are_refused():
    with pytest.raises(ValueError, match=r"has no weights yet.*build it, then make the optimizer"):
        hvkit.distribute(unbuilt(), torch.optim.SGD(mlp().parameters(), 0.1))
    model, optimizer = with_optimizer(mlp, 0)
    with pytest.raises(ValueError, match="needs PyTorch, whose fully_shard"):
        hvkit.distribute(model, optimizer, strategy=hvkit.FullyShard())
    norm = normalised()
    joint = torch.optim.Adam([*model.parameters(), *norm.parameters()])
    with pytest.raises(ValueError, match=rf"also updates Sequential '{norm.name}'.*its batch norm"):
        hvkit.distribute(model, joint)
    both = [optimizer, keras.optimizers.SGD()]
    with pytest.raises(TypeError, match="not beside optimizers of Keras in one call"):
        hvkit.distribute(model, both)
