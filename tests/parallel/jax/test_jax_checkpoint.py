"""Checkpoints of JAX: a resumed run goes on as if it had not stopped, divided or not."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import cases
from flax import nnx
from jax_styles import batches, own_rows

import hvkit
from hvkit.frameworks.jax.arrays import gathered


class Training:
    """Two small models: one of NNX with dropout, and one in a pytree that steps replace."""

    def __init__(self, strategy, seed=0):
        rngs = nnx.Rngs(seed)
        layers = nnx.Linear(8, 6, rngs=rngs, param_dtype=jnp.bfloat16), nnx.Dropout(0.5, rngs=rngs)
        model = nnx.Sequential(*layers)
        optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
        self.model, self.optimizer = hvkit.distribute(model, optimizer, strategy=strategy)
        params = {"w": jnp.full((8, 6), 1.0 + seed)}
        params, tx = hvkit.distribute(params, optax.adam(0.1), strategy=strategy)
        self.run = types.SimpleNamespace(params=params, state=tx.init(params), steps=0)
        self.checkpoint_of = {"model": self.model, "optimizer": self.optimizer, "run": self.run}

        @nnx.jit
        def step_of_model(model, optimizer, x):
            gradients = nnx.grad(lambda model: (model(x) ** 2).mean())(model)
            optimizer.update(model, gradients)

        @jax.jit
        def step_of_params(params, state, x):
            gradients = jax.grad(lambda params: (x @ params["w"]).var())(params)
            changes, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, changes), state

        self.steps = step_of_model, step_of_params

    def train(self, until):
        for batch in list(batches())[self.run.steps : until]:
            x = hvkit.batch(own_rows(*batch)[0])
            self.steps[0](self.model, self.optimizer, x)
            self.run.params, self.run.state = self.steps[1](self.run.params, self.run.state, x)
            self.run.steps += 1

    def bits(self):
        trees = gathered(
            [nnx.state(self.model, nnx.Param), nnx.state(self.optimizer), vars(self.run)]
        )
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(trees)]


@pytest.fixture
def folder(tmp_path):
    return hvkit.broadcast(tmp_path)


@pytest.mark.parametrize("strategy", cases([hvkit.Synchronous(), hvkit.FullyShard()]))
def test_a_resumed_run_ends_with_the_same_bits(strategy, folder):
    undisturbed = Training(strategy)
    undisturbed.train(4)
    hvkit.Checkpoint(folder, **undisturbed.checkpoint_of).save(epoch=0, step=4)
    undisturbed.train(8)
    resumed = Training(strategy, seed=5)
    assert hvkit.Checkpoint(folder, **resumed.checkpoint_of).restore().step == 4
    assert resumed.run.steps == 4
    resumed.train(8)
    assert resumed.bits() == undisturbed.bits()

    # Saved by one strategy, resumed by another.
    other = Training(hvkit.ShardedOptimizer(), seed=6)
    hvkit.Checkpoint(folder, **other.checkpoint_of).restore()
    other.train(8)
    for mine, theirs in zip(
        jax.tree.leaves(gathered(other.run.params)),
        jax.tree.leaves(gathered(undisturbed.run.params)),
        strict=True,
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5)


def test_the_files_are_plain(folder):
    training = Training(hvkit.FullyShard())
    path = hvkit.Checkpoint(folder, **training.checkpoint_of).save(epoch=0, step=0)
    with np.load(path / "run.npz") as file:
        assert {"params/w", "steps"} <= set(file)
        np.testing.assert_array_equal(file["params/w"], np.ones((8, 6)))
    with np.load(path / "model.npz") as file:
        kernel = file["layers/0/kernel"].view(jnp.bfloat16)
    own = gathered(nnx.state(training.model))["layers"][0]["kernel"]
    np.testing.assert_array_equal(kernel, np.asarray(own[...]))


def test_another_model_s_checkpoint_is_refused_by_name(folder):
    run = types.SimpleNamespace(params={"w": jnp.ones(2)})
    hvkit.Checkpoint(folder, run=run).save(epoch=0, step=0)
    for params, message in (
        ({"v": jnp.ones(2)}, "only the (checkpoint|script) has params/[vw]"),
        ({"w": jnp.ones(3)}, r"params/w has the shape \(2,\) there and \(3,\) here"),
    ):
        run = types.SimpleNamespace(params=params)
        with pytest.raises(ValueError, match=message):
            hvkit.Checkpoint(folder, run=run).restore()


def test_numbers_of_numpy_come_back_and_text_is_refused(folder):
    # Of these names, NumPy's savez has arguments.
    named = {"file": jnp.ones(2), "allow_pickle": jnp.zeros(1)}
    run = types.SimpleNamespace(step=np.int64(7), best=np.float32(0.5), **named)
    hvkit.Checkpoint(folder, run=run).save(epoch=0, step=7)
    run.step, run.best, run.file = np.int64(0), np.float32(0), jnp.zeros(2)
    hvkit.Checkpoint(folder, run=run).restore()
    assert (run.step, run.best, run.file.tolist()) == (7, 0.5, [1, 1])
    assert isinstance(run.step, np.int64)
    run.name = "first"
    with pytest.raises(TypeError, match=r"name is 'first': pass text to"):
        hvkit.Checkpoint(folder, run=run).save(epoch=0, step=8)
