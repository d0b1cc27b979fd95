"""Computes the fingerprints of PyTorch's tensors (``hvkit.sync.fingerprints``) on their devices.

On a CPU each tensor is read once. A GPU takes few kernels for all tensors together.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch

from hvkit.sync import fingerprints
from hvkit.sync.chunking import runs_of
from hvkit.sync.fingerprints import BLOCK, PRIME, Rows

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def rows_of_gradients(gradients: Sequence[torch.Tensor]) -> list[Rows]:
    """Fingerprints; those of gradients with NaN or infinite values are all zero.

    An allreduce may leave other bits of NaN on each rank.
    """
    found = fingerprints_of(gradients)
    for row in found:
        if not np.isfinite(row[2:].view(np.float64)).all():
            row[:] = 0
    return found


def fingerprints_of(tensors: Sequence[torch.Tensor]) -> list[Rows]:
    """The fingerprints of tensors, computed on their devices and fetched together."""
    on_device: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        on_device.setdefault(tensor.device, []).append(i)
    rows: list[Rows] = [np.empty(0, np.int64)] * len(tensors)
    for device, numbers in on_device.items():
        if device.type == "cpu":
            computed = list(torch.stack([_row(_flat(tensors[i])) for i in numbers]).numpy())
        else:
            computed = []
            for run in runs_of([tensors[i].numel() for i in numbers], _TOGETHER):
                computed += rows_together([_flat(tensors[numbers[at]]) for at in run])
        for i, each in zip(numbers, computed, strict=True):
            rows[i] = each
    return rows


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's numbers in one dimension; a complex one is two."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        coo = tensor.to_sparse_coo().coalesce()  # type: ignore[no-untyped-call]
        tensor = torch.cat([coo.indices().reshape(-1).to(coo.dtype), coo.values().reshape(-1)])
    flat = tensor.reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1)
    return flat


@torch.no_grad()
def _row(flat: torch.Tensor) -> torch.Tensor:
    """What ``hvkit.sync.fingerprints.fingerprint`` is for arrays, for numbers in host memory."""
    words = flat.view(_INTEGERS[flat.element_size()])
    factors, weights = _factors(flat.device)
    bits = torch.zeros((), dtype=torch.int64, device=flat.device)
    sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
    for b, start in enumerate(range(0, flat.numel(), BLOCK)):
        block = words[start : start + BLOCK].to(torch.int64)
        bits = bits * PRIME + (block * factors[: block.numel()]).sum()
        if flat.is_floating_point():
            values = flat[start : start + BLOCK].double()
            projection = (values @ weights[: values.numel()]) * weights[b % BLOCK].sign()
            sums += torch.stack([projection, values @ values])
    return torch.cat([bits.view(1), sums.view(torch.int64)])


# Elements that a GPU hashes at a time, and adds up in one of its blocks.
_TOGETHER, _SEGMENT = 4 * BLOCK, 1 << 13


@torch.no_grad()
def rows_together(flats: Sequence[torch.Tensor]) -> list[Rows]:
    """The fingerprints of one-dimensional tensors on a GPU, which takes few kernels for all.

    A model has hundreds of tensors, and starting a kernel takes the host longer than the GPU needs
    for one of them.
    """
    blocks = [
        (i, b, flat[b * BLOCK : (b + 1) * BLOCK])
        for i, flat in enumerate(flats)
        for b in range(-(-flat.numel() // BLOCK))
    ]
    runs: list[list[tuple[int, int, torch.Tensor]]] = []
    length = 0
    for block in sorted(blocks, key=lambda block: str(block[2].dtype)):  # stable
        length += block[2].numel()
        if not runs or runs[-1][0][2].dtype is not block[2].dtype or length > _TOGETHER:
            runs.append([])
            length = block[2].numel()
        runs[-1].append(block)
    bits = np.zeros(len(flats), np.uint64)
    sums = np.zeros((len(flats), 2))
    sums_of_runs = [_sums_of_blocks([block for *_, block in run]) for run in runs]
    signs = np.sign(fingerprints.projection_factors())
    with np.errstate(all="ignore"):
        for run, of_run in zip(runs, sums_of_runs, strict=True):
            lengths = [-(-block.numel() // _SEGMENT) for *_, block in run]
            starts = np.cumsum([0, *lengths[:-1]])
            low, high, *values = np.add.reduceat(of_run.cpu().numpy(), starts, axis=1)
            hashes = (high.astype(np.int64) << 32) + low.astype(np.int64)
            for n, (i, b, _) in enumerate(run):
                bits[i] = bits[i] * np.uint64(PRIME) + hashes[n].astype(np.uint64)
                if values:
                    sums[i] += values[0][n] * signs[b % BLOCK], values[1][n]
    return [
        fingerprints.row(int(each.astype(np.int64)), *both)
        for each, both in zip(bits, sums, strict=True)
    ]


def _sums_of_blocks(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """What the fingerprints add up, for each segment of some blocks of one dtype.

    Returns:
        float64 of shape (2, segments): the low and high halves of the products of the hash, whose
        sums are exact; of shape (4, segments) for floating point, with the values' sums.
    """
    device, lengths = blocks[0].device, [block.numel() for block in blocks]
    factors, weights = (
        torch.cat([whole[:length] for length in lengths]) for whole in _factors(device)
    )
    segments = [
        min(_SEGMENT, length - start) for length in lengths for start in range(0, length, _SEGMENT)
    ]
    numbers = torch.cat(list(blocks))
    products = numbers.view(_INTEGERS[numbers.element_size()]).to(torch.int64) * factors
    added = [(products & 0xFFFFFFFF).double(), (products >> 32).double()]
    if numbers.is_floating_point():
        values = numbers.double()
        added += [values * weights, values * values]
    ends = torch.tensor(segments, device=device)
    return torch.stack(
        [torch.segment_reduce(each, "sum", lengths=ends, unsafe=True) for each in added]
    )


@functools.cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    factors = torch.from_numpy(fingerprints.multipliers().view(np.int64))
    return factors.to(device), torch.from_numpy(fingerprints.projection_factors()).to(device)


def unit_of(tensor: torch.Tensor) -> float:
    """The distance from 1 to the next number of the dtype; 0 for dtypes that do not round."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.finfo(tensor.dtype).eps
    return 0.0
