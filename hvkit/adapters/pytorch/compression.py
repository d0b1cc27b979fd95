"""Gradients that travel in 16 bits and are summed in 32.

Horovod's allreduce would sum in the 16 bits too, where float16 overflows and every rank adds a
rounding error, and it has no bfloat16. So its two halves are made of other collectives: an
all-to-all gives each rank its share of every rank's gradients, which it averages in float32, and an
allgather brings the means to all. Each byte count is half that of a ring allreduce in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType

import torch

from hvkit.adapters.pytorch.buckets import Bucket, runs, wire_dtype
from hvkit.engines import waiting_for_all_ranks
from hvkit.watch.rank_errors import translated

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


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
