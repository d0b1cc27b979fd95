"""The steps of ``hvkit.distribute`` for JAX.

A model's arrays become arrays of all ranks, and each rank's batch a part of one global batch
(``hvkit.batch``). The script's own compiled step then computes the same as one process with the
global batch, including losses, batch norm and dropout. XLA averages gradients inside the step, so
this port refuses options that change gradients, and names alternatives.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax

from hvkit.frameworks.jax import batches
from hvkit.frameworks.jax.arrays import (
    BATCH_AXES,
    ShardingOf,
    fraction_held,
    from_rank_0,
    gathered,
    is_array,
    is_key,
    refuse_other_mesh,
    set_mesh,
    sharded,
)
from hvkit.frameworks.jax.trees import (
    is_global,
    is_mutable,
    is_nnx,
    named_leaves,
    tree_of,
    with_tree,
)
from hvkit.learning_rate import Multiplier
from hvkit.log import logger
from hvkit.mesh import Mesh
from hvkit.strategies import FullyShard, ShardedOptimizer
from hvkit.strategies.strategy import Rounds
from hvkit.sync.port import Options, Record, Sync


class JaxPort:
    """Implements ``hvkit.sync.port.Port``.

    The model may be a list with NNX. The optimizer is an ``nnx.Optimizer`` or a list of them, a
    transformation of Optax, or the state of one. Both are new pytrees after ``synchronise``, unless
    they are of NNX.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        (self.model,), (self.optimizer,) = models, optimizers
        self._options = options
        self._refuse_model_and_optimizer()
        if self._is_local and not (is_nnx(self.model) and is_nnx(self.optimizer)):
            raise TypeError(
                f"{options.strategy} sets weights between two steps, so in JAX it takes one "
                f"nnx.Module and its nnx.Optimizer, got {type(self.model).__name__} and "
                f"{type(self.optimizer).__name__}: steps replace the arrays of a pytree"
            )
        batches.refuse_other_batches(self._is_local)
        self._mesh = mesh = options.mesh.mesh if options.mesh else Mesh(options.group.size)
        refuse_other_mesh(mesh)
        tensor = [("tensor",)] if mesh.tensor > 1 else []
        shard = [("shard",)] if mesh.shard > 1 else []
        of_weights = [BATCH_AXES] if isinstance(options.strategy, FullyShard) else shard
        of_state = [BATCH_AXES] if isinstance(options.strategy, ShardedOptimizer) else of_weights
        self._of_weights: ShardingOf = sharded(*tensor, *of_weights)
        self._of_state: ShardingOf = sharded(*tensor, *of_state)
        self._is_divided = bool(tensor or of_state)
        self._has_divided_weights = bool(tensor or of_weights)
        self._refuse_state_alone()

    @property
    def _is_local(self) -> bool:
        return isinstance(self._options.strategy, Rounds)

    def _refuse_model_and_optimizer(self) -> None:
        for role, thing in (("model", self.model), ("optimizer", self.optimizer)):
            for each in _each(thing):
                if is_global(each):
                    raise ValueError(
                        f"this {role} ({type(each).__name__}) was passed to hvkit.distribute "
                        "before: pass a model and its optimizer once, before the first step"
                    )
        if any(map(is_nnx, _each(self.model))) != any(map(is_nnx, _each(self.optimizer))):
            raise TypeError(
                "an nnx.Module goes with its nnx.Optimizer, and a pytree of parameters with a "
                "transformation of Optax or its state; got a model "
                f"{type(self.model).__name__} and an optimizer {type(self.optimizer).__name__}"
            )

    def _refuse_state_alone(self) -> None:
        """Raise if a strategy has to change the optimizer's update, and only has a state."""
        if self._is_divided and not any(_transformations(self.model, self.optimizer)):
            by = self._mesh if self._options.mesh else self._options.strategy
            raise TypeError(
                f"{by} must change the optimizer's update, which a state does "
                "not hold: pass the transformation, `params, tx = hvkit.distribute(params, tx, "
                "...)`, and call tx.init(params) afterwards"
            )

    def facts(self) -> Sequence[str]:
        return [str(self._mesh), *self._facts()]

    def _facts(self) -> Iterator[str]:
        yield from (
            f"{role} {name} {leaf.dtype}{list(leaf.shape)}"
            if is_array(leaf)
            else f"{role} {name} {leaf!r}"
            for role, things in (("model", self.model), ("optimizer", self.optimizer))
            for thing in _each(things)
            for name, leaf in named_leaves(tree_of(thing), in_variables=is_nnx(thing))
            if is_array(leaf) or isinstance(leaf, bool | int | float | complex | str)
        )

    def more_than_sgd(self) -> list[str]:
        return []  # no strategy with a momentum comes here

    def synchronise(self) -> None:
        set_mesh(self._mesh)
        if self._is_local:
            # Not the states of random generators: each rank draws its own numbers.
            nnx = sys.modules["flax.nnx"]
            state = nnx.state(self.model, nnx.Not(nnx.RngState))
            nnx.update(self.model, from_rank_0(state, None))
            with_tree(self.optimizer, from_rank_0(tree_of(self.optimizer), None))
            return
        self.model = self._from_rank_0(self.model, self._of_weights)
        self.optimizer = self._from_rank_0(self.optimizer, self._of_state)
        if self._options.mesh and self._options.group.rank == 0:
            fraction = fraction_held([tree_of(each) for each in _each(self.model)])
            logger.info("each rank holds %.0f%% of the weights", 100 * fraction)

    def _from_rank_0(self, things: Any, sharding: ShardingOf) -> Any:
        if not isinstance(things, list) or not any(map(is_mutable, things)):
            return with_tree(things, from_rank_0(tree_of(things), sharding))
        return [with_tree(each, from_rank_0(tree_of(each), sharding)) for each in things]

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        if not multiplier.changes_nothing:
            raise ValueError(
                "lr_scaling is not for models of JAX, whose rates are inside of Optax: multiply "
                "the rate there, optax.sgd(rate * hvkit.size())"
            )
        return []

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Sync | None]:
        batches.begin(self._is_local)
        if self._is_local:
            from hvkit.frameworks.jax.local_weights import train_locally

            assert isinstance(self._options.strategy, Rounds)
            sync = train_locally(self._options.strategy, self.model, self.optimizer)
            return [(self.optimizer, Record())], sync
        if self._is_divided:
            self._divide_updates()
        batches.expect(self._options.check_every, [m for m in _each(self.model) if is_mutable(m)])
        return [
            (thing, Record(gathered=partial(_gathered_for_a_while, thing)))
            for things in (self.model, self.optimizer)
            for thing in _each(things)
            if is_mutable(thing)
        ], None

    def _divide_updates(self) -> None:
        of = partial(_sharded_updates, of_weights=self._of_weights, of_state=self._of_state)
        for each in _each(self.optimizer):
            if is_nnx(each):
                each.tx = of(each.tx)
        if not any(map(is_mutable, _each(self.optimizer))):
            self.optimizer = jax.tree.map(
                lambda leaf: of(leaf) if _is_transformation(leaf) else leaf,
                self.optimizer,
                is_leaf=_is_transformation,
            )
        if hasattr(self.model, "tx") and hasattr(self.model, "replace"):
            self.model = self.model.replace(tx=of(self.model.tx))


def _each(thing: Any) -> list[Any]:
    """Modules or optimizers of NNX or Keras in a list; anything else by itself."""
    if isinstance(thing, list | tuple) and any(map(is_mutable, thing)):
        return list(thing)
    return [thing]


def _transformations(model: Any, optimizer: Any) -> Iterator[Any]:
    for each in _each(optimizer):
        if is_nnx(each):
            yield each.tx
        else:
            leaves = jax.tree.leaves(each, is_leaf=_is_transformation)
            yield from filter(_is_transformation, leaves)
    if _is_transformation(getattr(model, "tx", None)):  # Flax's TrainState
        yield model.tx


@contextmanager
def _gathered_for_a_while(thing: Any) -> Iterator[None]:
    """Let every rank hold the whole arrays; a collective if some are divided."""
    before = jax.tree.map(lambda leaf: leaf, tree_of(thing))  # apart from the module's variables
    with_tree(thing, gathered(before))
    try:
        yield
    finally:
        with_tree(thing, before)


def _is_transformation(thing: object) -> bool:
    """Whether this is a transformation of Optax: it has ``init`` and ``update``, and no arrays."""
    return callable(getattr(thing, "init", None)) and callable(getattr(thing, "update", None))


def _sharded_updates(transformation: Any, of_weights: ShardingOf, of_state: ShardingOf) -> Any:
    """The same transformation, whose results have these shardings, so that divided arrays stay so.

    XLA chooses the shardings of a compiled function's results, and might gather arrays that an
    update has read in parts. ``ShardedOptimizer`` divides the optimizer's state (Rajbhandari et
    al., "ZeRO: Memory optimizations toward training trillion parameter models", 2020, stage 1),
    ``FullyShard`` and meshes the weights as well (stage 3). XLA then makes the mean of gradients a
    reduce-scatter, and it gathers weights where a layer needs them.
    """
    import optax

    # Others are classes with more methods, such as optax.MultiSteps.
    is_plain = isinstance(transformation, optax.GradientTransformation)
    inner = optax.with_extra_args_support(transformation) if is_plain else transformation

    def init(params: Any) -> Any:
        return _constrained(inner.init(params), of_state)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        changes, state = inner.update(gradients, state, params, **extra)
        return _constrained(changes, of_weights), _constrained(state, of_state)

    if is_plain:
        return optax.GradientTransformationExtraArgs(init, update)
    result = copy.copy(transformation)
    vars(result).update(init=init, update=update)
    return result


def _constrained(tree: Any, sharding: ShardingOf) -> Any:
    """Inside a compiled function: a tree whose arrays have these shardings."""

    def with_sharding(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or is_key(leaf):
            return leaf
        return jax.lax.with_sharding_constraint(leaf, sharding(leaf.shape))

    return jax.tree.map(with_sharding, tree)
