"""Functions on PyTorch tensors for compressions: ``hvkit.compression.compression.Ops``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

reshape = torch.reshape
where = torch.where
finite = torch.isfinite
rounded = torch.round
permute = torch.permute
transpose = torch.t


def pad(x: Tensor, zeros: int) -> Tensor:
    return torch.cat([x, x.new_zeros(zeros)]) if zeros else x


def join(*columns: Tensor) -> Tensor:
    return torch.cat(columns, dim=1)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True)


def cast(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype))


def bits(x: Tensor, dtype: str) -> Tensor:
    return x.contiguous().view(getattr(torch, dtype))


def mean_of_rows(x: Tensor) -> Tensor:
    return x.mean(0)


def constant(array: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(array).to(like.device)


def to_numpy(x: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.cpu().numpy()
    return array


def concat(vectors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(vectors))


def split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.split(x, list(sizes)))


def largest_at(x: Tensor, count: int) -> Tensor:
    return x.abs().topk(count, sorted=False).indices.to(torch.int32)


def take(x: Tensor, at: Tensor) -> Tensor:
    return x[at.long()]


def without(x: Tensor, at: Tensor) -> Tensor:
    return x.index_fill(0, at.long(), 0)


def sum_at(length: int, at: Tensor, values: Tensor) -> Tensor:
    return values.new_zeros(length).index_add_(0, at.long(), values)


def orthonormal(x: Tensor) -> Tensor:
    basis: Tensor = torch.linalg.qr(x).Q
    return basis
