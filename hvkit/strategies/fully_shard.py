"""Weights, gradients and the optimizer's state divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hvkit.compression import Compression
from hvkit.strategies.strategy import Strategy


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
