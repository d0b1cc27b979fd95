"""Gathers and adds up tensors of PyTorch of all ranks, with a backward pass.

For ``hvkit.allgather`` and ``hvkit.mean``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from hvkit.communication.encoding import bytes_of
from hvkit.communication.group import Group, all_ranks
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import like, wire_dtype
from hvkit.watch.calls import call

# Names of collectives return after so many calls: Horovod remembers a limited number of them.
_NAMES = 64

# By the members of a group.
_serials: dict[tuple[int, ...], itertools.count[int]] = {}


def needs_gradients(tensor: torch.Tensor) -> bool:
    """Whether a backward pass may come back to this tensor."""
    return tensor.requires_grad and torch.is_grad_enabled()


def gather(
    tensor: torch.Tensor,
    shapes: Sequence[tuple[int, ...]],
    group: Group | None = None,
    share: float | None = None,
) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order; a collective, as is its backward pass.

    Args:
        tensor: this rank's.
        shapes: of the tensors of all ranks, which have one dtype.
        group: these ranks; None for all.
        share: how many rows all ranks have for each of this rank, whose loss and gradients then
            count as often as it has rows; None if all ranks count alike.
    """
    apply: Any = _Gather.apply
    group = group or all_ranks()
    weight = group.size / (share or math.inf) if share is not None else 1.0
    serial = _serials.setdefault(group.members, itertools.count())
    name = f"hvkit.allgather.{next(serial) % _NAMES}"
    return list(apply(tensor, list(shapes), name, group, weight))


def mean(total: Any, count: Any, ranks: float | None = None) -> torch.Tensor:
    """The sum over ranks of ``total`` divided by that of ``count``; one collective.

    Args:
        total, count: tensors or numbers, at least one of them a tensor; the same shapes on every
            rank.
        ranks: by what gradients are multiplied; None for the number of ranks.

    Raises:
        NotImplementedError: they have no values, as on the meta device.
    """
    if has_torch_function((total, count)):  # a pipeline's outputs may wait for their values
        waited: torch.Tensor = handle_torch_function(mean, (total, count), total, count, ranks)
        return waited
    if any(isinstance(each, torch.Tensor) and each.is_meta for each in (total, count)):
        raise NotImplementedError("hvkit.mean needs values")
    kind = torch.result_type(total, count)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    device = next(each.device for each in (total, count) if isinstance(each, torch.Tensor))
    both = [torch.as_tensor(each, device=device).double() for each in (total, count)]
    serial = _serials.setdefault(all_ranks().members, itertools.count())
    apply: Any = _Sum.apply
    sums = apply(torch.cat([each.reshape(-1) for each in both]), next(serial) % _NAMES, ranks)
    totals, counts = sums.split([each.numel() for each in both])
    found: torch.Tensor = totals.view(both[0].shape) / counts.view(both[1].shape)
    return found.to(kind)


class _Sum(torch.autograd.Function):
    """Of numbers of all ranks. Gradients of weights are averaged later, so this one is times N."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, serial: int, ranks: float | None) -> torch.Tensor:
        wire = Wire("objects")
        ctx.ranks = wire.size if ranks is None else ranks
        return wire.sum(numbers, f"hvkit.mean.{serial}")

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.ranks, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        shapes: list[tuple[int, ...]],
        name: str,
        group: Group,
        weight: float,
    ) -> tuple[torch.Tensor, ...]:
        ctx.wire, ctx.name, ctx.weight = Wire("objects", group), name, weight
        ctx.sizes = [math.prod(shape) for shape in shapes]
        # As bytes: Horovod does not have every dtype.
        everyone = ctx.wire.gather(bytes_of(tensor), name).view(tensor.dtype)
        pieces = zip(everyone.split(ctx.sizes), shapes, strict=True)
        return tuple(piece.clone().view(shape) for piece, shape in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        own = gradients[ctx.wire.rank]
        start = sum(ctx.sizes[: ctx.wire.rank])
        sent = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
        sent = sent.to(wire_dtype(flat.dtype))
        if ctx.weight != 1:
            sent = sent * ctx.weight
        with call("the backward pass of hvkit.allgather"):
            total = ctx.wire.sum(sent, f"{ctx.name}.backward")
        width = total.numel() // max(flat.numel(), 1)  # 2 for complex numbers
        mine = total[start * width : (start + own.numel()) * width]
        if ctx.weight not in (0, 1):  # this rank's gradients are multiplied by it later
            mine = mine / ctx.weight
        return like(own, mine).to(own.dtype), None, None, None, None
