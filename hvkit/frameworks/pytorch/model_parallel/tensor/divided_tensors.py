"""Tensors of which each rank of a group holds a part, and collectives that autograd can follow.

A tensor that all ranks hold has the same full gradient on each of them, because all of them compute
the same from it. A rank's part of a tensor has that part of the gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvkit.transport.traffic import count, of_allgather, of_allreduce, of_alltoall

Style = Literal["column", "row"]
_IN_PROJECTIONS = {"q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1}
_Exchange = Callable[[torch.Tensor, DeviceMesh, int], torch.Tensor]


@dataclass(frozen=True)
class Placement:
    """A tensor is divided along ``dim``; a rank has its part of each of ``parts`` tensors in it."""

    dim: int
    parts: int = 1


@dataclass(frozen=True)
class LayerDivision:
    """How a layer is divided.

    "column" divides the outputs, "row" the inputs, and "experts" the features between two products
    of each expert. An embedding counts as a linear layer with a transposed weight, whose inputs are
    the rows.
    """

    style: Style | Literal["experts"]
    parts: int = 1  # tensors in its output: 3 for fused queries, keys and values
    transposed: bool = False  # its weight has the shape (in, out)
    by_itself: bool = False  # it returns a whole tensor, since no other layer takes its part
    # By parameter of experts; one without stays whole, and each rank adds its fraction.
    experts: Mapping[str, Placement | None] = field(default_factory=dict)
    # The structures of arguments with which experts may be called.
    calls: frozenset[Hashable] = frozenset()

    def placement(self, name: str, p: torch.Tensor) -> Placement | None:
        """That of a parameter of the layer, by its name there; None if it stays whole."""
        if self.style == "experts":
            return self.experts[name]
        if self.style == "column":
            dim = int(self.transposed and p.dim() == 2)
            return Placement(dim, _IN_PROJECTIONS.get(name, self.parts))
        return Placement(int(not self.transposed)) if name == "weight" else None


def part_of(whole: torch.Tensor, placement: Placement, index: int, ways: int) -> torch.Tensor:
    """A new, contiguous tensor: the part that one rank holds."""
    length = whole.shape[placement.dim]
    if length % (placement.parts * ways):
        raise ValueError(
            f"a tensor of shape {tuple(whole.shape)} cannot be divided along dimension "
            f"{placement.dim} among {ways} ranks in {placement.parts} part(s): its length must be "
            f"a multiple of {placement.parts * ways}"
        )
    pieces = whole.chunk(placement.parts * ways, placement.dim)
    return torch.cat(pieces[index::ways], placement.dim)


def whole_of(parts: Sequence[torch.Tensor], placement: Placement) -> torch.Tensor:
    """The whole tensor, from the parts of all ranks in the order of their index."""
    chunks = (part.chunk(placement.parts, placement.dim) for part in parts)
    return torch.cat([*itertools.chain(*zip(*chunks, strict=True))], placement.dim)


def index_in_part(
    indices: torch.Tensor, length: int, rank: int, ways: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices into the whole as indices into a rank's part, and which of them other ranks have.

    The latter are 0 here. An index that is out of range stays so.
    """
    local = indices - rank * length
    elsewhere = (indices >= 0) & (indices < length * ways) & ((local < 0) | (local >= length))
    return local.masked_fill(elsewhere, 0), elsewhere


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
        # An autograd function again, for gradients of gradients.
        return _both_ways(gradient, *ctx.of), None, None, None, None


_both_ways: Callable[..., torch.Tensor] = _BothWays.apply


def _same(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x.view_as(x)


def _fraction(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    return x / mesh.size()


def _part(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    # Autograd would keep the memory of the whole for a view of it.
    return x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()


def _whole(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    if x.is_meta:  # a dry run needs only the shape
        return torch.cat([x] * mesh.size(), dim)
    parts = [x.new_empty(x.shape) for _ in range(mesh.size())]
    dist.all_gather(parts, x.contiguous(), group=mesh.get_group())
    count("activations", of_allgather(x.nbytes, mesh.size()))
    return torch.cat(parts, dim)


def _part_of_total(x: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """All-to-all and a local sum: gloo's reduce-scatter sends as much as an all-reduce."""
    if x.is_meta:
        return _part(x, mesh, dim)
    parts = torch.stack(x.chunk(mesh.size(), dim))
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=mesh.get_group())
    count("activations", of_alltoall(x.nbytes, mesh.size()))
    return received.sum(0)


def _total(
    x: torch.Tensor, mesh: DeviceMesh, dim: int = -1, op: Any = dist.ReduceOp.SUM
) -> torch.Tensor:
    if x.is_meta:
        return x.clone()
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, op, group=mesh.get_group())
    count("activations", of_allreduce(total.nbytes, mesh.size()))
    return total


def _collective(there: _Exchange, back: _Exchange) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, mesh: DeviceMesh, dim: int = -1) -> torch.Tensor:
        return _both_ways(x, mesh, dim, there, back)

    return run


copy_to_ranks = _collective(_same, _total)
"""A tensor that all ranks hold, for use with their parts; backward: all-reduce."""
divide_by_ranks = _collective(_fraction, _same)
"""This rank's fraction of a tensor that all hold, before an all-reduce; backward: unchanged."""
all_reduce = _collective(_total, _same)
"""The sum of the ranks' tensors, on every rank; backward: unchanged."""
all_gather = _collective(_whole, _part)
"""The ranks' parts along a dimension, on every rank; backward: this rank's part."""
scatter = _collective(_part, _whole)
"""This rank's part along a dimension of a tensor that all hold; backward: all-gather."""
reduce_scatter = _collective(_part_of_total, _whole)
"""This rank's part along a dimension of the sum of tensors; backward: all-gather."""
all_gather_shared = _collective(_whole, _part_of_total)
"""The ranks' parts along a dimension, for use with their parts; backward: reduce-scatter."""


@torch.no_grad()
def all_reduce_max(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The largest of the ranks' elements at each index, on every rank; without a gradient."""
    return _total(x, mesh, op=dist.ReduceOp.MAX)


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    mesh: DeviceMesh,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """As ``torch.nn.functional.cross_entropy`` of all classes, on every rank.

    Megatron-LM (https://arxiv.org/abs/1909.08053, section 3): the ranks exchange three numbers for
    each target in place of the logits, which are of this rank's classes: (classes) or (samples,
    classes, ...).
    """
    dim = min(1, logits.dim() - 1)
    exact = torch.promote_types(logits.dtype, torch.float32)
    dtype = exact if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    counted = target != ignore_index
    index, elsewhere = index_in_part(
        target.where(counted, 0), logits.shape[dim], mesh.get_local_rank(), mesh.size()
    )
    logits = logits.to(exact)
    logits = logits - all_reduce_max(logits.detach().amax(dim, keepdim=True), mesh)
    found = logits.gather(dim, index.unsqueeze(dim)).squeeze(dim).masked_fill(elsewhere, 0)
    losses = all_reduce(logits.exp().sum(dim), mesh).log() - all_reduce(found, mesh)
    losses = losses.masked_fill(~counted, 0)
    if reduction != "none":
        losses = losses.sum()
    return (losses / counted.sum() if reduction == "mean" else losses).to(dtype)
