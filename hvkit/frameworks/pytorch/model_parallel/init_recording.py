"""Records the calls that initialise a deferred model, and replays those that a rank needs.

A recording is a list of calls of PyTorch's operators. A tensor in it is a view of a numbered
storage, so that names, tied parameters and ``parameter.data = ...`` need no care. A call that draws
random numbers also draws them in the block, into memory that is freed at once: so the generator's
states are those of the plain constructor, and a replayed call starts from its own. To make some
tensors, the calls that lead to them run. A storage is freed after the last call that needs its
content. ``weight.normal_()`` needs nothing of the former content.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from hvkit.frameworks.pytorch.model_parallel.tensor_trees import tensors_in, version_of

IN_BLOCK = "inside `with hvkit.deferred_init():`"
# An attribute of storages, which live as long as their tensors. It keeps the recording exactly as
# long as something is left to make, and no address of freed memory is ever compared.
_ATTRIBUTE = "_hvkit_deferred"
_NOT_RECORDED = (
    f"is on the meta device, but was not made {IN_BLOCK}, or was converted, copied or replaced "
    "after it: do that inside the block"
)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a numbered storage."""

    storage: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> View:
        size, stride, offset = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return cls(storage, size, stride, offset, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    @property
    def bytes(self) -> int:
        """Of the smallest storage that has this view."""
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return max(self.offset + last + 1, 0) * self.dtype.itemsize

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """This view of a storage that has memory."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = empty.set_(storage, self.offset, self.size, self.stride)
        if self.conjugate:
            tensor = tensor.conj()
        made: torch.Tensor = torch._neg_view(tensor) if self.negative else tensor
        return made

    def storage_with(self, made: torch.Tensor) -> torch.UntypedStorage:
        """The storage of an operator's result, with the layout that it had on the meta device."""
        if (made.stride(), made.storage_offset()) == (self.stride, self.offset):
            return made.untyped_storage()
        storage = _memory(self.bytes)
        self.on(storage).copy_(made)
        return storage


@dataclass(frozen=True, slots=True)
class ScriptTensor:
    """A tensor with values that the script has passed to a call, as from a loaded file."""

    tensor: torch.Tensor
    version: int

    def get(self) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise ValueError(
                f"a tensor of shape {tuple(self.tensor.shape)} was copied into the model "
                f"{IN_BLOCK} and changed later, before the model was made: pass a clone() "
                "of it to the model"
            )
        return self.tensor


@dataclass(slots=True)
class Call:
    """One call of an operator; tensors in its arguments are ``View`` or ``ScriptTensor``."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    state: torch.Tensor | None  # of the generator before, if it draws random numbers
    outputs: list[View] = field(default_factory=list)
    reads: frozenset[int] = frozenset()  # storages whose content it needs
    writes: frozenset[int] = frozenset()  # storages that it changes or makes
    # A storage that it changes without a look at the content: its bytes.
    fills: dict[int, int] = field(default_factory=dict)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def repeat(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Call the operator on storages with memory, and add the storages that it makes."""
        for number, size in self.fills.items():
            if number not in storages:
                storages[number] = _memory(size)
        args, kwargs = tree_map_only(ScriptTensor, ScriptTensor.get, (self.args, self.kwargs))
        args, kwargs = tree_map_only(View, lambda v: v.on(storages[v.storage]), (args, kwargs))
        made = self.function(*args, **kwargs)
        for view, tensor in zip(self.outputs, tensors_in(made), strict=True):
            if view.storage not in storages:
                storages[view.storage] = view.storage_with(tensor)


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()


class InitRecording:
    """How to make the tensors of one ``hvkit.deferred_init()`` block."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._versions: dict[int, int] = {}

    def add(self, call: Call) -> None:
        """Add a call, and draw its random numbers."""
        if call.state is not None:
            # Only draws that depend on values, as ``torch.normal`` of means, replay what leads to
            # these: a chain of n such draws takes time for n * n.
            storages = self._replayed(call.reads - call.fills.keys())
            with _without_modes():
                call.repeat(storages)
        self._calls.append(call)

    @property
    def random_state(self) -> torch.Tensor:
        """The generator's states before each draw: uint8 of shape (draws, bytes of a state)."""
        states = [call.state for call in self._calls if call.state is not None]
        return torch.stack([*states, torch.get_rng_state()])[:-1]  # there may be no draw

    def start_from(self, states: torch.Tensor) -> None:
        """Use the random numbers of a rank that draws equally often; the generator stays."""
        draws = (call for call in self._calls if call.state is not None)
        for call, state in zip(draws, states, strict=True):
            call.state = state.clone()  # torch.set_rng_state takes no view of a larger tensor

    def make(
        self, wanted: Iterable[torch.Tensor], device: torch.device | str | None = None
    ) -> None:
        """Make these tensors real, or move them; they stay the same objects, others stay on meta.

        Values are computed on the CPU, and put on the device. To share memory afterwards, tensors
        must be made in one call. Hooks from ``register_hook`` stay, and the generator's state does.
        """
        tensors = list({id(t): t for t in wanted}.values())
        views = [(t, self._view(t)) for t in tensors if t.is_meta]
        storages = self._replayed({view.storage for _, view in views})
        with torch.no_grad(), _disable_current_modes():
            if device is not None:
                for number, storage in storages.items():
                    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                    storages[number] = data.to(device).untyped_storage()
                for tensor in tensors:
                    if not tensor.is_meta and tensor.device != torch.device(device):
                        tensor.data = tensor.data.to(device)
            for tensor, view in views:
                _become(tensor, view.on(storages[view.storage]))

    def make_all(self) -> None:
        self.make(self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the block that are alive and still on meta.

        Modules also keep tables in plain attributes, so this looks at all objects of the process,
        which takes about 0.1 s for a million.
        """
        # Not isinstance, which runs code of objects that pretend to be others.
        living = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        return [t for t in living if (tag := tag_of(t)) and tag[0] is self]

    def values(self, view: View, operation: str) -> torch.Tensor:
        """The values of one tensor of an unfinished block; an error if they are random.

        Ranks may have other random numbers: then the recording would depend on the rank.
        """
        if any(call.state is not None for call, _ in self._plan({view.storage})):
            raise ValueError(
                f"{operation} needs the values of a tensor of shape {view.size}, but they depend "
                "on random numbers, which other ranks may draw differently: compute it from "
                "Python's or NumPy's numbers, or move it after hvkit.distribute"
            )
        return view.on(self._replayed({view.storage})[view.storage])

    def finish(self) -> None:
        """Note what the block has made, to notice later what the script has changed."""
        parameters = (t for t in self.tensors() if isinstance(t, nn.Parameter))
        self._versions = {id(p): version_of(p) for p in parameters}

    def why_lost(self, tensor: torch.Tensor) -> str | None:
        """Why this recording does not lead to the values of a tensor on the meta device."""
        tag = tag_of(tensor)
        if tag is None:
            return _NOT_RECORDED
        if tag[0] is not self:
            return "is of another hvkit.deferred_init() block: make the whole model in one block"
        version = version_of(tensor)
        if version != self._versions.get(id(tensor), version):
            return (
                "was changed in place after its hvkit.deferred_init() block, which has no effect "
                "on a tensor without values: do that inside the block"
            )
        return None

    def _view(self, tensor: torch.Tensor) -> View:
        if reason := self.why_lost(tensor):
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} {reason}")
        return View.of(tensor, tag_of(tensor)[1])  # type: ignore[index]

    def _plan(self, wanted: Iterable[int]) -> list[tuple[Call, frozenset[int]]]:
        """The calls that make the wanted storages, each with the storages to free after it."""
        needed, plan = set(wanted), list[tuple[Call, frozenset[int]]]()
        for call in reversed(self._calls):
            if not needed:  # as for most draws
                break
            if not needed.isdisjoint(call.writes):
                plan.append((call, (call.reads | call.writes) - needed))
                needed -= call.writes - call.reads
                needed |= call.reads
        return plan[::-1]

    def _replayed(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The wanted storages; the generator's state stays as it is."""
        storages: dict[int, torch.UntypedStorage] = {}
        default = torch.get_default_dtype()
        with _without_modes(), torch.random.fork_rng(devices=[]):
            try:
                for call, dropped in self._plan(wanted):
                    torch.set_default_dtype(call.dtype)
                    if call.state is not None:
                        torch.set_rng_state(call.state)
                    call.repeat(storages)
                    for number in dropped:
                        storages.pop(number, None)
            finally:
                torch.set_default_dtype(default)
        return storages


@contextmanager
def _without_modes() -> Iterator[None]:
    with torch.no_grad(), _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def recording_of(model: nn.Module) -> InitRecording | None:
    """The recording of a model that ``hvkit.deferred_init()`` has built; None if all is real.

    The model may contain the deferred one, or be a part of it. It is an error if no recording leads
    to a parameter or buffer, if the script has changed one after the block, or if the parts come
    from two blocks.
    """
    recording: InitRecording | None = None
    named = [("parameter", *each) for each in model.named_parameters()]
    for kind, name, tensor in [*named, *(("buffer", *each) for each in model.named_buffers())]:
        if not tensor.is_meta:
            continue
        tag = tag_of(tensor)
        recording = recording or (tag[0] if tag else None)
        if reason := recording.why_lost(tensor) if recording else _NOT_RECORDED:
            raise ValueError(f"{kind} {name} of {type(model).__name__} {reason}")
    return recording


def tag_of(tensor: torch.Tensor) -> tuple[InitRecording, int] | None:
    """The recording of a tensor on the meta device, and the number of its storage."""
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    tag: tuple[InitRecording, int] | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return tag


def set_tag(tensor: torch.Tensor, recording: InitRecording, number: int) -> None:
    """Attach a recording to all tensors that share this one's storage."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, (recording, number))


def _become(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Give a tensor on the meta device memory and values.

    ``torch.utils.swap_tensors`` refuses tensors with weak references, which ``nn.LSTM`` keeps to
    its parameters. They stay right: the object remains, and nothing else holds ``made``.
    """
    made.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    made._backward_hooks = tensor._backward_hooks
    made._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, made)
