"""Computes the fingerprints of PyTorch's tensors (``hvkit.sync.fingerprints``) on their devices.

On a CPU each tensor is read once. A GPU takes few kernels for all tensors together, as for those
that a model or an optimizer holds.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.divided_state.sharded import is_sharded
from hvkit.frameworks.pytorch.optimizers import parameters_of
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import BLOCK, PRIME, Compared, Rows

Fingerprints = tuple[list[Compared], list[Rows]]
"""Names of tensors or numbers, and a fingerprint of each."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compared_in(thing: Any, is_averaged: Callable[[torch.Tensor], bool]) -> Fingerprints:
    """What must be equal on all ranks in a model or optimizer, and fingerprints; else nothing."""
    if isinstance(thing, nn.Module):
        labels: dict[torch.Tensor, str] = {
            p: f"parameter {name}" for name, p in thing.named_parameters()
        }
        return of_parameters([p for p in labels if is_averaged(p)], labels)
    if isinstance(thing, Optimizer) and any(map(is_averaged, parameters_of(thing))):
        entries = of_optimizer(thing).values()
        return [c for of, _ in entries for c in of], [row for _, rows in entries for row in rows]
    return [], []


def of_parameters(
    parameters: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]
) -> Fingerprints:
    tensors = list(parameters)
    compared = [Compared(label_of(labels, i, p), unit_of(p)) for i, p in enumerate(tensors)]
    return compared, fingerprints_of(tensors)


def label_of(labels: Mapping[torch.Tensor, str], number: int, parameter: torch.Tensor) -> str:
    return labels.get(parameter) or f"parameter {number} of shape {tuple(parameter.shape)}"


def of_optimizer(optimizer: Optimizer) -> dict[str, Fingerprints]:
    """The numbers that an optimizer keeps, by heading."""
    cls = type(optimizer).__name__
    values: dict[str, Mapping[str, Any]] = {
        f"parameter group {g} of {cls}": {k: v for k, v in group.items() if k in optimizer.defaults}
        for g, group in enumerate(optimizer.param_groups)
    }
    if not is_sharded(optimizer):
        for i, p in enumerate(parameters_of(optimizer)):
            values[f"the state of {cls} for its parameter {i}"] = optimizer.state.get(p, {})
    return {heading: _entry(heading, each) for heading, each in values.items()}


def _entry(heading: str, values: Mapping[str, Any]) -> Fingerprints:
    """For tensors and numbers, and lists of them; other values are not compared."""
    in_order = [(key, values[key]) for key in sorted(values, key=str)]
    lists = [(key, v if isinstance(v, list | tuple) else [v]) for key, v in in_order]
    found = [(key, each) for key, several in lists for each in several]
    tensors = [(key, v) for key, v in found if type(v) in (torch.Tensor, nn.Parameter)]
    numbers = [(key, float(v)) for key, v in found if isinstance(v, int | float)]
    compared = [Compared(f"{key} in {heading}", unit_of(tensor)) for key, tensor in tensors]
    compared += [Compared(f"{key} in {heading}") for key, _ in numbers]
    rows = fingerprints_of([tensor for _, tensor in tensors])
    rows += [fingerprints.fingerprint(np.array(number)) for _, number in numbers]
    return compared, rows


def rows_of_gradients(gradients: Sequence[torch.Tensor]) -> list[Rows]:
    """Fingerprints; all zero for gradients with NaN, of which an allreduce may leave other bits."""
    found = fingerprints_of(gradients)
    for row in found:
        if not np.isfinite(row[2:].view(np.float64)).all():
            row[:] = 0
    return found


def fingerprints_of(tensors: Sequence[torch.Tensor]) -> list[Rows]:
    """Computed on the tensors' devices, and fetched together."""
    on_device: dict[torch.device, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        on_device[tensor.device].append(i)
    rows: list[Rows] = [np.empty(0, np.int64)] * len(tensors)
    for device, numbers in on_device.items():
        flats = (_flat(tensors[i]) for i in numbers)
        if device.type == "cpu":
            computed = list(torch.stack([_row(flat) for flat in flats]).numpy())
        else:
            computed = rows_together(flats, len(numbers))
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
    """As ``hvkit.sync.fingerprints.fingerprint``, for a tensor in host memory."""
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


# Elements that a GPU hashes at a time, and in one row of a sum.
_TOGETHER, _SEGMENT = 4 * BLOCK, 1 << 10


@torch.no_grad()
def rows_together(flats: Iterable[torch.Tensor], count: int) -> list[Rows]:
    """The fingerprints of vectors on a GPU, which takes few kernels for all, and one wait.

    Starting a kernel takes the host longer than the GPU needs for one of a model's hundreds of
    tensors.
    """
    bits, values = np.zeros(count, np.int64), np.zeros((count, 2))
    positions, sums = [], []
    for blocks in _blocks_together(flats):
        positions += [(i, b, _segments(block)) for i, b, block in blocks]
        sums.append(_sums_of_segments([block for *_, block in blocks]))
        blocks.clear()  # before the next ones are made
    if sums:
        of_segments = torch.cat(sums, dim=1).cpu().numpy()
        starts = np.cumsum([0, *(number for *_, number in positions[:-1])])
        with np.errstate(all="ignore"):
            hashes = np.add.reduceat(of_segments[0].view(np.int64), starts)
            added = np.add.reduceat(of_segments[1:], starts, axis=1)
            signs = np.sign(fingerprints.projection_factors())
            for (i, b, _), of_block, (projection, square) in zip(
                positions, hashes, added.T, strict=True
            ):
                bits[i] = bits[i] * PRIME + of_block
                values[i] += projection * signs[b % BLOCK], square
    return [fingerprints.row(int(n), *both) for n, both in zip(bits, values, strict=True)]


def _blocks_together(
    flats: Iterable[torch.Tensor],
) -> Iterator[list[tuple[int, int, torch.Tensor]]]:
    """Lists of blocks of one dtype: the tensor, which of its blocks it is, and its numbers."""
    waiting: dict[torch.dtype, list[tuple[int, int, torch.Tensor]]] = defaultdict(list)
    segments: Counter[torch.dtype] = Counter()
    for i, flat in enumerate(flats):
        for b, block in enumerate(torch.split(flat, BLOCK) if flat.numel() else ()):
            segments[flat.dtype] += _segments(block)
            if waiting[flat.dtype] and segments[flat.dtype] * _SEGMENT > _TOGETHER:
                yield waiting.pop(flat.dtype)
                segments[flat.dtype] = _segments(block)
            waiting[flat.dtype].append((i, b, block))
    yield from waiting.values()


def _segments(block: torch.Tensor) -> int:
    return -(-block.numel() // _SEGMENT)


def _sums_of_segments(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sums for fingerprints, of each segment of some blocks of one dtype.

    float64 of shape (3, segments): the bits of the hash's int64, the projection's and the squares',
    which are zero for integers.
    """
    device, lengths = blocks[0].device, [block.numel() for block in blocks]
    ends = [blocks[0].new_zeros(-length % _SEGMENT) for length in lengths]
    numbers = torch.cat([each for pair in zip(blocks, ends, strict=True) for each in pair])
    padded = [length + -length % _SEGMENT for length in lengths]
    factors, weights = (
        torch.cat([whole[:length] for length in padded]) for whole in _factors(device)
    )
    products = numbers.view(_INTEGERS[numbers.element_size()]).to(torch.int64) * factors
    hashes = products.view(-1, _SEGMENT).sum(1).view(torch.float64)
    if not numbers.is_floating_point():
        return torch.stack([hashes, torch.zeros_like(hashes), torch.zeros_like(hashes)])
    values = numbers.double()
    added = [each.view(-1, _SEGMENT).sum(1) for each in (values * weights, values * values)]
    return torch.stack([hashes, *added])


@functools.cache
def _factors(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    factors = torch.from_numpy(fingerprints.multipliers().view(np.int64))
    return factors.to(device), torch.from_numpy(fingerprints.projection_factors()).to(device)


def unit_of(tensor: torch.Tensor) -> float:
    """The distance from 1 to the next number of the dtype; 0 for dtypes that do not round."""
    rounds = tensor.is_floating_point() or tensor.is_complex()
    return torch.finfo(tensor.dtype).eps if rounds else 0.0
