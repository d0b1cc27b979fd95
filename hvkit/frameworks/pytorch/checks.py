"""Checks while training: that all ranks hold the same weights, and that they do different work.

Before the first update, after 1, 2, 4, 8, ... steps or every ``check_every``, the ranks exchange
fingerprints in one small message beside the gradients, where they wait for each other anyway.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.communication.group import Group
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.divided_state.sharded import is_sharded
from hvkit.frameworks.pytorch.refusals import processes_of_torch_distributed, two_at_once
from hvkit.sync import fingerprints
from hvkit.sync.buffers import warn_of_unlike
from hvkit.sync.chunking import runs_of
from hvkit.sync.fingerprints import BLOCK, PRIME, WIDTH, Compared, Rows
from hvkit.watch.rank_errors import mark_as_shown_by

_CHANGED = (
    "the script changed it after backward() had averaged it, differently on each rank: call "
    "hvkit.reduce_gradients(model) after the change and before step(), or make the same change on "
    "every rank (random numbers from a torch.Generator with the same seed everywhere)"
)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checks:
    """Compares the ranks while they train one model.

    Args:
        names: the parameters by name.
        optimizers: the ranks compare their state before the first update.
        every: optimizer steps from one comparison of weights to the next; None after 1, 2, 4, ...
        name: the same on every rank, and no other model's.
        learnt: returns fingerprints of what forward passes learn, of which ranks are warned.
        group: the ranks that train it.
    """

    def __init__(
        self,
        names: Mapping[str, torch.Tensor],
        optimizers: Sequence[Optimizer],
        every: int | None,
        name: str,
        learnt: Callable[[], tuple[list[Compared], list[Rows]]],
        group: Group,
    ) -> None:
        self.group = group
        self._wire = Wire("checks", group)
        self._name = name
        self._every = every
        self._labels = {parameter: f"parameter {name}" for name, parameter in names.items()}
        self._optimizers = list(optimizers)
        self._learnt = learnt
        self._next = 0
        self._looked_at_gradients = False
        self._compared: list[Compared] = []
        self._handle: int | None = None

    def label(self, number: int, parameter: torch.Tensor) -> str:
        """The name of a parameter in error messages."""
        return _label(self._labels, number, parameter)

    def require_same(
        self, point: str, note: str, held: Sequence[tuple[int, nn.Parameter, torch.Tensor]]
    ) -> bool:
        """Raise on every rank unless all ranks hold the same tensors, up to rounding; a collective.

        Args:
            point: the name of the call that the user made.
            note: for the error message, after the name of a parameter.
            held: the numbers of parameters, these, and what to compare in their place.

        Returns:
            Whether they hold the same bit for bit.
        """
        compared = [Compared(f"{self.label(i, p)}{note}", _unit(p)) for i, p, _ in held]
        return fingerprints.require_same(
            point, compared, fingerprints_of([tensor for *_, tensor in held]), self.group
        )

    def require_same_gradients(
        self, used: Mapping[int, Rows], parameters: Sequence[nn.Parameter]
    ) -> None:
        """Raise on every rank unless all ranks' steps used the same gradients; a collective.

        Args:
            used: results of ``rows_of_gradients``, by the parameter's number.
            parameters: all averaged ones.

        Raises:
            RanksDisagreeError: names the first gradient that differs by more than rounding.
        """
        numbers = sorted(used)
        labels = [f"the gradient of {self.label(i, p)}" for i, p in enumerate(parameters)]
        everyone = collectives.gather("backward()", numbers, self.group)
        if unlike := fingerprints.first_unlike(everyone, self.group):
            i, has, lacks = unlike
            text = f"{labels[i]} is None on rank {lacks}, but not on rank {has}; {_CHANGED}"
            raise mark_as_shown_by(RanksDisagreeError(text), self.group.first)
        compared = [Compared(labels[i], _unit(parameters[i]), _CHANGED) for i in numbers]
        fingerprints.require_same("backward()", compared, [used[i] for i in numbers], self.group)

    def send(self, steps: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Start a comparison if one is due; call before this rank's gradients become means.

        Args:
            steps: optimizer steps done so far, the same number on every rank.
            parameters: all averaged ones, with this rank's own gradients.
        """
        due = steps >= self._next
        if self._looked_at_gradients and not due:
            return
        self._compared, rows = _of_parameters(parameters, self._labels)
        for entry in (each for o in self._optimizers for each in _of_optimizer(o)):
            self._compared.append(Compared(entry.heading))
            rows.append(entry.in_one_row())
        gradients = fingerprints_of([p.grad for p in parameters if p.grad is not None])
        head = [*fingerprints.of_gradients(gradients), processes_of_torch_distributed()]
        learnt = fingerprints.hashed(repr([row.tolist() for row in self._learnt()[1]]))
        mine = torch.from_numpy(np.stack([head, learnt, *rows]))
        self._handle = self._wire.start_gather(mine, f"{self._name}.check")

    def receive(self, steps: int) -> None:
        """Finish the comparison that ``send`` has started; call before using the means.

        Raises:
            RanksDisagreeError: the ranks hold different weights, or another library started
                ``torch.distributed`` on some.
        """
        if self._handle is None:
            return
        gathered = self._wire.wait(self._handle)
        self._handle = None
        everyone = gathered.numpy().reshape(self._wire.size, -1, WIDTH)
        heads, learnt, rows = everyone[:, 0], everyone[:, 1], everyone[:, 2:]
        if (processes := int(heads[:, 2].max())) > 1:
            raise mark_as_shown_by(RanksDisagreeError(two_at_once(processes)), self.group.first)
        if text := fingerprints.judge(rows, self._compared, exact=steps == 0, group=self.group):
            raise mark_as_shown_by(RanksDisagreeError(text), self.group.first)
        if not self._looked_at_gradients:
            self._looked_at_gradients = fingerprints.warn_of_equal_work(heads[:, :2], self.group)
        if (learnt[:, 0] != learnt[0, 0]).any():
            warn_of_unlike("backward()", *self._learnt(), self.group)
        self._optimizers = []
        self._next = steps + (self._every or max(1, steps))


def compared_in(
    thing: Any, is_averaged: Callable[[torch.Tensor], bool]
) -> tuple[list[Compared], list[Rows]]:
    """The parts of a model or optimizer that must be equal on all ranks, and fingerprints.

    Args:
        thing: any object; of objects that are neither, nothing is compared.
        is_averaged: whether a distributed model has the parameter; others are not compared.
    """
    if isinstance(thing, nn.Module):
        labels: dict[torch.Tensor, str] = {
            p: f"parameter {name}" for name, p in thing.named_parameters()
        }
        return _of_parameters([p for p in labels if is_averaged(p)], labels)
    if isinstance(thing, Optimizer) and any(
        is_averaged(p) for group in thing.param_groups for p in group["params"]
    ):
        entries = _of_optimizer(thing)
        held = [(c, r) for e in entries for c, r in zip(e.compared, e.rows, strict=True)]
        return [c for c, _ in held], [r for _, r in held]
    return [], []


def _of_parameters(
    parameters: Iterable[torch.Tensor], labels: Mapping[torch.Tensor, str]
) -> tuple[list[Compared], list[Rows]]:
    held = list(parameters)
    compared = [Compared(_label(labels, i, p), _unit(p)) for i, p in enumerate(held)]
    return compared, fingerprints_of(held)


def _label(labels: Mapping[torch.Tensor, str], number: int, parameter: torch.Tensor) -> str:
    return labels.get(parameter) or f"parameter {number} of shape {tuple(parameter.shape)}"


class _Entry(NamedTuple):
    """Numbers that an optimizer keeps under one heading."""

    heading: str
    compared: list[Compared]
    rows: list[Rows]

    def in_one_row(self) -> Rows:
        """One row for the entry: before the first update, ranks may hold different numbers."""
        return fingerprints.hashed(repr((self.compared, np.array(self.rows).tolist())))


def _of_optimizer(optimizer: Optimizer) -> list[_Entry]:
    """The options and the state of an optimizer, in order."""
    kind = type(optimizer).__name__
    groups = [
        _entry(
            f"parameter group {g} of {kind}",
            {key: value for key, value in group.items() if key in optimizer.defaults},
        )
        for g, group in enumerate(optimizer.param_groups)
    ]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [
        _entry(f"the state of {kind} for its parameter {i}", optimizer.state.get(p, {}))
        for i, p in enumerate([] if is_sharded(optimizer) else parameters)
    ]
    return groups + states


def _entry(heading: str, values: Mapping[str, Any]) -> _Entry:
    """An entry for tensors and numbers, and lists of them; other values are not compared."""
    tensors: list[tuple[str, torch.Tensor]] = []
    numbers: list[tuple[str, float]] = []
    for key in sorted(values, key=str):
        value = values[key]
        for each in value if isinstance(value, list | tuple) else [value]:
            if type(each) in (torch.Tensor, torch.nn.Parameter):
                tensors.append((key, each))
            elif isinstance(each, int | float):
                numbers.append((key, float(each)))
    compared = [Compared(f"{key} in {heading}", _unit(tensor)) for key, tensor in tensors]
    compared += [Compared(f"{key} in {heading}") for key, _ in numbers]
    rows = fingerprints_of([tensor for _, tensor in tensors])
    rows += [fingerprints.fingerprint(np.array(number)) for _, number in numbers]
    return _Entry(heading, compared, rows)


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
    signs = np.sign(fingerprints.weights())
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
    return factors.to(device), torch.from_numpy(fingerprints.weights()).to(device)


def _unit(tensor: torch.Tensor) -> float:
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.finfo(tensor.dtype).eps
    return 0.0
