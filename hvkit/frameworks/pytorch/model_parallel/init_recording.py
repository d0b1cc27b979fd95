"""Records the calls that initialise a deferred model, and replays those that a rank needs.

A recording is a list of calls of PyTorch's operators. A tensor in it is a view of a numbered
storage, so that names, tied parameters and ``parameter.data = ...`` need no care. To make some
tensors, two kinds of calls run: those that lead to them, and all that draw random numbers, so that
each draws the numbers of one process. A storage is freed after the last call that needs its
content. ``weight.normal_()`` needs nothing of the former content, so a parameter of another rank
exists only while its random numbers are drawn.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

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
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        storage = _memory((self.offset + last + 1) * made.element_size())
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


@dataclass(frozen=True, slots=True)
class Call:
    """One call of an operator; tensors in its arguments are ``View`` or ``ScriptTensor``.

    Attributes:
        outputs: the tensors that it returns.
        reads: storages whose content it needs.
        writes: storages that it changes or makes.
        overwrites: those of ``writes`` whose former content it does not need, with their bytes.
        random: whether it draws random numbers.
        dtype: the default dtype when it was called.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[View]
    reads: frozenset[int]
    writes: frozenset[int]
    overwrites: dict[int, int]
    random: bool
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)

    def repeat(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Call the operator on storages with memory, and add the storages that it makes."""
        for number, size in self.overwrites.items():
            if number not in storages:
                storages[number] = _memory(size)
        args, kwargs = tree_map_only(ScriptTensor, ScriptTensor.get, (self.args, self.kwargs))
        args, kwargs = tree_map_only(View, lambda v: v.on(storages[v.storage]), (args, kwargs))
        made = self.function(*args, **kwargs)
        for view, tensor in zip(self.outputs, tensors_in(made), strict=True):
            if view.storage not in storages:
                storages[view.storage] = view.storage_with(tensor)


@dataclass(frozen=True, slots=True)
class Seeding:
    """A change of the random state by the script.

    Attributes:
        draws: back to the state after so many calls that draw, as by ``torch.random.fork_rng``.
        row: otherwise to this row of the recording's ``random_state``.
    """

    draws: int | None
    row: int


Event = Call | Seeding


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()


_by_final_state: WeakValueDictionary[bytes, InitRecording] = WeakValueDictionary()


@dataclass(eq=False)
class InitRecording:
    """How to make the tensors of one ``hvkit.deferred_init()`` block.

    Attributes:
        number: how many blocks the process had before.
        start: the state of PyTorch's CPU generator at the start; or the recording of the block
            before, if nothing was drawn since.
        seeds: states that the script has set inside the block.
        events: the calls, in order.
    """

    number: int
    start: torch.Tensor | InitRecording
    seeds: list[torch.Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _other_state: torch.Tensor | None = None
    _final_digest: bytes | None = None
    _end: torch.Tensor | None = None
    _versions: dict[int, int] = field(default_factory=dict)

    @property
    def random_state(self) -> torch.Tensor:
        """States of the CPU generator: at the start, then those that the script has set.

        Returns:
            uint8 of shape (1 + states set in the block, bytes of a state), to broadcast.
        """
        return self._own_state() if self._other_state is None else self._other_state

    def start_from(self, state: torch.Tensor) -> None:
        """Use another rank's random numbers.

        Raises:
            ValueError: the other rank has set another number of states in the block.
        """
        own = self._own_state()
        if state.shape != own.shape or state.dtype != torch.uint8:
            raise ValueError(
                f"random state of shape {tuple(state.shape)} and {state.dtype}, but this rank's "
                f"model needs {tuple(own.shape)} and {own.dtype}: call torch.manual_seed equally "
                f"often on every rank {IN_BLOCK}"
            )
        self._other_state = None if torch.equal(state.cpu(), own) else state.cpu().clone()
        self._end = None

    def make(
        self, wanted: Iterable[torch.Tensor], device: torch.device | str | None = None
    ) -> None:
        """Make these tensors real; they stay the same objects, and all others stay on meta.

        This draws all random numbers on the CPU, in the order of the block. Peak memory is about
        that of the wanted tensors and of the largest one. To share memory afterwards, tensors must
        be made in one call. Hooks from ``register_hook`` stay.

        Afterwards the CPU generator has the state that the block would leave without
        ``deferred_init``, unless the script has drawn numbers or set a seed since. After
        ``start_from`` another rank's state it has the state from before the block, so that ranks
        with seeds of their own keep different random numbers.

        Args:
            wanted: parameters, buffers and others. Real ones are only moved.
            device: to put them on; the CPU by default.

        Raises:
            ValueError: this recording does not lead to the values of one that is on meta.
        """
        tensors = list({id(t): t for t in wanted}.values())
        views = [(t, self._view(t)) for t in tensors if t.is_meta]
        storages = self._draw({view.storage for _, view in views})
        with torch.no_grad(), _disable_current_modes():
            if device is not None:
                for number in storages:
                    storages[number] = _moved(storages[number], device)
                for tensor in tensors:
                    if not tensor.is_meta and tensor.device != torch.device(device):
                        tensor.data = tensor.data.to(device)
            for tensor, view in views:
                _become(tensor, view.on(storages[view.storage]))

    def make_all(self, device: torch.device | str | None = None) -> None:
        """Make every tensor real that is still on meta.

        Raises:
            ValueError: a parameter was changed after the block.
        """
        self.make(self.tensors(), device)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the block that are alive and still on meta.

        Modules also keep tables in plain attributes, so this looks at all objects of the process,
        which takes about 0.1 s for a million.
        """
        return [t for t in _living_tensors() if (tag := tag_of(t)) and tag[0] is self]

    def values(self, view: View, operation: str) -> torch.Tensor:
        """The values of one tensor of an unfinished block.

        Raises:
            ValueError: they depend on random numbers.
        """
        plan = self._plan({view.storage}, draws=False)
        if any(isinstance(event, Call) and event.random for event, _ in plan):
            raise ValueError(
                f"{operation} needs the values of a tensor of shape {view.size}, but they depend "
                f"on random numbers, which are not drawn {IN_BLOCK}: compute it from "
                "Python's or NumPy's numbers, or move it after hvkit.distribute"
            )
        return view.on(self._run(plan)[view.storage])

    def finish(self, final_digest: bytes | None) -> None:
        """Note the state at the end of the block, to notice later what the script has changed."""
        self._final_digest = final_digest
        if final_digest is not None:
            _by_final_state[final_digest] = self
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

    def _own_state(self) -> torch.Tensor:
        first = self.start._end_state() if isinstance(self.start, InitRecording) else self.start
        return torch.stack([first, *self.seeds])

    def _end_state(self) -> torch.Tensor:
        if self._end is None:
            self._draw(set())
        assert self._end is not None
        return self._end

    def _draw(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Draw all random numbers, make the wanted storages, and set the generator's state."""
        before, states = torch.get_rng_state(), self.random_state
        torch.set_rng_state(states[0].clone())
        try:
            storages = self._run(self._plan(wanted, draws=True), states)
            self._end = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)
        if digest(before) == self._final_digest:
            torch.set_rng_state(
                self._end if self._other_state is None else self._own_state()[0].clone()
            )
        return storages

    def _plan(self, wanted: set[int], *, draws: bool) -> list[tuple[Event, frozenset[int]]]:
        """The events to run, each with the storages to free after it.

        Args:
            wanted: storages to keep.
            draws: whether to draw the random numbers of all other storages, too.
        """
        needed, plan = set(wanted), list[tuple[Event, frozenset[int]]]()
        for event in reversed(self.events):
            if isinstance(event, Seeding):
                if draws:
                    plan.append((event, frozenset()))
            elif not needed.isdisjoint(event.writes) or (draws and event.random):
                plan.append((event, (event.reads | event.writes) - needed))
                needed -= event.writes - event.reads
                needed |= event.reads
        return plan[::-1]

    def _run(
        self, plan: list[tuple[Event, frozenset[int]]], states: torch.Tensor | None = None
    ) -> dict[int, torch.UntypedStorage]:
        storages: dict[int, torch.UntypedStorage] = {}
        returns = {event.draws for event, _ in plan if isinstance(event, Seeding)}
        draws, saved, default = 0, dict[int | None, torch.Tensor](), torch.get_default_dtype()
        try:
            with torch.no_grad(), _disable_current_modes():
                for event, dropped in plan:
                    if draws in returns:
                        saved.setdefault(draws, torch.get_rng_state())
                    if isinstance(event, Seeding):
                        assert states is not None
                        state = states[event.row] if event.draws is None else saved[event.draws]
                        torch.set_rng_state(state.clone())  # it takes no view of a larger tensor
                        continue
                    torch.set_default_dtype(event.dtype)
                    event.repeat(storages)
                    draws += event.random
                    for number in dropped:
                        storages.pop(number, None)
        finally:
            torch.set_default_dtype(default)
        return storages


def recording_of(model: nn.Module) -> InitRecording | None:
    """The recording of a model that ``hvkit.deferred_init()`` has built; None if all is real.

    The model may contain the deferred one, or be a part of it.

    Raises:
        ValueError: no recording leads to a parameter or buffer, the script has changed one after
            the block, or the parts come from two blocks.
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


def previous(state: torch.Tensor) -> InitRecording | None:
    """The recording of the block that left the generator in this state, if it is still alive."""
    return _by_final_state.get(digest(state))


def digest(state: torch.Tensor) -> bytes:
    """A 16-byte hash of a generator's state."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def tag_of(tensor: torch.Tensor) -> tuple[InitRecording, int] | None:
    """The recording of a tensor on the meta device, and the number of its storage."""
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    tag: tuple[InitRecording, int] | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return tag


def set_tag(tensor: torch.Tensor, recording: InitRecording, number: int) -> None:
    """Attach a recording to all tensors that share this one's storage."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, (recording, number))


def _moved(storage: torch.UntypedStorage, device: torch.device | str) -> torch.UntypedStorage:
    data = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return data.to(device).untyped_storage()


def _become(tensor: torch.Tensor, made: torch.Tensor) -> None:
    """Give a tensor on the meta device memory and values.

    ``torch.utils.swap_tensors`` refuses tensors with weak references, which ``nn.LSTM`` keeps to
    its parameters. They stay right: the object remains, and nothing else holds ``made``.
    """
    made.requires_grad_(tensor.requires_grad and tensor.is_leaf)
    made._backward_hooks = tensor._backward_hooks
    made._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, made)


def _living_tensors() -> Iterator[torch.Tensor]:
    # Not isinstance, which runs code of objects that pretend to be others.
    return (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
