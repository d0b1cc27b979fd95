"""How gradients travel between ranks: many dense ones in one allreduce, row-sparse ones by row.

A bucket holds the gradients of some parameters, one after the other, in one contiguous tensor that
Horovod reduces in place. Buckets hold copies: a parameter's own gradient changes only when the mean
is there. A rank can therefore send zeros for a gradient that it did not compute, half-precision
gradients can travel in float32, and any memory layout is fine.

The gradients of ``torch.nn.Embedding(sparse=True)`` have values in few rows. Ranks gather the rows
that they touched instead of summing dense tensors: a table of millions of rows costs as much as the
rows of a batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from hvkit.adapters.gradient_chunks import chunks
from hvkit.adapters.pytorch import ops
from hvkit.adapters.pytorch.wire import Wire
from hvkit.compression import Compression, for_rows
from hvkit.compression.compression import Reduction, Shape, State
from hvkit.exchanges import Exchange

# Horovod's allreduce has no bfloat16, and a sum in float16 may overflow although the mean fits.
_WIRE_DTYPE = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}

# What decides which parameters share a bucket: of each its dtype, device, whether it requires a
# gradient, and whether its gradient is row-sparse.
_Layout = tuple[tuple[torch.dtype, torch.device, bool, bool], ...]
_LAYOUTS_KEPT = 4


class BucketSet:
    """The buckets of one model, laid out again when its parameters change.

    Args:
        name: the same on every rank, and no other set's.
        compression: how float32 gradients travel; None for as they are.

    Attributes:
        all: the buckets of the current layout, in the order in which backward fills them.
        of: the bucket of each parameter that is in one, by the parameter's number.
    """

    def __init__(self, name: str, compression: CompressionState | None = None) -> None:
        self.all: list[Bucket] = []
        self.of: dict[int, Bucket] = {}
        self._name = name
        self._compression = compression
        self._layout: _Layout | None = None
        self._layouts: dict[_Layout, list[Bucket]] = {}
        self._layouts_made = itertools.count()

    @property
    def last(self) -> Bucket:
        """The bucket with the extra numbers; every rank sends it, whatever its layout."""
        return self.all[-1]

    def arrange(
        self, parameters: Sequence[torch.nn.Parameter], sparse: set[int], extra: int
    ) -> None:
        """Lay the buckets out again if the parameters changed and no bucket is on its way.

        Args:
            parameters: all parameters, in the same order on every rank.
            sparse: numbers of those whose gradients are row-sparse and travel by row.
            extra: how many numbers to append to the last bucket.
        """
        layout = tuple(
            (p.dtype, p.device, p.requires_grad, i in sparse) for i, p in enumerate(parameters)
        )
        if layout == self._layout or any(bucket.handle is not None for bucket in self.all):
            return
        if layout not in self._layouts:
            # GANs freeze and thaw parameters in every step, which comes back to few layouts.
            while len(self._layouts) >= _LAYOUTS_KEPT:
                del self._layouts[next(iter(self._layouts))]
            self._layouts[layout] = self._new_buckets(parameters, sparse, extra)
        self._layout = layout
        self.all = self._layouts[layout]
        self.of = {i: bucket for bucket in self.all for i in bucket.members}

    def _new_buckets(
        self, parameters: Sequence[torch.nn.Parameter], sparse: set[int], extra: int
    ) -> list[Bucket]:
        dense: list[tuple[int, torch.Tensor]] = [
            (i, p) for i, p in enumerate(parameters) if p.requires_grad and i not in sparse
        ]
        if not dense:  # the extra numbers still need a bucket
            dense = [(-1, torch.zeros(1, device=parameters[0].device))]
        name = f"{self._name}.{next(self._layouts_made)}"
        # The last bucket has one name in all layouts, for ranks whose layouts differ.
        return make_buckets(name, f"{self._name}.last", dense, extra, self._compression)


class Bucket:
    """The gradients of a few parameters with one wire dtype on one device.

    Args:
        name: the same on every rank, and no other bucket's.
        members: numbers and parameters, at least one.
        extra: how many numbers to append; the caller fills them in through ``extra``.
    """

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], extra: int = 0
    ) -> None:
        self.name = name
        first = members[0][1]
        lengths = [p.numel() * (2 if p.is_complex() else 1) for _, p in members]
        self.flat = torch.zeros(
            sum(lengths) + extra, dtype=wire_dtype(first.dtype), device=first.device
        )
        pieces = torch.split(self.flat, [*lengths, extra])
        # Real ones: a view of complex numbers cannot begin at an odd place.
        self._views = {
            i: piece.view(shape_of(p)) for (i, p), piece in zip(members, pieces[:-1], strict=True)
        }
        self.extra = pieces[-1]
        self.packed: set[int] = set()
        self.handle: int | None = None

    def pack(self, i: int, gradient: torch.Tensor | None) -> None:
        """Copy parameter ``i``'s gradient in; None counts as zero."""
        if gradient is None:
            self._views[i].zero_()
        else:
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient.resolve_conj())
            self._views[i].copy_(gradient)
        self.packed.add(i)

    @property
    def members(self) -> Set[int]:
        """The numbers of its parameters."""
        return self._views.keys()

    def mean(self, i: int, parameter: torch.Tensor) -> torch.Tensor:
        """What parameter ``i`` gets, in the parameter's shape."""
        view = self._views[i]
        return torch.complex(*view.unbind(-1)) if parameter.is_complex() else view

    @property
    def full(self) -> bool:
        """Whether every member has been packed since the last ``reset``."""
        return len(self.packed) == len(self._views)

    def launch(self, wire: Wire) -> None:
        """Start averaging over ranks; returns at once."""
        self.handle = wire.start_mean(self.flat, self.name)

    def exchange(self, wire: Wire) -> None:
        """Start the second collective of buckets that need two; call after ``launch``."""

    def wait(self, wire: Wire) -> None:
        """Wait for the mean; call after ``exchange``."""
        assert self.handle is not None
        wire.wait(self.handle)
        self.handle = None

    def reset(self) -> None:
        """Begin the next reduction."""
        self.packed.clear()


def shape_of(parameter: torch.Tensor) -> Shape:
    """The shape of its numbers; a complex one is two."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def like(parameter: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Numbers, as many as in ``shape_of``, in the parameter's shape."""
    numbers = numbers.view(shape_of(parameter))
    return torch.complex(*numbers.unbind(-1)) if parameter.is_complex() else numbers


class CompressionState:
    """What a compression keeps of each parameter.

    Args:
        compression: how float32 gradients or weights travel.
    """

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        # By the parameter's number: what counts, and what will once an update has used the means.
        self.kept: dict[int, dict[str, torch.Tensor]] = {}
        self.pending: dict[int, dict[str, torch.Tensor]] = {}

    def suits(self, dtype: torch.dtype) -> bool:
        """Whether vectors of this dtype travel so.

        Raises:
            ValueError: they cannot, and must not travel otherwise.
        """
        suits = dtype is torch.float32 or not self.compression.float32_only
        if not suits and self.compression.exclusive:
            raise ValueError(
                f"{self.compression} is for parameters of at most 32 bits, got {dtype}: use "
                "model.float(), or hvkit.Synchronous()"
            )
        return suits

    def of(self, numbers: Sequence[int], shapes: Sequence[Shape], like: torch.Tensor) -> State:
        """The state of some parameters, new ones included."""
        for i, shape in zip(numbers, shapes, strict=True):
            if i not in self.kept:
                self.kept[i] = {
                    name: ops.constant(array, like)
                    for name, array in self.compression.begin(shape).items()
                }
        names = self.kept[numbers[0]].keys()
        return {name: [self.kept[i][name] for i in numbers] for name in names}

    def suggest(self, numbers: Sequence[int], state: State) -> None:
        """Take over a new state, for when an update has used the means."""
        for at, i in enumerate(numbers):
            self.pending[i] = {name: values[at] for name, values in state.items()}

    def arrays(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        """What is kept under these names, for a checkpoint: by name and parameter."""
        return {
            f"{name}.{i}": state[name].cpu().numpy()
            for i, state in self.kept.items()
            for name in names
        }

    def load(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], parameters: Sequence[torch.Tensor]
    ) -> None:
        """Set what ``arrays`` returned."""
        for key, array in arrays.items():
            name, _, number = key.partition(".")
            p = parameters[int(number)]
            begun = self.of([int(number)], [shape_of(p)], p)
            begun[name][0].copy_(torch.from_numpy(array))

    def commit(self, used: Container[int]) -> None:
        """Keep the new state of the parameters that an update has used."""
        self.kept.update({i: state for i, state in self.pending.items() if i in used})
        self.pending.clear()


class CompressedBucket(Bucket):
    """A bucket of float32 gradients that travel compressed.

    Args:
        name: the same on every rank, and no other bucket's.
        members: numbers and parameters, at least one.
        state: of the compression, for all buckets of a model.
    """

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], state: CompressionState
    ) -> None:
        super().__init__(name, members)
        self._state = state
        self._numbers = [i for i, _ in members]
        self._shapes = [shape_of(p) for _, p in members]
        self._flow: Reduction
        self._exchanges = 0

    def launch(self, wire: Wire) -> None:
        held = self._state.of(self._numbers, self._shapes, self.flat)
        reduce = self._state.compression.reduce
        self._flow = reduce(self.flat, self._shapes, held, ops, wire)
        self._exchanges = 0
        self._start(next(self._flow), wire)

    def exchange(self, wire: Wire) -> None:
        assert self.handle is not None
        result, self.handle = wire.wait(self.handle), None
        try:
            following = self._flow.send(result)
        except StopIteration as end:
            mean, state = end.value
            self.flat.copy_(mean)
            self._state.suggest(self._numbers, state)
        else:
            self._start(following, wire)

    def wait(self, wire: Wire) -> None:
        while self.handle is not None:
            self.exchange(wire)

    def _start(self, exchange: Exchange, wire: Wire) -> None:
        name = f"{self.name}.{self._exchanges}"
        self._exchanges += 1
        self.handle = wire.start(exchange, name)


def make_buckets(
    name: str,
    last_name: str,
    members: Iterable[tuple[int, torch.Tensor]],
    extra: int,
    compression: CompressionState | None = None,
) -> list[Bucket]:
    """Make the buckets for some parameters.

    Args:
        name: what the buckets' names begin with.
        last_name: the name of the last bucket.
        members: numbers and parameters, at least one.
        extra: how many numbers to append to the last bucket.
        compression: of float32 gradients. The last bucket then has the extra numbers alone, in
            full precision.
    """
    spread = _spread(members)
    if compression is None:
        first = [Bucket(f"{name}.{b}", run) for b, run in enumerate(spread[:-1])]
        return [*first, Bucket(last_name, spread[-1], extra)]
    device = spread[-1][-1][1].device
    buckets = [
        CompressedBucket(f"{name}.{b}", run, compression)
        if compression.suits(wire_dtype(run[0][1].dtype))
        else Bucket(f"{name}.{b}", run)
        for b, run in enumerate(spread)
    ]
    # No parameter has the number -1.
    return [*buckets, Bucket(last_name, [(-1, torch.zeros(1, device=device))], extra)]


def _spread(members: Iterable[tuple[int, torch.Tensor]]) -> list[list[tuple[int, torch.Tensor]]]:
    """Divide numbered parameters into runs, one for each bucket.

    Backward reaches the parameters that were registered last first, so the runs begin there.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, torch.Tensor]]] = {}
    for i, p in reversed(list(members)):
        kinds.setdefault((wire_dtype(p.dtype), p.device), []).append((i, p))
    return [
        [group[position] for position in run]
        for group in kinds.values()
        for run in chunks([p.numel() * p.element_size() for _, p in group])
    ]


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of ``dtype`` travel and are summed."""
    return _WIRE_DTYPE.get(dtype, dtype)


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
    mean = torch.sparse_coo_tensor(
        all_rows[None], all_values / wire.size, parameter.shape, check_invariants=False
    )
    return mean.coalesce().to(parameter.dtype)
