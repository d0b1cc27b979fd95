"""Flat buffers that carry many gradients in one allreduce.

A bucket holds the gradients of some parameters, one after the other, as one contiguous tensor
that Horovod reduces in place. What is averaged is a copy: a parameter's own gradient is only
written when the mean is there. Hence a gradient that this rank did not compute can go out as
zeros, half-precision gradients can travel in float32, and any memory layout is fine.

Gradients that travel in 16 bits and are summed in 32.

Horovod's allreduce would sum in the 16 bits too, where float16 overflows and every rank adds a
rounding error, and it has no bfloat16. So its two halves are made of other collectives: an
all-to-all gives each rank its share of every rank's gradients, which it averages in float32, and an
allgather brings the means to all. Each byte count is half that of a ring allreduce in float32.

The mean over ranks of row-sparse gradients, as ``torch.nn.Embedding(sparse=True)`` makes them.

The rows that the ranks touched are gathered rather than summed as dense tensors: a table of
millions of rows costs what the few rows of a batch cost.
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


NARROW_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class NarrowBucket(Bucket):
    """A bucket of float32 gradients whose elements take 16 bits on the way.

    Args:
        name: the same on every rank, and no other bucket's.
        members: numbers and parameters, at least one.
        dtype: of 16 bits.
    """

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], dtype: torch.dtype
    ) -> None:
        super().__init__(name, members)
        self._dtype = dtype

    def launch(self, hvd: ModuleType) -> None:
        narrow = to_bits(self.flat, self._dtype)
        padding = -len(narrow) % hvd.size()
        if padding:
            narrow = torch.cat([narrow, narrow.new_zeros(padding)])
        with translated():
            self.handle = hvd.alltoall_async(narrow, name=f"{self.name}.shares")

    def exchange(self, hvd: ModuleType) -> None:
        with waiting_for_all_ranks():
            shares, _ = hvd.synchronize(self.handle)
        mean = from_bits(shares, self._dtype).view(hvd.size(), -1).mean(0)
        with translated():
            self.handle = hvd.allgather_async(to_bits(mean, self._dtype), name=f"{self.name}.means")

    def wait(self, hvd: ModuleType) -> None:
        with waiting_for_all_ranks():
            means = hvd.synchronize(self.handle)
        self.handle = None
        self.flat.copy_(from_bits(means[: len(self.flat)], self._dtype))


def to_bits(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to 16 bits, in a dtype that Horovod moves without looking inside."""
    return values.to(dtype).view(torch.int16)


def from_bits(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float32 values of what :func:`to_bits` gave."""
    return bits.view(dtype).to(torch.float32)


def make_narrow_buckets(
    name: str,
    last_name: str,
    members: Iterable[tuple[int, torch.Tensor]],
    extra: int,
    dtype: torch.dtype,
) -> list[Bucket]:
    """Buckets for numbered parameters; the last has ``extra`` numbers alone, in full precision.

    Gradients in double precision are not narrowed.
    """
    spread = runs(members)
    device = spread[-1][-1][1].device
    buckets = [
        NarrowBucket(f"{name}.{b}", run, dtype)
        if wire_dtype(run[0][1].dtype) is torch.float32
        else Bucket(f"{name}.{b}", run)
        for b, run in enumerate(spread)
    ]
    # No parameter has the number -1.
    return [*buckets, Bucket(last_name, [(-1, torch.zeros(1, device=device))], extra)]


def average_rows(
    gradient: torch.Tensor | None,
    parameter: torch.Tensor,
    name: str,
    hvd: ModuleType,
    narrow: torch.dtype | None = None,
) -> torch.Tensor:
    """Mean over ranks of a gradient that is sparse in its first dimension; a collective.

    Args:
        gradient: sparse or dense tensor of the parameter's shape; None counts as zero.
        parameter: of shape (rows, ...).
        name: the same on every rank, and no other parameter's.
        hvd: Horovod's PyTorch binding.
        narrow: dtype of 16 bits in which the values travel; None for their own.

    Returns:
        A coalesced sparse tensor of the parameter's shape and dtype.
    """
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
    else:
        by_row = gradient if gradient.is_sparse else gradient.to_sparse(1)
        by_row = by_row.coalesce()
        rows, values = by_row.indices()[0].contiguous(), by_row.values().contiguous()
    values = values.to(wire_dtype(values.dtype))
    narrow = narrow if values.dtype is torch.float32 else None
    sent = to_bits(values, narrow) if narrow else values
    with waiting_for_all_ranks():
        handles = [
            hvd.allgather_async(rows, name=f"{name}.rows"),
            hvd.allgather_async(sent, name=f"{name}.values"),
        ]
        all_rows, all_values = (hvd.synchronize(handle) for handle in handles)
    if narrow:
        all_values = from_bits(all_values, narrow)
    mean = torch.sparse_coo_tensor(
        all_rows[None], all_values / hvd.size(), parameter.shape, check_invariants=False
    )
    return mean.coalesce().to(parameter.dtype)
