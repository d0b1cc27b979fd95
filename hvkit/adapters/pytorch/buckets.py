"""Flat buffers that carry many gradients in one allreduce.

A bucket holds the gradients of some parameters, one after the other, as one contiguous tensor
that Horovod reduces in place. What is averaged is a copy: a parameter's own gradient is only
written when the mean is there. Hence a gradient that this rank did not compute can go out as
zeros, half-precision gradients can travel in float32, and any memory layout is fine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

import torch

from hvkit.adapters.transport import chunks
from hvkit.engines import waiting_for_all_ranks
from hvkit.watch.failures import translated

# Horovod's allreduce has no bfloat16, and float16 would overflow in the sum where the mean fits.
_WIRE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` travel and are summed."""
    return _WIRE_DTYPE.get(dtype, dtype)


class Bucket:
    """The gradients of a few parameters with one wire dtype on one device.

    Args:
        name: the same on every rank, and no other bucket's.
        members: numbers and parameters, at least one.
        extra: numbers to append at the end, for whoever fills :attr:`extra`.
    """

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], extra: int = 0
    ) -> None:
        self.name = name
        first = members[0][1]
        lengths = [p.numel() * (2 if p.is_complex() else 1) for _, p in members]
        self.flat = torch.zeros(
            sum(lengths) + extra, dtype=wire_dtype(first.dtype), device=first.device
        )
        pieces = torch.split(self.flat, [*lengths, extra])
        self.views = {
            i: _shaped_like(p, piece) for (i, p), piece in zip(members, pieces[:-1], strict=True)
        }
        self.extra = pieces[-1]
        self.packed: set[int] = set()
        self.handle: int | None = None

    def pack(self, i: int, gradient: torch.Tensor | None) -> None:
        """Copy parameter ``i``'s gradient in; None counts as zero."""
        if gradient is None:
            self.views[i].zero_()
        else:
            self.views[i].copy_(gradient)
        self.packed.add(i)

    @property
    def full(self) -> bool:
        """Whether every member has been packed since the last :meth:`reset`."""
        return len(self.packed) == len(self.views)

    def launch(self, hvd: ModuleType) -> None:
        """Start averaging over ranks; returns at once."""
        with translated():
            self.handle = hvd.allreduce_async_(self.flat, name=self.name, op=hvd.Average)

    def exchange(self, hvd: ModuleType) -> None:
        """Start what comes second, in buckets that need two collectives; after :meth:`launch`."""

    def wait(self, hvd: ModuleType) -> None:
        """Wait for the mean; after :meth:`exchange`."""
        with waiting_for_all_ranks():
            hvd.synchronize(self.handle)
        self.handle = None

    def reset(self) -> None:
        """Begin the next reduction."""
        self.packed.clear()


def _shaped_like(parameter: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
    if parameter.is_complex():
        return torch.view_as_complex(piece.view(*parameter.shape, 2))
    return piece.view_as(parameter)


def runs(members: Iterable[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Spread numbered parameters over buckets.

    Backward reaches the last registered parameters first, so the buckets run from there. The
    first registered parameters are in the last bucket.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for i, p in reversed(list(members)):
        kinds.setdefault((wire_dtype(p.dtype), p.device), []).append((i, p))
    return [
        [group[position] for position in run]
        for group in kinds.values()
        for run in chunks([p.numel() * p.element_size() for _, p in group])
    ]


def make_buckets(
    name: str, last_name: str, members: Iterable[tuple[int, torch.Tensor]], extra: int
) -> list[Bucket]:
    """Buckets for numbered parameters; the last, of a name of its own, has ``extra`` numbers."""
    spread = runs(members)
    first = [Bucket(f"{name}.{b}", run) for b, run in enumerate(spread[:-1])]
    return [*first, Bucket(last_name, spread[-1], extra)]
