"""Averages row-sparse gradients over ranks by gathering their rows.

The gradients of ``torch.nn.Embedding(sparse=True)`` have values in few rows. Ranks gather the rows
that they touched instead of summing dense tensors: a table of millions of rows costs as much as the
rows of a batch.
"""

from __future__ import annotations

import torch

from hvkit.compression import Compression, for_rows
from hvkit.frameworks.pytorch.collectives import ops
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.buckets import wire_dtype


def average_rows(
    gradient: torch.Tensor | None,
    parameter: torch.Tensor,
    name: str,
    wire: Wire,
    compression: Compression | None = None,
) -> torch.Tensor:
    """Average a gradient that is sparse in its first dimension over ranks; a collective.

    Args:
        gradient: sparse or dense tensor of the parameter's shape; None counts as zero.
        parameter: of shape (rows, ...).
        name: the same on every rank, and no other parameter's.
        wire: counts the bytes.
        compression: one that rounds value by value is used for float32 values; others are not.

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
    rounding = for_rows(compression) if values.dtype is torch.float32 else None
    sent = rounding.encode(values.view(-1), ops).view_as(values) if rounding else values
    handles = [
        wire.start_gather(rows, f"{name}.rows"),
        wire.start_gather(sent, f"{name}.values"),
    ]
    all_rows, all_values = (wire.wait(handle) for handle in handles)
    if rounding:
        all_values = rounding.decode(all_values.view(-1, 1), ops).view_as(all_values)
    # Not check_invariants=False, of which PyTorch 2.11 warns all the same.
    unchecked = torch.sparse.check_sparse_tensor_invariants(False)  # type: ignore[no-untyped-call]
    with unchecked:
        mean = torch.sparse_coo_tensor(all_rows[None], all_values / wire.size, parameter.shape)
        return mean.coalesce().to(parameter.dtype)
