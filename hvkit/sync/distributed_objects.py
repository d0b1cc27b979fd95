"""The models and optimizers that were passed to ``hvkit.distribute``, and their keepers.

A second call of ``distribute`` looks here for a first one. ``hvkit.settled`` and checkpoints look
for the keepers of a model, and checkpoints for the step count of a warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, ref

from hvkit.communication.group import Group
from hvkit.errors import ranks_text
from hvkit.sync.port import Keeper, Record

T = TypeVar("T")

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
        for group in _known(_groups, thing):
            raise ValueError(
                f"{call} is for what all ranks train together, but {type(thing).__name__} is "
                f"trained by {ranks_text(group.members)} as a group"
            )


def _known(values: WeakKeyDictionary[Any, T], thing: Any) -> list[T]:
    """The value of a model or an optimizer, or those of models that share weights with it."""
    thing, known = _plain(thing), list(values.items())
    if found := [value for other, value in known if other is thing]:
        return found
    weights = set(map(id, _weights_of(thing)))
    return [value for other, value in known if not weights.isdisjoint(map(id, _weights_of(other)))]


# How ranks begin to train models together that had no weights yet in ``distribute``.
_unbuilt: WeakKeyDictionary[Any, WeakMethod[Callable[[], None]]] = WeakKeyDictionary()


def begin_with_weights(model: Any, begin: Callable[[], None]) -> None:
    """Remember a method by which ranks begin to train a model that has no weights yet."""
    _unbuilt[_plain(model)] = WeakMethod(begin)


def is_distributed(model_or_optimizer: Any) -> bool:
    return _plain(model_or_optimizer) in _models or model_or_optimizer in _records


def keepers_of(model: Any) -> list[Keeper]:
    """The keepers of a model, and of those that share weights with it; every rank must call it."""
    reference = _unbuilt.get(_plain(model))
    if reference is not None and (begin := reference()) is not None:
        begin()
    found = _known(_models, model)
    return [keeper for each in found if each is not None and (keeper := each()) is not None]


def _weights_of(model: Any) -> list[Any]:
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.layers.Layer):  # on PyTorch also a module
        return [w._value for w in model.weights if getattr(w, "_value", None) is not None]
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
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
