"""The models and optimizers that were passed to ``hvkit.distribute``, and their keepers.

A second call of ``distribute`` looks here for a first one. ``hvkit.settled`` and checkpoints look
for the keepers of a model, and checkpoints for the step count of a warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

from hvkit.communication.group import Group
from hvkit.errors import ranks_text
from hvkit.registry import framework_of
from hvkit.sync.port import Keeper, Record

# Weak on both sides: a keeper leads to weights, and hooks on these may lead to the model.
_models: WeakKeyDictionary[Any, ref[Keeper] | None] = WeakKeyDictionary()
_records: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()
# Of models and optimizers that not all ranks train with.
_groups: WeakKeyDictionary[Any, Group] = WeakKeyDictionary()


def record(
    models: Iterable[Any],
    records: Iterable[tuple[Any, Record]],
    keeper: Keeper | None = None,
    group: Group | None = None,
) -> None:
    """Remember models and optimizers as distributed; the models must keep their keeper."""
    of_keeper = None if keeper is None else ref(keeper)
    plain = [_plain(model) for model in models]
    known = [(_plain(thing), each) for thing, each in records]
    _models.update((model, of_keeper) for model in plain)
    if group is not None and not group.is_all_ranks:
        _groups.update((each, group) for each in (*plain, *(thing for thing, _ in known)))
    local = keeper is not None and keeper.local
    _records.update((thing, replace(each, local=local)) for thing, each in known)


def refuse_groups(call: str, things: Iterable[Any]) -> None:
    """Raise if only some ranks train one of these, or a part; ``call`` would count them as all."""
    for thing in things if _groups else ():
        if (group := _group_of(thing)) is not None:
            raise ValueError(
                f"{call} is for what all ranks train together, but {type(thing).__name__} is "
                f"trained by {ranks_text(group.members)} as a group"
            )


def _group_of(thing: Any) -> Group | None:
    """The ranks that train a model, a part of it, or with an optimizer, if these are not all."""
    weights = set(map(id, _weights_of(_plain(thing)))) if framework_of(thing) else set()
    for other, group in list(_groups.items()):
        if other is _plain(thing):
            return group
        if framework_of(other) and not weights.isdisjoint(map(id, _weights_of(other))):
            return group
    return None


# How ranks begin to train models together that had no weights yet in ``distribute``.
_unbuilt: WeakKeyDictionary[Any, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def begin_with_weights(model: Any, begin: Callable[[], None]) -> None:
    """Remember a method by which ranks begin to train a model that has no weights yet."""
    _unbuilt[_plain(model)] = WeakMethod(begin)


def is_distributed(model_or_optimizer: Any) -> bool:
    """Whether this object was passed to ``hvkit.distribute``."""
    return _plain(model_or_optimizer) in _models or model_or_optimizer in _records


def keepers_of(model: Any) -> list[Keeper]:
    """The keepers of a model, and of those that share weights with it; every rank must call it."""
    plain = _plain(model)
    if (reference := _unbuilt.get(plain)) is not None and (begin := reference()) is not None:
        begin()
    if plain in _models:
        found = [_models[plain]]
    else:
        weights = set(map(id, _weights_of(plain)))
        found = [
            keeper
            for other, keeper in list(_models.items())
            if not weights.isdisjoint(map(id, _weights_of(other)))
        ]
    return [keeper for each in found if each is not None and (keeper := each()) is not None]


def _weights_of(model: Any) -> list[Any]:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):  # on PyTorch also a module
        return [w._value for w in model.weights if getattr(w, "_value", None) is not None]
    if hasattr(model, "parameters"):
        return list(model.parameters())
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(model, nnx.Module):
        return []  # an optimizer or a pytree of JAX
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, nnx.Variable)]


def _plain(model: Any) -> Any:
    """The model inside one that ``torch.compile`` has wrapped."""
    return getattr(model, "_orig_mod", model)


def record_of(thing: Any) -> Record | None:
    """The record of an optimizer, and of a model that has one; None for anything else."""
    try:
        return _records.get(_plain(thing))
    except TypeError:  # a list, for example, has no weak references
        return None
