"""Nested lists, dicts and the like with tensors in them: arguments and results of modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch.utils._pytree import (
    SUPPORTED_NODES,
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_map_only,
)


class Slot:
    """Stands where a tensor was."""


def storage_of(t: torch.Tensor) -> int:
    """The number of its memory, as long as something holds it."""
    return int(t.untyped_storage()._cdata) if t.layout is torch.strided else id(t)


def version_of(t: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, which does not count."""
    return 0 if t.is_inference() else t._version


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors of nested lists, dicts and the like, in order."""
    found: list[torch.Tensor] = []
    _add_tensors(tree, found)
    return found


def _add_tensors(tree: Any, found: list[torch.Tensor]) -> None:
    """As PyTorch's ``tree_leaves``, which takes four times as long for the usual kinds."""
    if isinstance(tree, torch.Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for each in tree:
            _add_tensors(each, found)
    elif type(tree) is dict:
        for each in tree.values():
            _add_tensors(each, found)
    elif type(tree) in SUPPORTED_NODES or is_namedtuple_instance(tree):
        found += (t for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def call_key(args: Any, kwargs: Any) -> Hashable:
    """The arguments of a call without the values of tensors."""
    numbers = int | float | str | bool | None
    return _described(args, kwargs, lambda t: (tuple(t.shape), t.dtype), numbers)


def call_structure(args: Any, kwargs: Any) -> Hashable:
    """The arguments of a call without the values and sizes of tensors, and without numbers."""
    return _described(args, kwargs, lambda t: (t.dim(), t.is_floating_point()), bool | str | None)


def _described(
    args: Any, kwargs: Any, tensor: Callable[[torch.Tensor], Hashable], plain: Any
) -> Hashable:
    leaves, spec = tree_flatten((args, kwargs))

    def described(leaf: Any) -> Hashable:
        if isinstance(leaf, torch.Tensor):
            return tensor(leaf)
        return leaf if isinstance(leaf, plain) else repr(type(leaf))

    return str(spec), tuple(map(described, leaves))


def copied_call(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a call with copies of tensors, which a forward may change in place."""
    some, named = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    return some, named


def samples_in(args: Any, kwargs: Any) -> int:
    """The length of the first dimension of the first tensor that has dimensions."""
    for t in tensors_in((args, kwargs)):
        if t.dim():
            return t.shape[0]
    raise ValueError(
        "a model in a pipeline must be called with tensors whose first dimension is the batch; it "
        "was called with none"
    )


def with_tensors(structure: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """A structure with tensors in its slots, in order."""
    following = iter(tensors)
    return tree_map_only(Slot, lambda slot: next(following), structure)


def structure_of(tree: Any) -> Any:
    """A tree with a ``Slot`` in place of each tensor."""
    return tree_map_only(torch.Tensor, lambda t: Slot(), tree)
