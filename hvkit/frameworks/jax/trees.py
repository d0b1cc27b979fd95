"""Models and optimizers of JAX as trees of arrays.

A model is a ``flax.nnx.Module``, whose arrays are set in place, or a pytree, of which a new one is
made: Flax's ``TrainState``, a module of Equinox, or a dict of parameters.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Any

import jax

_COUNTED = re.compile(r"_\d+(?=[_/]|$)")


def is_nnx(thing: object) -> bool:
    """Whether arrays are set inside this object: a module or optimizer of Flax NNX."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(thing, nnx.Module | nnx.Optimizer)


def is_keras(thing: object) -> bool:
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(thing, keras.Model | keras.optimizers.Optimizer)


def is_mutable(thing: object) -> bool:
    """Whether arrays are set inside this object, so that it stays the same one."""
    return is_nnx(thing) or is_keras(thing)


def tree_of(thing: Any) -> Any:
    """The arrays of a model or an optimizer, as a pytree."""
    if is_nnx(thing):
        return sys.modules["flax.nnx"].state(thing)
    if is_keras(thing):
        return {name: v._value for name, v in _variables(thing).items()}
    return thing


def weights_of(model: Any) -> Any:
    """As ``tree_of``, also inside Keras's ``fit``, which then holds the values of the model."""
    in_fit = getattr(model, "_jax_state", None) if is_keras(model) else None
    if not in_fit or model._jax_state_synced:
        return tree_of(model)
    states = getattr(getattr(model, "optimizer", None), "variables", ())
    variables = [*model.variables, *states]
    by_role = {
        "trainable_variables": model.trainable_variables,
        "non_trainable_variables": model.non_trainable_variables,
        "optimizer_variables": states,
    }
    values = {
        id(variable): value
        for role, group in by_role.items()
        for variable, value in zip(group, in_fit.get(role) or (), strict=False)
    }
    tree = {_name_of(i, v): values[id(v)] for i, v in enumerate(variables) if id(v) in values}
    alive = not any(leaf.is_deleted() for leaf in jax.tree.leaves(tree))
    return tree if alive else {}  # the step that runs has taken them over


def with_tree(thing: Any, tree: Any) -> Any:
    """The model or optimizer with other arrays: the same object, or the new tree itself."""
    if is_nnx(thing):
        sys.modules["flax.nnx"].update(thing, tree)
    elif is_keras(thing):
        for name, variable in _variables(thing).items():
            set_variable(variable, tree[name])
    return thing if is_mutable(thing) else tree


def _variables(thing: Any) -> dict[str, Any]:
    """The variables of a model or an optimizer of Keras that have values, by name.

    Without the numbers in names, in which Keras counts all layers that a rank has made: ranks
    compare these names.
    """
    return {
        _name_of(i, v): v
        for i, v in enumerate(thing.variables)
        if getattr(v, "_value", None) is not None
    }


def _name_of(number: int, variable: Any) -> str:
    return f"{number} {_COUNTED.sub('', variable.path)}"


def set_variable(variable: Any, array: jax.Array) -> None:
    """Set a variable of Keras; values assigned later, as from a file, get the same sharding."""
    variable._layout, variable._value = array.sharding, array


def named_leaves(tree: Any, *, in_variables: bool) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree with their names, ``params/dense/kernel``; NNX's are in variables."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        yield name.removesuffix("/value") if in_variables else name, leaf


def is_global(thing: Any) -> bool:
    """Whether arrays of a model or batch are on the devices of several ranks."""
    return any(
        isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        for leaf in jax.tree.leaves(tree_of(thing))
    )
