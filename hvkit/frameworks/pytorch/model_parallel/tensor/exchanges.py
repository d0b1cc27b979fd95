"""What the ranks of a tensor group send each other, in forward and in backward.

All of them compute the same from what they hold whole, so the gradient of that is whole on each.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvkit.communication.traffic import count, of_allgather, of_allreduce


def used_by_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all ranks hold, and use for their parts: their gradients are summed."""
    copy: torch.Tensor = _UsedByAll.apply(x, mesh)  # type: ignore[no-untyped-call]
    return copy


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank, which all go on alike with it."""
    total: torch.Tensor = _Summed.apply(x, mesh)  # type: ignore[no-untyped-call]
    return total


def joined(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' parts of the last dimension, on every rank, which all go on alike with them."""
    whole: torch.Tensor = _Joined.apply(x, mesh)  # type: ignore[no-untyped-call]
    return whole


@torch.no_grad()
def largest(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Of the ranks' elements at each place, on every rank; without a gradient."""
    return _reduced(x, mesh, dist.ReduceOp.MAX)


class _UsedByAll(torch.autograd.Function):
    """Megatron-LM's f: nothing in forward, a sum over the ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _reduced(gradient, ctx.mesh), None


class _Summed(torch.autograd.Function):
    """Megatron-LM's g: a sum over the ranks in forward, nothing in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return _reduced(x, mesh)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Joined(torch.autograd.Function):
    """The ranks' parts one after the other in forward, a rank's own part in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format)] * mesh.size()
        if not x.is_meta:
            parts = [torch.empty_like(each) for each in parts]
            dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
            count("activations", of_allgather(x.nbytes, mesh.size()))
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(ctx.mesh.size(), -1)[ctx.mesh.get_local_rank()], None


def _reduced(x: torch.Tensor, mesh: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if x.is_meta:  # only shapes are wanted
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=mesh.get_group())
    count("activations", of_allreduce(total.nbytes, mesh.size()))
    return total
