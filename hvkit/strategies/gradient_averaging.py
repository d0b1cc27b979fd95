"""Strategies that average gradients in every step, and so keep the same weights on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvkit.communication.exchanges import Messages, Ranks, Tensor, by_rank
from hvkit.compression import Compression, Rounding
from hvkit.compression.compression import Ops, Reduction, Shape, State
from hvkit.strategies.strategy import Averaging, Strategy


@dataclass(frozen=True)
class Synchronous(Averaging):
    """Every update uses the mean over ranks of the ranks' gradients.

    With N ranks, weights x, rank w's gradient g_w(x) and the optimizer's update U:

        x <- U(x, 1/N sum_w g_w(x))

    N ranks with batch size B train the model that one process trains with batch size N*B. A ring
    allreduce sends 2 (N-1)/N times the gradients' bytes from each rank in each step, while backward
    computes the rest.

    Source: Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour" (2017), and
    for the ring, Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in
    TensorFlow" (2018).
    """


@dataclass(frozen=True)
class ShardedOptimizer(Averaging):
    """Each rank holds the optimizer's state for its part of the parameters, and updates those.

    With N ranks, the mean gradient g, and the set S_w of the parameters that rank w owns:

        x_i, state_i <- U(x_i, state_i, g_i)    on the rank that owns i
        x_i <- the owner's x_i                  on the others

    The update of a parameter is the same arithmetic on the same numbers as in ``Synchronous``, so
    the weights are the same, bit for bit. A rank keeps 1/N of Adam's two moments, and at most the
    moments of one parameter more. It has all mean gradients, so clipping does not change. A rank
    sends 1.5 times the bytes: 2 (N-1)/N P for the gradients and (N-1)/N P for the parameters.

    It suits optimizers that update each parameter from its own gradient and state, as those of
    PyTorch and Keras do.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020), stage 1.
    """

    def owners(self, sizes: Sequence[int], loads: list[int]) -> list[int]:
        """Choose a rank for each parameter: the largest first, each to the rank with the least.

        No rank gets more than the mean and the largest parameter together.

        Args:
            sizes: of the parameters, the same on every rank.
            loads: the sum of the sizes that each rank owns already; the new ones are added.
        """
        owners = [0] * len(sizes)
        for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            owners[i] = loads.index(min(loads))
            loads[owners[i]] += sizes[i]
        return owners


@dataclass(frozen=True)
class FullyShard(Strategy):
    """Each rank holds 1/N of every parameter, of its gradient and of the optimizer's state.

    With N ranks, and rank w's part x_w of the weights x:

        x <- all ranks' x_w, before a layer computes; dropped again after it
        g_w <- rank w's part of the mean gradient
        x_w, state_w <- U(x_w, state_w, g_w)

    The weights are those of ``Synchronous``. PyTorch's ``fully_shard`` does the work, over gloo in
    host memory and NCCL on GPUs, between the ranks that Horovod has. Elements of ``nn.ModuleList``
    and ``nn.Sequential`` are gathered one at a time, the rest of the model together, so the memory
    for whole weights is that of the largest of them. A rank sends 2 (N-1)/N times the weights'
    bytes to gather them, for forward and for backward, and (N-1)/N times for the gradients,
    over gloo twice that.

    Every forward pass needs all ranks, also in evaluation: evaluate equally many batches on each.

    Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (2023);
    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020), stages 3 and 2.

    Args:
        reshard_after_forward: whether weights are dropped after forward and gathered again for
            backward (stage 3). If not, ranks keep them until backward is done (stage 2), which
            takes more memory and saves (N-1)/N times the weights' bytes.
    """

    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, bool):
            raise TypeError(
                f"reshard_after_forward must be True or False, got {self.reshard_after_forward!r}"
            )

    def check(self, compression: Compression | None) -> None:
        if compression is not None:
            raise ValueError(
                f"{self} leaves the collectives to PyTorch, which does not know {compression}: "
                "leave compression out, or use hvkit.ShardedOptimizer()"
            )


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
