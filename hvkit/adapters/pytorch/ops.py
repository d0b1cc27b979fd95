"""The functions on PyTorch tensors that compressions use: ``hvkit.compression.Ops``."""

from __future__ import annotations

import torch
from torch import Tensor


def reshape(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    return x.reshape(shape)


def pad(x: Tensor, zeros: int) -> Tensor:
    return torch.cat([x, x.new_zeros(zeros)]) if zeros else x


def join(*columns: Tensor) -> Tensor:
    return torch.cat(columns, dim=1)


def largest(x: Tensor) -> Tensor:
    return x.abs().amax(1, keepdim=True)


def where(condition: Tensor, x: Tensor, y: Tensor | float) -> Tensor:
    return torch.where(condition, x, y)


def finite(x: Tensor) -> Tensor:
    return torch.isfinite(x)


def rounded(x: Tensor) -> Tensor:
    return torch.round(x)


def cast(x: Tensor, dtype: str) -> Tensor:
    return x.to(getattr(torch, dtype))


def bits(x: Tensor, dtype: str) -> Tensor:
    return x.contiguous().view(getattr(torch, dtype))


def mean_of_rows(x: Tensor) -> Tensor:
    return x.mean(0)
