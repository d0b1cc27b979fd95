"""What a recipe consists of: calls of PyTorch's operators on views of numbered storages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

IN_BLOCK = "inside `with hvkit.deferred_init():`"


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies: in the storage of this number."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> View:
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(storage, size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This view of a storage that has memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        made: torch.Tensor = torch._neg_view(tensor) if self.negative else tensor
        return made

    def storage_with(self, made: torch.Tensor) -> torch.UntypedStorage:
        """The storage of what an operator returned, laid out as it was on the meta device."""
        if (made.stride(), made.storage_offset()) == (self.stride, self.offset):
            return made.untyped_storage()
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        storage = _memory((self.offset + last + 1) * made.element_size())
        self.on(storage).copy_(made)
        return storage


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor with values that the script passed to a call, such as one of a loaded file."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise ValueError(
                f"a tensor of shape {tuple(self.tensor.shape)} was copied into the model "
                f"{IN_BLOCK} and changed later, before the model was made: pass a clone() "
                "of it to the model"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator; tensors in its arguments are ``View`` or ``Given``.

    Attributes:
        outputs: where the tensors lie that it returns.
        reads: storages whose content it needs.
        writes: storages whose content it changes or makes.
        overwrites: those of ``writes`` whose former content it does not need, with their bytes.
        random: whether it draws random numbers.
        dtype: the default dtype when it was called.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[View]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: dict[int, int]
    random: bool
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def repeat(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Call the operator on storages with memory, and add those that it makes."""
        for number, size in self.overwrites.items():
            if number not in storages:
                storages[number] = _memory(size)
        args, kwargs = tree_map_only(Given, Given.get, (self.args, self.kwargs))
        args, kwargs = tree_map_only(View, lambda v: v.on(storages[v.storage]), (args, kwargs))
        returned = tree_leaves(self.function(*args, **kwargs))
        made = [each for each in returned if isinstance(each, torch.Tensor)]
        for view, tensor in zip(self.outputs, made, strict=True):
            if view.storage not in storages:
                storages[view.storage] = view.storage_with(tensor)


@dataclass(frozen=True, slots=True)
class Seeding:
    """The script set the state of the random numbers.

    Attributes:
        draws: back to the state after so many calls that draw, as ``torch.random.fork_rng`` does.
        row: otherwise to this row of the recipe's ``random_state``.
    """

    draws: int | None
    row: int


Event = Call | Seeding


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
