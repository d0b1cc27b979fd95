"""What the ranks of a tensor group send each other, in forward and in backward.

A tensor that all ranks hold has a gradient that is whole on each, since all go on alike with it.
A rank's part of a tensor has its part of the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall

_Exchange = Callable[[torch.Tensor, DeviceMesh, int], torch.Tensor]


def used_by_all(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """A tensor that all ranks hold, and use for their parts: their gradients are summed."""
    return _both_ways(x, mesh, 0, _same, _total)


def added_once(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """What each rank adds of a tensor that all hold, before a sum for which all get gradients."""
    return _both_ways(x, mesh, 0, _share, _same)


def summed(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum of the ranks' tensors, on every rank, which all go on alike with it."""
    return _both_ways(x, mesh, 0, _total, _same)


def joined(x: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> torch.Tensor:
    """The ranks' parts along a dimension, on every rank, which all go on alike with them."""
    return _both_ways(x, mesh, dim, _whole, _own)


def own_part(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part along a dimension of a tensor that all ranks hold."""
    return _both_ways(x, mesh, dim, _own, _whole)


def own_part_summed(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """This rank's part along a dimension of the sum of the ranks' tensors."""
    return _both_ways(x, mesh, dim, _own_total, _whole)


def joined_for_all(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """The ranks' parts along a dimension, on every rank: the sum of their gradients comes back."""
    return _both_ways(x, mesh, dim, _whole, _own_total)


@torch.no_grad()
def largest(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Of the ranks' elements at each place, on every rank; without a gradient."""
    return _reduced(x, mesh, dist.ReduceOp.MAX)


class _BothWays(torch.autograd.Function):
    """An exchange in forward, and another one in backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, mesh: DeviceMesh, dim: int, there: _Exchange, back: _Exchange
    ) -> torch.Tensor:
        ctx.of = mesh, dim, back, there
        return there(x, mesh, dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # Once more the other way round, for gradients of gradients.
        return _both_ways(gradient, *ctx.of), None, None, None, None


_both_ways: Callable[..., torch.Tensor] = _BothWays.apply


def _same(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x.view_as(x)


def _share(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x / mesh.size()


def _total(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return _reduced(x, mesh)


def _own(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    # Autograd would keep the memory of the whole for a view of it.
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


def _whole(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    if x.is_meta:  # only shapes are wanted
        return torch.cat([x] * mesh.size(), dim)
    parts = [x.new_empty(x.shape) for _ in range(mesh.size())]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    count("activations", of_allgather(x.nbytes, mesh.size()))
    return torch.cat(parts, dim)


def _own_total(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Each rank adds up its part: gloo's reduce-scatter sends as much as a sum for all."""
    if x.is_meta:
        return _own(x, mesh, dim)
    parts = torch.stack(x.chunk(mesh.size(), dim))
    arrived = torch.empty_like(parts)
    dist.all_to_all_single(arrived, parts, group=mesh.get_group())
    count("activations", of_alltoall(x.nbytes, mesh.size()))
    return arrived.sum(0)


def _reduced(x: torch.Tensor, mesh: DeviceMesh, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    if x.is_meta:
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=mesh.get_group())
    count("activations", of_allreduce(total.nbytes, mesh.size()))
    return total
