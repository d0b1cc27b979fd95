"""Decoupled momentum: ranks send only their momentum's strongest frequencies."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvkit.argument_checks import check_count, check_number
from hvkit.communication.exchanges import Gather, Ranks, Tensor
from hvkit.compression.compression import Compression, Ops, Reduction, Shape, State, byte_row
from hvkit.strategies.strategy import Averaging


@dataclass(frozen=True)
class DeMo(Averaging, Compression):
    """Each rank keeps a local momentum, and sends its strongest frequencies only.

    With rank w's gradient g_w and momentum m_w, and the discrete cosine transform D of each chunk
    of a tensor:

        m_w <- decay m_w + g_w
        q_w <- the coefficients of D m_w that are largest in absolute value, in each chunk
        m_w <- m_w - D^-1 q_w
        the optimizer's gradient is sign(D^-1 1/N sum_w q_w)

    What a rank does not send stays in its momentum. A tensor of shape (m, ...) counts as a matrix
    of m rows, cut into chunks of up to ``chunk`` times ``chunk`` values whose sides divide the
    matrix's; without such sides its values fill chunks in their order. A rank sends value and
    position, 6 bytes, of each coefficient to each other rank.

    The momentum replaces the optimizer's: use SGD without momentum. With ``sign``, each weight
    changes by the learning rate in each step, as with Adam, so choose it as for Adam. Parameters
    must be dense, and of at most 32 bits.

    Source: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization" (2024). There the
    mean of a coefficient is over the ranks that sent it, here over all.

    Args:
        top_k: coefficients to send of a chunk of ``chunk`` times ``chunk`` values; of smaller
            chunks, the same fraction.
        chunk: the longest side of a chunk, up to 128.
        decay: of the momentum, from 0 to 1.
        sign: whether only the signs of the means count.
    """

    top_k: int = 16
    chunk: int = 64
    decay: float = 0.999
    sign: bool = True

    per_rank: ClassVar[tuple[str, ...]] = ("momentum",)
    exclusive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if check_count("chunk", self.chunk) > 128:  # positions are sent in 16 bits
            raise ValueError(f"chunk must be at most 128, got {self.chunk}")
        if check_count("top_k", self.top_k) > self.chunk**2:
            raise ValueError(
                f"top_k must be at most chunk * chunk = {self.chunk**2}, got {self.top_k}"
            )
        check_number("decay", self.decay, least=0, up_to=1)
        if not isinstance(self.sign, bool):
            raise TypeError(f"sign must be True or False, got {self.sign!r}")

    has_momentum: ClassVar[bool] = True

    def check(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(
                f"{self} is a compression itself, got compression {compression} as well: leave it "
                "out, or use hvkit.Synchronous()"
            )

    def gradient_compression(self, compression: Compression | None) -> Compression | None:
        return self

    def begin(self, shape: Shape) -> dict[str, NDArray[np.float32]]:
        return {"momentum": np.zeros(math.prod(shape), np.float32)}

    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        layouts = [_Layout.of(shape, self.chunk, self.top_k) for shape in shapes]
        gradients = ops.split(vector, [each.length for each in layouts])
        momenta, indices, values = [], [], []
        for layout, gradient, before in zip(layouts, gradients, state["momentum"], strict=True):
            momentum = self.decay * before + gradient
            coefficients = layout.forward(momentum, ops)
            at = ops.largest_at(coefficients, layout.kept)
            momenta.append(momentum)
            indices.append(ops.reshape(at, (-1,)))
            values.append(ops.take(ops.reshape(coefficients, (-1,)), layout.flat(at, ops)))
        counts = [layout.chunks * layout.kept for layout in layouts]
        all_indices = ops.cast(ops.concat(indices), "int16")
        sent = ops.join(byte_row(ops, all_indices), byte_row(ops, ops.concat(values)))
        gathered = yield Gather(sent)

        total = sum(counts)
        positions = ops.cast(ops.bits(gathered[:, : 2 * total], "int16"), "int32")
        received = ops.bits(gathered[:, 2 * total :], "float32")
        means, kept, start = [], [], 0
        for layout, count, momentum, local, index in zip(
            layouts, counts, momenta, values, indices, strict=True
        ):
            stop = start + count
            of_all = ops.reshape(positions[:, start:stop], (-1, layout.chunks, layout.kept))
            weights = ops.reshape(received[:, start:stop], (-1,)) / group.size
            mean = layout.backward(layout.flat(of_all, ops), weights, ops)
            if self.sign:
                sign = ops.cast(mean > 0, "float32") - ops.cast(mean < 0, "float32")
                # A NaN must not become a step of zero.
                mean = ops.where(mean == mean, sign, mean)
            at = layout.flat(ops.reshape(index, (layout.chunks, layout.kept)), ops)
            means.append(mean)
            kept.append(momentum - layout.backward(at, local, ops))
            start = stop
        return ops.concat(means), {"momentum": kept}


@dataclass(frozen=True)
class _Layout:
    """A tensor as ``down`` x ``across`` chunks of ``height`` x ``width``, with zeros at the end."""

    length: int
    down: int
    across: int
    height: int
    width: int
    kept: int

    @classmethod
    def of(cls, shape: Shape, longest: int, top_k: int) -> _Layout:
        rows = shape[0] if len(shape) > 1 else 1
        columns = math.prod(shape) // max(rows, 1)
        height, width = _largest_divisor(rows, longest), _largest_divisor(columns, longest)
        length = rows * columns
        if 4 * height * width < min(rows, longest) * min(columns, longest):
            # A side without a useful divisor: fill up a matrix as wide as a chunk.
            width = min(columns * rows, longest)
            height = min(math.ceil(length / width), longest)
            rows = math.ceil(length / (height * width)) * height
            columns = width
        kept = max(1, math.ceil(top_k * height * width / longest**2))
        return cls(length, rows // height, columns // width, height, width, kept)

    @property
    def chunks(self) -> int:
        return self.down * self.across

    @property
    def size(self) -> int:
        return self.chunks * self.height * self.width

    def forward(self, vector: Tensor, ops: Ops) -> Tensor:
        """The coefficients, of shape (chunks, width * height)."""
        filled = ops.pad(vector, self.size - self.length)
        rows, columns = self._transforms(vector, ops)
        # Matrices only: TensorFlow's product of batches corrupts memory for some shapes.
        across = ops.reshape(filled, (-1, self.width)) @ ops.transpose(columns)
        split = ops.reshape(across, (self.down, self.height, self.across, self.width))
        chunks = ops.reshape(ops.permute(split, (0, 2, 3, 1)), (-1, self.height))
        return ops.reshape(chunks @ ops.transpose(rows), (self.chunks, -1))

    def backward(self, at: Tensor, values: Tensor, ops: Ops) -> Tensor:
        """The tensor, as a vector, with coefficients at positions from ``flat``, added up."""
        rows, columns = self._transforms(values, ops)
        coefficients = ops.reshape(ops.sum_at(self.size, at, values), (-1, self.height))
        down = ops.reshape(coefficients @ rows, (self.down, self.across, self.width, self.height))
        split = ops.reshape(ops.permute(down, (0, 3, 1, 2)), (-1, self.width))
        return ops.reshape(split @ columns, (-1,))[: self.length]

    def flat(self, at: Tensor, ops: Ops) -> Tensor:
        """Positions in chunks, of shape (..., chunks, kept), as a vector of those among all."""
        first = np.arange(self.chunks, dtype=np.int32)[:, None] * (self.height * self.width)
        return ops.reshape(at + ops.constant(first, at), (-1,))

    def _transforms(self, like: Tensor, ops: Ops) -> tuple[Tensor, Tensor]:
        return ops.constant(_cosines(self.height), like), ops.constant(_cosines(self.width), like)


def _largest_divisor(number: int, longest: int) -> int:
    return max((d for d in range(1, min(number, longest) + 1) if number % d == 0), default=1)


@functools.cache
def _cosines(length: int) -> NDArray[np.float32]:
    """The matrix of the orthonormal discrete cosine transform, type II."""
    frequency, position = np.mgrid[:length, :length]
    matrix = np.cos(np.pi / length * (position + 0.5) * frequency) * math.sqrt(2 / length)
    matrix[0] /= math.sqrt(2)
    return np.asarray(matrix, np.float32)
