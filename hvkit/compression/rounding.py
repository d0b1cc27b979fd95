"""Compression by rounding: each value is sent in 16 bits or in 8.

Horovod's allreduce would sum in 16 bits, where float16 overflows and every rank adds a rounding
error, and it has neither bfloat16 nor 8-bit sums. So an all-to-all gives each rank its part of all
ranks' values, which it averages in float32, and an allgather brings the means to all ranks. Each
value is rounded twice, however many ranks there are. With two bytes a value both together send half
the bytes of a ring allreduce in float32.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvkit.communication.exchanges import AllToAll, Gather, Mean, Ranks, Tensor
from hvkit.compression.compression import Compression, Ops, Reduction, Shape, State


@dataclass(frozen=True)
class Rounding(Compression):
    """A compression that encodes runs of values on their own."""

    block: ClassVar[int] = 1  # the number of values in a run

    @abstractmethod
    def encode(self, vector: Tensor, ops: Ops) -> Tensor:
        """Round a float32 vector of shape (n * block,) to integers of shape (n, width)."""

    @abstractmethod
    def decode(self, rows: Tensor, ops: Ops) -> Tensor:
        """The float32 vector of a result of ``encode``."""

    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        length, ranks = vector.shape[0], group.size
        if length < ranks * self.block and self.block > 1:  # padding would cost more than it saves
            mean = yield Mean(vector)
            return mean, state
        padded = ops.pad(vector, -length % (ranks * self.block))
        received = yield AllToAll(self.encode(padded, ops))
        mean = ops.mean_of_rows(ops.reshape(self.decode(received, ops), (ranks, -1)))
        means = yield Gather(self.encode(mean, ops))
        return self.decode(means, ops)[:length], state


@dataclass(frozen=True)
class _SixteenBits(Rounding):
    """A float of 16 bits, sent as an integer."""

    dtype: ClassVar[str]

    def encode(self, vector: Tensor, ops: Ops) -> Tensor:
        return ops.bits(ops.cast(ops.reshape(vector, (-1, 1)), self.dtype), "int16")

    def decode(self, rows: Tensor, ops: Ops) -> Tensor:
        return ops.reshape(ops.cast(ops.bits(rows, self.dtype), "float32"), (-1,))


@dataclass(frozen=True)
class Float16(_SixteenBits):
    """float16: 11 bits of precision; infinite beyond 65504, and zero below 6e-8."""

    dtype: ClassVar[str] = "float16"


@dataclass(frozen=True)
class BFloat16(_SixteenBits):
    """bfloat16: 8 bits of precision, and the range of float32."""

    dtype: ClassVar[str] = "bfloat16"


@dataclass(frozen=True)
class Int8(Rounding):
    """8 bits: each block of 256 values has a float32 scale s, its largest absolute value / 127.

        q = round(x / s),    x ~ s q,    |x - s q| <= s / 2

    A block of zeros stays zero. A value that is infinite or NaN makes its whole block NaN or
    infinite: with loss scaling, an overflow on one rank must be one on all. Vectors of less than a
    block for each rank are sent as they are. A ring allreduce in float32 sends 3.9 times the bytes.

    Source: Dettmers, "8-Bit Approximations for Parallelism in Deep Learning" (2015), with scales
    for blocks as in Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2021).
    """

    block: ClassVar[int] = 256

    def encode(self, vector: Tensor, ops: Ops) -> Tensor:
        blocks = ops.reshape(vector, (-1, self.block))
        scale = ops.largest(blocks) / 127
        # Smaller scales lack full precision: such a block counts as zeros.
        usable = ops.where(ops.finite(scale) & (scale > 1e-38), scale, 1.0)
        # Times a scale that is not finite, any number but zero gives the right result.
        whole = ops.where(ops.finite(scale), ops.rounded(blocks / usable), 1.0)
        return ops.join(ops.bits(ops.cast(whole, "int8"), "uint8"), ops.bits(scale, "uint8"))

    def decode(self, rows: Tensor, ops: Ops) -> Tensor:
        whole = ops.cast(ops.bits(rows[:, : self.block], "int8"), "float32")
        return ops.reshape(whole * ops.bits(rows[:, self.block :], "float32"), (-1,))
