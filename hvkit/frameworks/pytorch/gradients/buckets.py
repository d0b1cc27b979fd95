"""Buckets: tensors that carry many gradients in one allreduce.

A bucket holds the gradients of some parameters, one after the other, in one contiguous tensor that
Horovod reduces in place. One call copies them in once the last is ready. Once the mean has arrived,
the parameters' ``grad`` become views of the bucket: nothing is copied back, and the memory of the
rank's own gradients is freed. A parameter in the memory format channels_last has its numbers in
that order in the bucket, too; the report on each step shows whether ranks have the same formats.

Some gradients are copied back instead: in float16 and bfloat16, which travel in float32; of
parameters that are complex or not dense; and gradients that the script created itself or still
references, such as slices of a flat tensor. If a script keeps a mean for later, its bucket gets new
memory.

Gradients of few rows, as of ``torch.nn.Embedding(sparse=True)``, are in no bucket: ranks gather the
rows that they touched (``average_rows``). So a table of millions of rows costs as much as the rows
of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from operator import gt
from sys import getrefcount
from typing import Any, NamedTuple

import torch

from hvkit.compression import Compression, for_rows
from hvkit.compression.compression import Shape
from hvkit.frameworks.pytorch import ops
from hvkit.frameworks.pytorch.gradients.gradient_lists import lists
from hvkit.frameworks.pytorch.wire import Wire, real_shape, wire_dtype

# Bytes of gradients that are worth a call each, which copies and scales in one pass.
_LARGE = 1 << 17

NO_PARAMETER = -1
"""The index of the only member of a bucket that carries nothing but extra numbers."""


class _Memory:
    """The memory of a bucket: of the members' gradients and the extra numbers."""

    def __init__(
        self,
        lengths: list[int],
        shapes: Sequence[Shape],
        strides: Mapping[int, Shape],
        like: torch.Tensor,
    ) -> None:
        self.flat = like.new_zeros(sum(lengths))  # one after the other
        pieces = torch.split(self.flat, lengths)
        # Views of real numbers: a view of complex numbers cannot begin at an odd offset.
        self.views = [
            piece.as_strided(shape, strides[at], piece.storage_offset())
            if at in strides
            else piece.view(shape)
            for at, (piece, shape) in enumerate(zip(pieces, shapes, strict=False))
        ]
        # Tensors with the same memory, which parameters get. Not views to autograd, which refuses
        # to detach views or change them in place.
        self.given = [view.data for view in self.views]
        self.extra = pieces[-1]
        del pieces  # they are not to count
        self._addresses = list(map(torch.Tensor.data_ptr, self.given))
        self._tensors = _tensors_with_memory_of(self.flat)
        self._references = getrefcount(self.given[0])

    @property
    def shared(self) -> bool:
        """Whether something else uses this memory: a slice, a NumPy array, or another process."""
        if _tensors_with_memory_of(self.flat) > self._tensors:
            return True
        # PyTorch says so of every tensor on a GPU.
        between_processes: bool = self.flat.is_shared()  # type: ignore[no-untyped-call]
        return between_processes and self.flat.device.type == "cpu"

    @property
    def free(self) -> bool:
        """Whether no parameter has a tensor of ``given``, and the script has nothing of it.

        Nor may it have set the ``data`` of one, as ``model.double()`` does, or have computed with
        one.
        """
        unused = lists().unused(self.given, self._addresses, self._references)
        return unused and not self.shared

    def referenced_elsewhere(self, at: int) -> bool:
        """Whether the script, too, refers to the tensor that is a parameter's gradient."""
        return getrefcount(self.given[at]) > self._references + 1 or self.shared


class Bucket:
    """The gradients of a few parameters with one wire dtype on one device, and extra numbers."""

    # Whether numbers lie in the bucket in the order in which they lie in parameters.
    _keeps_formats = True

    def __init__(
        self, name: str, members: Sequence[tuple[int, torch.Tensor]], extra: int = 0
    ) -> None:
        self.name = name
        self.indices = [i for i, _ in members]
        # How many gradients are still to come in this pass. At zero the bucket goes out; one that
        # comes later, and so changes a gradient again, makes it negative.
        self.left = lists().number()
        self.left.value = len(members)
        self.complete = False  # whether the gradients that it was packed with were there, and dense
        self.handle: Any = None  # of the collective that is running
        self._parameters = [p for _, p in members]
        self._lengths = [p.numel() * (2 if p.is_complex() else 1) for _, p in members] + [extra]
        self._shapes = [real_shape(p) for _, p in members]
        self._complex = any(p.is_complex() for _, p in members)
        dtype = wire_dtype(members[0][1].dtype)
        self._strides = {
            at: p.stride()
            for at, (_, p) in enumerate(members)
            if self._keeps_formats and _is_channels_last(p)
        }
        # Members whose gradients cannot be views of the bucket.
        self._apart = {
            i
            for at, (i, p) in enumerate(members)
            if p.dtype is not dtype or not (p.is_contiguous() or at in self._strides)
        }
        # Whether the gradients are large enough to scale them while they are copied, rather than
        # their sum in another pass, and the factor if so. A GPU makes that pass in no time, but the
        # host needs its time for each call.
        large = sum(p.nbytes for _, p in members) >= _LARGE * len(members)
        self._large = large and not self._apart and members[0][1].device.type == "cpu"
        self._factor: float | None = None
        like = torch.empty(0, dtype=dtype, device=members[0][1].device)
        self._memory = _Memory(self._lengths, self._shapes, self._strides, like)
        self._spare: _Memory | None = None

    @property
    def flat(self) -> torch.Tensor:
        """All gradients and the extra numbers, one after the other."""
        return self._memory.flat

    @property
    def views(self) -> list[torch.Tensor]:
        """Each member's gradient in ``flat``."""
        return self._memory.views

    @property
    def extra(self) -> torch.Tensor:
        """The extra numbers; take them after ``pack``, which may use other memory."""
        return self._memory.extra

    @property
    def channels_last(self) -> set[int]:
        """Indices of the members whose numbers lie in the bucket in that order."""
        return {self.indices[at] for at in self._strides}

    def is_dense(self) -> bool:
        """Whether all gradients are there, and none is sparse."""
        return lists().dense(self._parameters)

    def kept(self) -> set[int]:
        """Indices of the members to whose gradients the script refers, too."""
        # As zero_grad() leaves them, but for the first gradient of the pass.
        present = lists().present(self._parameters)
        return {self.indices[at] for at in present if self._is_referenced(at)}

    def _is_referenced(self, at: int) -> bool:
        """Whether anything but a parameter refers to its gradient, or to the gradient's memory."""
        p = self._parameters[at]
        if p.grad is self._memory.given[at]:
            return self._memory.referenced_elsewhere(at)
        if p.grad is None or p.grad.is_sparse:  # sparse ones have no memory of one piece
            return p.grad is not None
        return any(map(gt, _references_to_gradient(p), _UNREFERENCED))

    @torch.no_grad()
    def pack(self, prescale: float | None = None) -> None:
        """Copy the members' gradients in; one that is missing or sparse counts as zero.

        ``prescale`` makes the sum over ranks the mean; None if gradients must not be scaled before.
        """
        if not self._memory.free:
            # Gradients that were not reset, or means that the script keeps. The first may change
            # again before the bucket is back.
            spare, self._spare = self._spare, self._memory
            if spare is None or not spare.free:
                spare = _Memory(self._lengths, self._shapes, self._strides, self.flat)
            self._memory = spare
        views: list[torch.Tensor] = self._memory.views
        self._factor = prescale if self._large else None
        if self._factor is None and not self._complex and lists().pack(self._parameters, views):
            self.complete = True
            return
        self.complete = self.is_dense()
        if not self.complete:
            torch._foreach_zero_(views)
        pairs = zip(views, (p.grad for p in self._parameters), strict=True)
        there = [(v, g) for v, g in pairs if g is not None and not g.is_sparse]
        if self._complex:
            real = torch.view_as_real
            there = [(v, real(g.resolve_conj()) if g.is_complex() else g) for v, g in there]
        if self._factor is not None:
            for view, gradient in there:
                torch.mul(gradient, self._factor, out=view)
        elif there:
            torch._foreach_copy_([v for v, _ in there], [g for _, g in there])

    def give(self, wanted: Set[int] | None, kept: Set[int]) -> None:
        """Make the means the wanted members' gradients; None for all. Kept ones stay the same."""
        given = self._memory.given
        if wanted is None and not kept and not self._apart:
            lists().give(self._parameters, given)
            return
        members = zip(self.indices, self._parameters, given, self._memory.views, strict=True)
        for i, p, whole, view in members:
            if wanted is not None and i not in wanted:
                continue
            if i not in self._apart and (p.grad is None or i not in kept):
                p.grad = whole
                continue
            mean = torch.complex(*view.unbind(-1)) if p.is_complex() else view
            if p.grad is None:
                p.grad = torch.empty_like(p).copy_(mean)
            else:
                p.grad.detach().copy_(mean)

    def launch(self, wire: Wire) -> None:
        """Start averaging over ranks; returns at once."""
        self.left.value = 0
        if self._factor is not None:
            self.extra.mul_(self._factor)
            self.handle = wire.start_sum(self.flat, self.name)
        else:
            self.handle = wire.start_mean(self.flat, self.name)

    def exchange(self, wire: Wire) -> None:
        """Start the second collective of buckets that need two; call after ``launch``."""

    def wait(self, wire: Wire) -> None:
        """Wait for the mean; call after ``exchange``."""
        assert self.handle is not None
        wire.wait(self.handle)
        self.handle = None

    def reset(self) -> None:
        self.left.value = len(self.indices)


class Extra(NamedTuple):
    """Values that travel with the gradients in a bucket."""

    bucket: Bucket
    part: slice

    @property
    def values(self) -> torch.Tensor:
        """A view of them; take it each time, since the bucket may get new memory."""
        return self.bucket.extra[self.part]


def _tensors_with_memory_of(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(parameter: torch.Tensor) -> bool:
    if parameter.is_contiguous() or parameter.is_complex():
        return False
    memory_format = _CHANNELS_LAST.get(parameter.dim(), torch.contiguous_format)
    return parameter.is_contiguous(memory_format=memory_format)


def _references_to_gradient(parameter: torch.Tensor) -> tuple[int, int]:
    gradient = parameter.grad
    assert gradient is not None
    return getrefcount(gradient), _tensors_with_memory_of(gradient)


def _references_to_new_gradient() -> tuple[int, int]:
    parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
    parameter.grad = torch.zeros(1, device="cpu")
    return _references_to_gradient(parameter)


# These numbers for a gradient that only its parameter refers to. They depend on the versions of
# Python and PyTorch.
_UNREFERENCED = _references_to_new_gradient()


def average_rows(
    gradient: torch.Tensor | None,
    parameter: torch.Tensor,
    name: str,
    wire: Wire,
    compression: Compression | None = None,
) -> torch.Tensor:
    """Average a gradient that is sparse in its first dimension, or None, over ranks; a collective.

    A compression that rounds value by value is used for float32. The mean is sparse and coalesced.
    """
    if gradient is None:
        rows = torch.empty(0, dtype=torch.int64, device=parameter.device)
        values = parameter.new_empty((0, *parameter.shape[1:]))
    else:
        by_row = (gradient if gradient.is_sparse else gradient.to_sparse(1)).coalesce()
        rows, values = by_row.indices()[0].contiguous(), by_row.values().contiguous()
    values = values.to(wire_dtype(values.dtype))
    rounding = for_rows(compression) if values.dtype is torch.float32 else None
    sent = rounding.encode(values.view(-1), ops).view_as(values) if rounding else values
    handles = wire.start_gather(rows, f"{name}.rows"), wire.start_gather(sent, f"{name}.values")
    all_rows, all_values = map(wire.wait, handles)
    if rounding:
        all_values = rounding.decode(all_values.view(-1, 1), ops).view_as(all_values)
    # Not check_invariants=False, of which PyTorch 2.11 warns all the same.
    unchecked = torch.sparse.check_sparse_tensor_invariants(False)  # type: ignore[no-untyped-call]
    with unchecked:
        mean = torch.sparse_coo_tensor(all_rows[None], all_values / wire.size, parameter.shape)
        return mean.coalesce().to(parameter.dtype)
