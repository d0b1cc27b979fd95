"""Divides the arguments of a model's call into micro-batches, and joins what they give."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import samples_in
from hvkit.frameworks.stage_division import sizes_of


@dataclass(frozen=True)
class MicroBatch:
    """A part of a batch.

    Attributes:
        args, kwargs: of the model's call.
        samples: how many it has.
    """

    args: Any
    kwargs: Any
    samples: int


class Divider:
    """Divides the calls of one model into micro-batches.

    Every tensor whose first dimension is as long as the batch is divided along it. But an argument
    that has once had another length there, such as a mask, has that length by chance.
    """

    def __init__(self) -> None:
        # The places among the arguments, of those that are the same in each micro-batch.
        self._whole: set[tuple[str, int]] = set()

    def __call__(
        self, args: Any, kwargs: Any, count: int, *, even: bool = False
    ) -> list[MicroBatch]:
        """Micro-batches, of sizes that differ by at most one sample.

        There are fewer if the batch has fewer samples.

        Args:
            args, kwargs: of the call. The first tensor that has dimensions has the batch first.
            count: how many micro-batches.
            even: have the largest number of them, up to ``count``, with equal sizes.
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
    """Whether micro-batches have different numbers of targets that a loss leaves out.

    Then the mean over micro-batches of their mean losses is not that of the batch.

    Args:
        targets: of the whole batch, samples first; those that are no integers do not count.
        sizes: of the micro-batches.
        index: of the targets to leave out; None for all that are negative.
    """
    samples = sum(sizes)
    for t in targets:
        if t.is_floating_point() or t.is_complex() or t.dtype is torch.bool or not t.dim():
            continue
        if not t.numel() or t.shape[0] % samples:
            continue
        out = (t < 0) if index is None else (t == index)
        rows = t.shape[0] // samples
        shares = [
            float(part.double().mean()) for part in torch.split(out, [n * rows for n in sizes])
        ]
        if max(shares) > min(shares):
            return True
    return False


def joined(outputs: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> list[torch.Tensor]:
    """The output tensors of a whole batch from those of its micro-batches.

    Tensors are put together along their first dimension. A single number is taken as a mean over
    samples, such as a loss.

    Args:
        outputs: by micro-batch.
        sizes: by micro-batch, the number of samples.

    Raises:
        ValueError: a tensor has no row for each sample.
    """
    total = sum(sizes)
    found = []
    for column in zip(*outputs, strict=True):
        if column[0].dim():
            for t, size in zip(column, sizes, strict=True):
                if t.shape[0] != size:
                    raise ValueError(
                        f"the model returns a tensor of shape {tuple(t.shape)} for {size} samples: "
                        "in a pipeline every output must have the batch as its first dimension, "
                        "or be a single number"
                    )
            found.append(torch.cat([t.detach() for t in column]))
        elif not column[0].is_floating_point():
            raise ValueError(
                "the model returns a single integer, such as a count, of which micro-batches give "
                "several: return a tensor with an entry for each sample"
            )
        else:
            parts = [t.detach() * (n / total) for t, n in zip(column, sizes, strict=True)]
            found.append(torch.stack(parts).sum(0).to(column[0].dtype))
    return found


def gradients_of_parts(
    gradients: Sequence[torch.Tensor | None], sizes: Sequence[int]
) -> list[list[torch.Tensor | None]]:
    """By micro-batch, the gradients of its outputs from those of the joined ones."""
    total = sum(sizes)
    columns = [
        [None] * len(sizes)
        if g is None
        else list(torch.split(g, list(sizes)))
        if g.dim()
        else [g * (n / total) for n in sizes]
        for g in gradients
    ]
    return [list(row) for row in zip(*columns, strict=True)]
