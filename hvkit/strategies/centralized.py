"""Averaging gradients on one rank: the baseline that the ring replaced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvkit.communication.exchanges import Messages, Ranks, Tensor, by_rank
from hvkit.compression import Compression, Rounding
from hvkit.compression.compression import Ops, Reduction, Shape, State
from hvkit.strategies.strategy import Averaging


@dataclass(frozen=True)
class Centralized(Averaging):
    """Rank 0 collects all gradients in every step, and sends their mean to all.

    The updates are those of ``Synchronous``. Of gradients of P bytes, rank 0 receives (N-1)P and
    sends (N-1)P in each step, the others P each, where a ring sends 2 (N-1)/N P from every rank:
    the time of a step grows with the number of ranks. This is for comparison and for teaching.
    Row-sparse gradients and the small messages of checks still go around the ring.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server" (2014), with
    one server that waits for all workers.
    """

    def check(self, compression: Compression | None) -> None:
        if compression is not None and not isinstance(compression, Rounding):
            raise ValueError(
                f"{self} sends whole vectors to rank 0 and back, and {compression} averages in "
                'another way: use "fp16", "bf16" or "int8", or hvkit.Synchronous()'
            )

    def gradient_compression(self, compression: Compression | None) -> Compression | None:
        assert compression is None or isinstance(compression, Rounding)
        return _ThroughRankZero(compression)


@dataclass(frozen=True)
class _ThroughRankZero(Compression):
    """Rank 0 averages vectors, which are rounded on the way there and back."""

    rounding: Rounding | None

    @property
    def float32_only(self) -> bool:
        return self.rounding is not None

    def reduce(
        self, vector: Tensor, shapes: Sequence[Shape], state: State, ops: Ops, group: Ranks
    ) -> Reduction:
        length, size = vector.shape[0], group.size
        sent = self._encode(vector, ops)
        # How many rows a rank exchanges with rank 0, and rank 0 with each.
        with_0 = by_rank(sent.shape[0], [0], size)
        with_all = by_rank(sent.shape[0], range(size) if group.rank == 0 else (), size)
        collected = yield Messages(sent, with_0, with_all)
        answer = sent[:0]
        if group.rank == 0:
            vectors = ops.reshape(self._decode(collected, ops), (size, -1))
            answer = ops.concat([self._encode(ops.mean_of_rows(vectors), ops)] * size)
        mean = yield Messages(answer, with_all, with_0)
        return self._decode(mean, ops)[:length], state

    def _encode(self, vector: Tensor, ops: Ops) -> Tensor:
        if self.rounding is None:
            return ops.reshape(vector, (-1, 1))
        return self.rounding.encode(ops.pad(vector, -vector.shape[0] % self.rounding.block), ops)

    def _decode(self, rows: Tensor, ops: Ops) -> Tensor:
        if self.rounding is None:
            return ops.reshape(rows, (-1,))
        return self.rounding.decode(rows, ops)
