"""How a rank's part of a parameter becomes the whole, and the whole this rank's part.

Also for autograd: a whole is the same on all ranks, and so is its gradient, of which each part gets
its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from hvkit.frameworks.pytorch.model_parallel.tensor.exchanges import summed
from hvkit.frameworks.pytorch.model_parallel.tensor.placements import (
    Placement,
    part_of,
    whole_of,
)
from hvkit.transport.traffic import count, of_allgather
from hvkit.watch.calls import call, translated, waiting

parts_alone: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which tensors of classes that PyTorch would ask are plain."""


@dataclass(frozen=True, eq=False)
class PartOfWhole:
    """How a parameter, and what has its shape, is divided.

    Attributes:
        placement: along the tensor axis; None if it is not.
        tensor: the mesh of that axis.
        shards: of a ``DTensor``, its mesh and its placements; None if it is none.
        gathered: whether ``fully_shard`` has joined its shards, between forward and backward.
    """

    placement: Placement | None
    tensor: DeviceMesh | None
    shards: tuple[DeviceMesh, Sequence[Any]] | None
    gathered: bool = False

    @classmethod
    def of(
        cls, p: torch.Tensor, placement: Placement | None = None, tensor: DeviceMesh | None = None
    ) -> Self:
        """That of a parameter, divided like this along the tensor axis."""
        shards = (p.device_mesh, p.placements) if isinstance(p, DTensor) else None
        return cls(placement, tensor if placement else None, shards)

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, whose gradient is the same on all ranks; a collective."""
        name = "the whole of a divided parameter"
        with parts_alone(), call(name), translated(), waiting(self._ranks()):
            return _exchange(part, self, True)

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part."""
        with parts_alone():
            return _exchange(whole, self, False)

    def everywhere(self, t: torch.Tensor) -> Any:
        """A tensor that all ranks hold, for use with a ``DTensor``."""
        assert self.shards is not None
        mesh = self.shards[0]
        return DTensor.from_local(t, mesh, [Replicate()] * mesh.ndim, run_check=False)

    def total(self, sum_of_part: torch.Tensor) -> torch.Tensor:
        """The sum of all elements, from that of this rank's; a collective of the tensor axis."""
        name = "the sum of a divided parameter"
        with parts_alone(), call(name), translated(), waiting(self._ranks()):
            assert self.tensor is not None
            return summed(sum_of_part, self.tensor)

    def shape(self, part: torch.Tensor) -> torch.Size:
        """Of the whole."""
        shape = list(part.shape)
        if self.placement is not None:
            assert self.tensor is not None
            shape[self.placement.dim] *= self.tensor.size()
        return torch.Size(shape)

    def operand(self, t: torch.Tensor, part: torch.Tensor) -> torch.Tensor | None:
        """A tensor that meets this rank's part element by element; None if it does not.

        Args:
            t: of the shape of the whole, or one that PyTorch broadcasts to it; or of the part's.
            part: what this rank has.
        """
        if not t.dim() or isinstance(t, DTensor):
            return t
        if t.dim() > part.dim():
            return None
        if self.placement is not None:
            assert self.tensor is not None
            dim = self.placement.dim - part.dim() + t.dim()
            own = part.shape[self.placement.dim]
            if dim >= 0 and t.shape[dim] == own * self.tensor.size():
                along = Placement(dim, self.placement.parts)
                t = part_of(t, along, self.tensor.get_local_rank(), self.tensor.size())
            elif dim >= 0 and t.shape[dim] not in (1, own):
                return None
        return t if self.shards is None else self.everywhere(t)

    def is_like(self, other: PartOfWhole) -> bool:
        """Whether tensors of one shape have the same elements on this rank."""
        mine, its = (each.shards and tuple(each.shards[1]) for each in (self, other))
        return self.placement == other.placement and mine == its

    def _ranks(self) -> tuple[int, ...]:
        meshes = [each for each in (self.tensor, self.shards and self.shards[0]) if each]
        if len(meshes) != 1 or meshes[0].ndim != 1:
            return ()
        return tuple(dist.get_process_group_ranks(meshes[0].get_group()))


class _Exchange(torch.autograd.Function):
    """Joins the parts of all ranks, or takes this rank's; in backward the other way round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, division: PartOfWhole, joins: bool) -> torch.Tensor:
        ctx.division, ctx.joins = division, joins
        return _joined(x, division) if joins else _taken(x, division)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _exchange(gradient, ctx.division, not ctx.joins), None, None


def _joined(part: torch.Tensor, division: PartOfWhole) -> torch.Tensor:
    if isinstance(part, DTensor):
        count("objects", of_allgather(part.to_local().nbytes, part.device_mesh.size()))
        part = part.full_tensor()
    mesh, placement = division.tensor, division.placement
    if mesh is None or placement is None:
        return part
    parts = [part.new_empty(part.shape) for _ in range(mesh.size())]
    count("objects", of_allgather(part.nbytes, mesh.size()))
    dist.all_gather(parts, part.contiguous(), group=mesh.get_group())
    return whole_of(parts, placement)


def _taken(whole: torch.Tensor, division: PartOfWhole) -> torch.Tensor:
    mesh, placement = division.tensor, division.placement
    if mesh is not None and placement is not None:
        whole = part_of(whole, placement, mesh.get_local_rank(), mesh.size())
    if division.shards is None:
        return whole
    # Not a view, which would keep the memory of the whole.
    return division.everywhere(whole).redistribute(*division.shards).clone()  # type: ignore[no-any-return]


_exchange: Callable[..., torch.Tensor] = _Exchange.apply
