"""Divides the arguments of a model's call into micro-batches, and joins their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import samples_in
from hvkit.pipeline.stages import sizes_of


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch: the arguments of the model's call, and how many samples they have."""

    args: Any
    kwargs: Any
    samples: int


class Divider:
    """Divides the calls of one model into micro-batches.

    It divides tensors whose first dimension is as long as the batch. An argument that once had
    another length, such as a mask, has this one by chance, and stays whole.
    """

    def __init__(self) -> None:
        # By structure of the call, the numbers of arguments that are the same in each micro-batch.
        self._whole: set[tuple[str, int]] = set()

    def __call__(
        self, args: Any, kwargs: Any, count: int, *, even: bool = False
    ) -> list[MicroBatch]:
        """Micro-batches whose sizes differ by at most one sample; fewer if there are fewer samples.

        ``even`` makes the largest number of micro-batches, up to ``count``, that have equal sizes.
        """
        flat, spec = tree_flatten((args, kwargs))
        samples = samples_in(args, kwargs)
        count = min(count, samples)
        if even:
            count = next(m for m in range(count, 0, -1) if samples % m == 0)
        sizes, call = sizes_of(samples, count), str(spec)
        columns: list[Sequence[Any]] = []
        for i, t in enumerate(flat):
            if isinstance(t, torch.Tensor) and t.dim() and t.shape[0] != samples:
                self._whole.add((call, i))
            of_samples = isinstance(t, torch.Tensor) and t.dim() and (call, i) not in self._whole
            columns.append(torch.split(t, sizes) if of_samples else [t] * count)
        rows = [tree_unflatten([column[i] for column in columns], spec) for i in range(count)]
        return [
            MicroBatch(some, named, size) for (some, named), size in zip(rows, sizes, strict=True)
        ]


def ignored_unevenly(
    targets: Iterable[torch.Tensor], sizes: Sequence[int], index: int | None = None
) -> bool:
    """Whether a loss ignores different fractions of the integer targets of micro-batches.

    Then the mean of their losses is not the loss of the batch. ``index`` None: all negative targets
    are ignored.
    """
    samples = sum(sizes)
    for t in targets:
        is_integer = not (t.is_floating_point() or t.is_complex() or t.dtype is torch.bool)
        if not is_integer or not t.dim() or not t.numel() or t.shape[0] % samples:
            continue
        ignored = (t < 0) if index is None else (t == index)
        rows = t.shape[0] // samples
        parts = torch.split(ignored, [n * rows for n in sizes])
        if len({float(part.double().mean()) for part in parts}) > 1:
            return True
    return False


def rows_in(
    outputs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], side_outputs: int = 0
) -> list[int]:
    """By output tensor, how many rows of it each sample has; 0 for numbers without samples.

    The last ``side_outputs`` tensors may have any shape.
    """
    columns = list(zip(*outputs, strict=True))
    returned = len(columns) - side_outputs
    return [_rows_of(column, sizes, side_output=i >= returned) for i, column in enumerate(columns)]


def _rows_of(column: Sequence[torch.Tensor], sizes: Sequence[int], *, side_output: bool) -> int:
    rows = column[0].shape[0] // sizes[0] if column[0].dim() else 0
    if len(sizes) == 1:  # it is the whole
        return rows
    if rows and all(t.shape[0] == rows * n for t, n in zip(column, sizes, strict=True)):
        return rows
    if any(t.shape != column[0].shape for t in column) and side_output:
        raise ValueError(
            f"the model keeps tensors of shapes {[tuple(t.shape) for t in column]} for "
            f"micro-batches of {list(sizes)} samples, without the batch as their first dimension: "
            "keep them with it, or pass microbatches=1"
        )
    if column[0].dim() and not side_output:
        raise ValueError(
            f"the model returns a tensor of shape {tuple(column[0].shape)} for {sizes[0]} samples: "
            "in a pipeline every output must have the batch as its first dimension, "
            "or be a single number"
        )
    if not column[0].is_floating_point() and not side_output:
        raise ValueError(
            "the model returns a single integer, such as a count, of which micro-batches give "
            "several: return a tensor with an entry for each sample"
        )
    return 0


def joined(
    outputs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int], rows: Sequence[int]
) -> list[torch.Tensor]:
    """The output tensors of a whole batch from those of its micro-batches.

    Tensors with rows for each sample are concatenated. Other floats are means over samples, such as
    a loss, and integers are counts.
    """
    total = sum(sizes)
    found = []
    for column, each in zip(zip(*outputs, strict=True), rows, strict=True):
        parts = [t.detach() for t in column]
        if len(parts) > 1 and not each:
            if parts[0].is_floating_point():
                parts = [t * (n / total) for t, n in zip(parts, sizes, strict=True)]
            parts = [torch.stack(parts).sum(0).to(parts[0].dtype)]
        found.append(torch.cat(parts) if len(parts) > 1 else parts[0])
    return found


def gradients_of_parts(
    gradients: Sequence[torch.Tensor | None], sizes: Sequence[int], rows: Sequence[int]
) -> list[list[torch.Tensor | None]]:
    """By micro-batch, the gradients of its outputs from those of the joined outputs."""
    total = sum(sizes)
    columns = [
        [None] * len(sizes)
        if g is None
        else [g]
        if len(sizes) == 1
        else list(torch.split(g, [n * each for n in sizes]))
        if each
        else [g * (n / total) for n in sizes]
        for g, each in zip(gradients, rows, strict=True)
    ]
    return [list(row) for row in zip(*columns, strict=True)]
