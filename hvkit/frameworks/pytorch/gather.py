"""Gathers and adds up tensors of all ranks, with a backward pass."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from hvkit.communication.encoding import bytes_of
from hvkit.frameworks.pytorch.gradients.reducer import trained_parameters
from hvkit.frameworks.pytorch.wire import Wire, shaped_like, to_vector
from hvkit.runtime import Group, all_ranks, size
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
    rows_for_each: float | None = None,
) -> list[torch.Tensor]:
    """The tensors of all ranks, in rank order; a collective, as is its backward pass.

    ``shapes`` are of all ranks' tensors. ``rows_for_each`` is how many rows all ranks have for each
    of this rank, whose gradients then count as often as it has rows; None for equal weights.
    """
    apply: Any = _Gather.apply
    group = group or all_ranks()
    weight = group.size / (rows_for_each or math.inf) if rows_for_each is not None else 1.0
    name = f"hvkit.allgather.{_next_serial(group)}"
    return list(apply(tensor, list(shapes), name, group, weight))


def _next_serial(group: Group) -> int:
    return next(_serials.setdefault(group.members, itertools.count())) % _NAMES


def with_values(total: Any, count: Any) -> tuple[Any, Any]:
    """Both, once they have values, for which outputs of a pipeline may wait."""
    if has_torch_function((total, count)):
        waited: tuple[Any, Any] = handle_torch_function(with_values, (total, count), total, count)
        return waited
    if any(isinstance(each, torch.Tensor) and each.is_meta for each in (total, count)):
        raise NotImplementedError("hvkit.mean needs values")
    return total, count


def facts_of_mean(total: Any, count: Any) -> tuple[Any, ...]:
    """Framework, dtype, type of device, whether a backward pass may come back, and both shapes.

    Ranks compare these, and one that has only numbers needs them.
    """
    given = [each for each in (total, count) if isinstance(each, torch.Tensor)]
    if any(each.is_complex() for each in given):
        raise TypeError("pass the real and the imaginary part: torch.view_as_real(total)")
    dtype = torch.result_type(total, count)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    shapes = [tuple(x.shape) if isinstance(x, torch.Tensor) else None for x in (total, count)]
    name = str(dtype).removeprefix("torch.")
    return "torch", name, given[0].device.type, any(map(needs_gradients, given)), shapes


def mean(
    both: Sequence[Any], shapes: Sequence[Sequence[int]], facts: Sequence[Any], ranks: float | None
) -> torch.Tensor:
    """The sum of totals over ranks, divided by the sum of counts; one collective.

    ``facts`` are this rank's, or another's if this one has only numbers: a backward pass may come
    back here if it may on any rank. ``ranks`` is the factor of gradients; None for the number of
    ranks.
    """
    if size() == 1:
        found: torch.Tensor = both[0] / both[1]
        return found
    _, dtype, device, needed, _ = facts
    devices = [each.device for each in both if isinstance(each, torch.Tensor)] or [device]
    wide = [
        torch.as_tensor(each, dtype=torch.float64, device=devices[0]).expand(tuple(shape))
        for each, shape in zip(both, shapes, strict=True)
    ]
    numbers = torch.cat([each.reshape(-1) for each in wide])
    if needed and torch.is_grad_enabled() and not numbers.requires_grad:
        numbers = _with_backward(numbers)
    apply: Any = _Sum.apply
    sums = apply(numbers, _next_serial(all_ranks()), ranks)
    totals, counts = sums.split([each.numel() for each in wide])
    found = totals.view(wide[0].shape) / counts.view(wide[1].shape)
    return found.to(getattr(torch, dtype))


def _with_backward(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of a rank that has computed nothing, for a script that calls ``backward()`` on all.

    This rank's pass must average gradients, too, as zeros. With several models, it is not known
    which of them the other ranks have computed: then ``backward()`` raises.
    """
    parameters = trained_parameters()
    if not parameters:
        return numbers.requires_grad_()
    several = len(parameters) > 1
    return numbers if several else numbers + parameters[0].flatten()[:0].sum().to(numbers)


class _Sum(torch.autograd.Function):
    """Adds up numbers. Gradients of weights become means later, so it multiplies its gradient."""

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
        joined = ctx.wire.gather(bytes_of(tensor), name).view(tensor.dtype)
        pieces = zip(joined.split(ctx.sizes), shapes, strict=True)
        return tuple(piece.clone().view(shape) for piece, shape in pieces)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        local = gradients[ctx.wire.rank]
        start = sum(ctx.sizes[: ctx.wire.rank])
        sent = to_vector(flat)
        if ctx.weight != 1:
            sent *= ctx.weight
        with call("the backward pass of hvkit.allgather"):
            total = ctx.wire.sum(sent, f"{ctx.name}.backward")
        width = total.numel() // max(flat.numel(), 1)  # 2 for complex numbers
        mean = total[start * width : (start + local.numel()) * width]
        if ctx.weight not in (0, 1):  # this rank's gradients are multiplied by it later
            mean = mean / ctx.weight
        return shaped_like(local, mean).to(local.dtype), None, None, None, None
