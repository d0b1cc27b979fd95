"""Converts between this rank's slice of a parameter and the full tensor, also for autograd.

The tensor axis and the shard axis divide a parameter, its gradient and its state in an optimizer. A
full tensor and its gradient are the same on all ranks. The gradient of a slice is that slice of the
full gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._pytree import tree_map_only

from hvkit.errors import HvkitError
from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import Block, blocks_of
from hvkit.frameworks.pytorch.model_parallel.tensor.divided_tensors import (
    Placement,
    all_reduce,
    part_of,
    whole_of,
)
from hvkit.transport.traffic import count, of_allgather
from hvkit.watch.calls import call, translated, waiting

as_plain: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which PyTorch calls no ``__torch_function__`` of tensors' classes."""


@dataclass(frozen=True, eq=False)
class Slicing:
    """How a parameter, and tensors of its shape, are divided."""

    placement: Placement | None = None  # along the tensor axis
    tensor: DeviceMesh | None = None
    shards: tuple[DeviceMesh, Sequence[Any]] | None = None  # the placements of a ``DTensor``
    # Whether ``fully_shard`` has gathered its shards, between forward and backward.
    gathered: bool = False

    @classmethod
    def of(
        cls, p: torch.Tensor, placement: Placement | None = None, tensor: DeviceMesh | None = None
    ) -> Self:
        """The slicing of a parameter with this placement along the tensor axis."""
        shards = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        return cls(placement, tensor if placement else None, shards)

    def __bool__(self) -> bool:
        return self.placement is not None or self.shards is not None

    @property
    def _index(self) -> int:
        return self.tensor.get_local_rank() if self.tensor else 0

    @property
    def _ways(self) -> int:
        return self.tensor.size() if self.tensor else 1

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        first, *more = [each for each in (self.tensor, self.shards and self.shards[0]) if each]
        ranks = () if more or first.ndim > 1 else dist.get_process_group_ranks(first.get_group())
        name = f"{what} of a divided parameter"
        with as_plain(), call(name), translated(), waiting(tuple(ranks)):
            yield

    def full(self, own: torch.Tensor) -> torch.Tensor:
        """The full tensor, whose gradient is the same on all ranks; a collective."""
        with self._waiting("the full tensor"):
            return _exchange(own, self, True)

    def gather(self, own: torch.Tensor, purpose: str) -> torch.Tensor:
        """The full tensor, without autograd; a collective whose bytes count for the purpose."""
        if isinstance(own, DTensor):
            count(purpose, of_allgather(own.to_local().nbytes, own.device_mesh.size()))
            own = own.full_tensor()
        if self.tensor is None or self.placement is None:
            return own
        slices = [own.new_empty(own.shape) for _ in range(self._ways)]
        count(purpose, of_allgather(own.nbytes, self._ways))
        dist.all_gather(slices, own.contiguous(), group=self.tensor.get_group())
        return whole_of(slices, self.placement)

    def slice_of(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice, also for autograd."""
        with as_plain():
            return _exchange(full, self, False)

    def slice_like(self, full: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a full tensor, as ``like``; unchanged if it has another shape."""
        if full.shape == self.shape(like):
            full = self.tensor_slice(full)
        return divided_like(full, like) if full.shape == like.shape else full

    def state_slices(self, state: Mapping[str, Any], p: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter, with this rank's slices of full tensors in it."""
        sliced: dict[str, Any] = tree_map_only(
            torch.Tensor, lambda t: self.slice_like(t, p) if t.dim() else t, dict(state)
        )
        return sliced

    def tensor_slice(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's slice along the tensor axis alone; ``full`` may have more dimensions."""
        if self.placement is None or not full.dim():
            return full
        return part_of(full, self.placement, self._index, self._ways)

    def blocks(self, shape: Sequence[int], p: torch.Tensor) -> list[Block]:
        """The blocks of the full tensor in this rank's slice; the shard axis divides the shape."""
        return blocks_of(shape, _rows_of(p), self.placement, self._index, self._ways)

    def everywhere(self, t: torch.Tensor) -> Any:
        """A replicated ``DTensor`` of a tensor that all ranks hold."""
        assert self.shards is not None
        mesh = self.shards[0]
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def total(self, sum_of_own: torch.Tensor) -> torch.Tensor:
        """The sum of all elements, from that of this rank's slice; a collective."""
        with self._waiting("the sum"):
            assert self.tensor is not None
            return all_reduce(sum_of_own, self.tensor)

    def shape(self, own: torch.Tensor) -> torch.Size:
        """The shape of the full tensor."""
        shape = list(own.shape)
        if self.placement is not None:
            shape[self.placement.dim] *= self._ways
        return torch.Size(shape)

    def operand(self, t: torch.Tensor, own: torch.Tensor) -> torch.Tensor | None:
        """The other operand of an operation on each element of this rank's slice; None if none.

        PyTorch broadcasts ``t`` to the shape of the full tensor, or to that of the slice.
        """
        if not t.dim() or isinstance(t, DTensor):
            return t
        if t.dim() > own.dim():
            return None
        if self.placement is not None:
            dim = self.placement.dim - own.dim() + t.dim()
            length = own.shape[self.placement.dim]
            if dim >= 0 and t.shape[dim] == length * self._ways:
                along = Placement(dim, self.placement.parts)
                t = part_of(t, along, self._index, self._ways)
            elif dim >= 0 and t.shape[dim] not in (1, length):
                return None
        return t if self.shards is None else self.everywhere(t)

    def is_like(self, other: Slicing) -> bool:
        """Whether it gives this rank the same elements of tensors of one shape."""
        shards, others = (each.shards and tuple(each.shards[1]) for each in (self, other))
        return self.placement == other.placement and shards == others


class _Exchange(torch.autograd.Function):
    """Gathers the slices of all ranks, or takes this rank's; in backward the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slicing: Slicing, gathers: bool) -> torch.Tensor:
        ctx.slicing, ctx.gathers = slicing, gathers
        if gathers:
            return slicing.gather(x, "objects")
        x = slicing.tensor_slice(x)
        if slicing.shards is None:
            return x
        # Not a view, which would keep the memory of the full tensor.
        return slicing.everywhere(x).redistribute(*slicing.shards).clone()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient, ctx.slicing, not ctx.gathers), None, None


_exchange: Callable[..., torch.Tensor] = _Exchange.apply


def divided_like(full: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """A full tensor divided as ``fully_shard`` divides another, and on its device."""
    full = full.to(own.device)
    if not isinstance(own, DTensor) or isinstance(full, DTensor):
        return full
    # Every rank has the full tensor, and takes its own slice without a message.
    return distribute_tensor(full.detach(), own.device_mesh, own.placements, src_data_rank=None)


def _rows_of(own: torch.Tensor) -> tuple[int, int] | None:
    """The first row of this rank's shard of a tensor, and the row after its last; None for all."""
    if not isinstance(own, DTensor):
        return None
    local = own.to_local().shape
    size, offset = compute_local_shape_and_global_offset(own.shape, own.device_mesh, own.placements)
    if size == local and local[1:] == own.shape[1:]:
        return offset[0], offset[0] + local[0]
    raise HvkitError(
        f"a tensor of shape {tuple(own.shape)} is divided as {own.placements}, of which this rank "
        f"has {tuple(local)}: hvkit knows rows only"
    )


def local_part(t: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a ``DTensor``; other tensors as they are."""
    return t.to_local() if isinstance(t, DTensor) else t
