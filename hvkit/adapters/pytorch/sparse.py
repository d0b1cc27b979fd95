"""The mean over ranks of row-sparse gradients, as ``torch.nn.Embedding(sparse=True)`` makes them.

The rows that the ranks touched are gathered rather than summed as dense tensors: a table of
millions of rows costs what the few rows of a batch cost.
"""

from __future__ import annotations

from types import ModuleType

import torch

from hvkit.adapters.pytorch.buckets import wire_dtype
from hvkit.adapters.pytorch.compression import from_bits, to_bits
from hvkit.engines import waiting_for_all_ranks


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
