"""One small classifier in four styles of JAX, each with a training step as its users write it."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training import train_state

import hvkit
from hvkit.frameworks.jax.arrays import gathered
from hvkit.mesh import position_in

FEATURES, WIDTH, CLASSES, ROWS, STEPS = 8, 36, 4, 12, 8


def batches():
    """The global batches: ``(x, y)`` of shapes (12, 8) and (12,)."""
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        x = random.normal(size=(ROWS, FEATURES)).astype(np.float32)
        yield x, random.integers(0, CLASSES, ROWS)


def own_rows(x, y, mesh=None):
    """This rank's part of a global batch."""
    place = position_in(mesh or hvkit.Mesh(hvkit.size()))
    rows = slice(place.batch, None, place.batches)
    return x[rows], y[rows]


def in_rank_order(x, y, mesh=None):
    """The global batch, in the order in which ``own_rows`` of all ranks follow each other."""
    parts = position_in(mesh or hvkit.Mesh(hvkit.size())).batches
    order = np.concatenate([np.arange(part, ROWS, parts) for part in range(parts)])
    return x[order], y[order]


def loss_of(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Style:
    """A model that trains step by step: with the ranks, or as in one process.

    Args:
        optimizer: a transformation of Optax.
        strategy: for ``hvkit.distribute``; None to train this process's model alone.
        mesh: the same; what trains alone takes the rows in the order of its ranks.
    """

    def __init__(self, optimizer, strategy=None, mesh=None):
        self.strategy = strategy
        self.mesh = mesh
        self.seed = hvkit.rank() if strategy else 0  # ranks begin with rank 0's
        self.make(optimizer)

    def train(self):
        """The losses of all steps."""
        losses = []
        for batch in batches():
            if self.strategy:
                x, y = hvkit.batch(*own_rows(*batch, self.mesh))
            else:
                x, y = in_rank_order(*batch, self.mesh)
            losses.append(float(self.step(x, y)))
        return losses

    def distribute(self, model, optimizer):
        if self.strategy is None:
            return model, optimizer
        return hvkit.distribute(model, optimizer, strategy=self.strategy, mesh=self.mesh)

    def weights(self):
        """All weights and statistics, by name, in host memory."""
        whole = gathered(self.tree())
        return {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(whole)
        }


class NNX(Style):
    """Flax NNX, with batch norm and dropout."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(FEATURES, WIDTH, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.3, rngs=rngs)
            self.last = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

        def __call__(self, x):
            return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))

    def make(self, optimizer):
        model = self.Net(nnx.Rngs(self.seed))
        self.model, self.optimizer = self.distribute(
            model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)
        )
        assert self.model is model

    @staticmethod
    @nnx.jit
    def _step(model, optimizer, x, y):
        loss, gradients = nnx.value_and_grad(lambda model: loss_of(model(x), y))(model)
        optimizer.update(model, gradients)
        return loss

    def step(self, x, y):
        return self._step(self.model, self.optimizer, x, y)

    def tree(self):
        return nnx.state(self.model, nnx.Any(nnx.Param, nnx.BatchStat))


class Linen(Style):
    """Flax Linen with a ``TrainState``, batch norm, dropout and donated buffers."""

    class State(train_state.TrainState):
        statistics: dict

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            x = nn.Dense(WIDTH, use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(x))
            return nn.Dense(CLASSES)(nn.Dropout(0.3, deterministic=not train)(x))

    def make(self, optimizer):
        net = self.Net()
        made = net.init(jax.random.key(self.seed), jnp.ones((1, FEATURES)), train=False)
        state = self.State.create(
            apply_fn=net.apply,
            params=made["params"],
            tx=optimizer,
            statistics=made["batch_stats"],
        )
        self.state, _ = self.distribute(state, optimizer)
        self.key = jax.random.key(7)

    @staticmethod
    @partial(jax.jit, donate_argnums=0)
    def _step(state, x, y, key):
        def loss(params):
            logits, learnt = state.apply_fn(
                {"params": params, "batch_stats": state.statistics},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": key},
            )
            return loss_of(logits, y), learnt["batch_stats"]

        (loss, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=gradients).replace(statistics=statistics), loss

    def step(self, x, y):
        self.key, key = jax.random.split(self.key)
        self.state, loss = self._step(self.state, x, y, key)
        return loss

    def tree(self):
        return self.state.params, self.state.statistics


class Equinox(Style):
    """A module of Equinox with filtered transformations."""

    def make(self, optimizer):
        model = eqx.nn.MLP(FEATURES, CLASSES, WIDTH, 2, key=jax.random.key(self.seed))
        self.model, self.optimizer = self.distribute(model, optimizer)
        self.state = self.optimizer.init(eqx.filter(self.model, eqx.is_array))
        update = self.optimizer.update

        @eqx.filter_jit
        def step(model, state, x, y):
            loss, gradients = eqx.filter_value_and_grad(
                lambda model: loss_of(jax.vmap(model)(x), y)
            )(model)
            changes, state = update(gradients, state, eqx.filter(model, eqx.is_array))
            return eqx.apply_updates(model, changes), state, loss

        self._step = step

    def step(self, x, y):
        self.model, self.state, loss = self._step(self.model, self.state, x, y)
        return loss

    def tree(self):
        return eqx.filter(self.model, eqx.is_array)


class Plain(Style):
    """A dict of arrays and Optax, with two halves of each batch in a ``lax.scan``."""

    def make(self, optimizer):
        first, last = jax.random.split(jax.random.key(self.seed))
        params = {
            "first": jax.random.normal(first, (FEATURES, WIDTH)) / 3,
            "last": jax.random.normal(last, (WIDTH, CLASSES)) / 3,
        }
        self.params, self.optimizer = self.distribute(params, optimizer)
        self.state = self.optimizer.init(self.params)
        update = self.optimizer.update

        @partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, x, y):
            def one(carry, batch):
                params, state = carry
                x, y = batch
                loss, gradients = jax.value_and_grad(
                    lambda params: loss_of(jax.nn.relu(x @ params["first"]) @ params["last"], y)
                )(params)
                changes, state = update(gradients, state, params)
                return (optax.apply_updates(params, changes), state), loss

            twice = jnp.stack([x, x / 2]), jnp.stack([y, y])
            (params, state), losses = jax.lax.scan(one, (params, state), twice)
            return params, state, losses.mean()

        self._step = step

    def step(self, x, y):
        self.params, self.state, loss = self._step(self.params, self.state, x, y)
        return loss

    def tree(self):
        return self.params


def parts(tree):
    """Into how many parts the devices divide the largest array of a tree."""
    largest = max(jax.tree.leaves(tree), key=lambda leaf: leaf.size)
    return largest.size // largest.addressable_data(0).size


def require_close(model, losses, expected_losses, expected, bound=2e-7):
    """A model that has trained is another one, to within rounding.

    Args:
        model: a ``Style``.
        losses: its losses, compared to 1e-6.
        expected_losses: the other one's.
        expected: the other one's ``weights()``.
        bound: of weights, relative to the largest of an array if that is above 1.
    """
    assert np.abs(np.array(losses) - expected_losses).max() <= 1e-6
    found = model.weights()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= bound * max(1, np.abs(value).max()), name


STYLES = (NNX, Linen, Equinox, Plain)
