"""The calls that make a deferred model's tensors, and how they are made for real.

A recipe is a list of calls of PyTorch's operators. A tensor in it is a view of a numbered storage,
so that names, tied parameters and ``parameter.data = ...`` need no care. Two kinds of calls run
when some tensors are wanted: those that lead to them, and all that draw random numbers, so that
each gets the numbers that one process would have drawn. A storage is dropped after the last call
that needs what is in it. ``weight.normal_()`` needs nothing of what was there before, so a
parameter of another rank exists only while its random numbers are drawn.
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
# A storage keeps its Python attributes as long as any tensor lies in it. That holds the recipe
# exactly as long as something is left to make, and no address of freed memory is ever compared.
_ATTRIBUTE = "_hvkit_deferred"
_NO_RECIPE = (
    f"is on the meta device, but was not made {IN_BLOCK}, or was converted, copied or replaced "
    "after it: do that inside the block"
)


@dataclass(frozen=True, slots=True)
class View:
    """Where a tensor lies: in the storage of this number."""

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
        """The storage of what an operator returned, laid out as it was on the meta device."""
        if (made.stride(), made.storage_offset()) == (self.stride, self.offset):
            return made.untyped_storage()
        last = sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        storage = _memory((self.offset + last + 1) * made.element_size())
        self.on(storage).copy_(made)
        return storage


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor with values that the script passed to a call, such as one of a loaded file."""

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
    """One call of an operator; tensors in its arguments are ``View`` or ``Given``.

    Attributes:
        outputs: where the tensors lie that it returns.
        reads: storages whose content it needs.
        writes: storages whose content it changes or makes.
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
        """Call the operator on storages with memory, and add those that it makes."""
        for number, size in self.overwrites.items():
            if number not in storages:
                storages[number] = _memory(size)
        args, kwargs = tree_map_only(Given, Given.get, (self.args, self.kwargs))
        args, kwargs = tree_map_only(View, lambda v: v.on(storages[v.storage]), (args, kwargs))
        made = self.function(*args, **kwargs)
        for view, tensor in zip(self.outputs, tensors_in(made), strict=True):
            if view.storage not in storages:
                storages[view.storage] = view.storage_with(tensor)


@dataclass(frozen=True, slots=True)
class Seeding:
    """The script set the state of the random numbers.

    Attributes:
        draws: back to the state after so many calls that draw, as ``torch.random.fork_rng`` does.
        row: otherwise to this row of the recipe's ``random_state``.
    """

    draws: int | None
    row: int


Event = Call | Seeding


def _memory(size: int) -> torch.UntypedStorage:
    return torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()


_left_by: WeakValueDictionary[bytes, Recipe] = WeakValueDictionary()


@dataclass(eq=False)
class Recipe:
    """How to make the tensors of one ``hvkit.deferred_init()`` block.

    Attributes:
        number: blocks before this one in the process.
        start: state of PyTorch's CPU generator at the start, or the recipe of an earlier block
            after which nothing was drawn.
        seeds: states that the script set inside the block.
        events: the calls, in order.
    """

    number: int
    start: torch.Tensor | Recipe
    seeds: list[torch.Tensor] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    _given: torch.Tensor | None = None
    _left: bytes | None = None
    _end: torch.Tensor | None = None
    _versions: dict[int, int] = field(default_factory=dict)

    @property
    def random_state(self) -> torch.Tensor:
        """States of the CPU generator: at the start, then each that the script set in the block.

        Returns:
            uint8 of shape (1 + states set in the block, bytes of a state), to be broadcast.
        """
        return self._own_state() if self._given is None else self._given

    def start_from(self, state: torch.Tensor) -> None:
        """Use another rank's random numbers.

        Raises:
            ValueError: the other rank set another number of states in the block.
        """
        own = self._own_state()
        if state.shape != own.shape or state.dtype != torch.uint8:
            raise ValueError(
                f"random state of shape {tuple(state.shape)} and {state.dtype}, but this rank's "
                f"model needs {tuple(own.shape)} and {own.dtype}: call torch.manual_seed equally "
                f"often on every rank {IN_BLOCK}"
            )
        self._given = None if torch.equal(state.cpu(), own) else state.cpu().clone()
        self._end = None

    def make(
        self, wanted: Iterable[torch.Tensor], device: torch.device | str | None = None
    ) -> None:
        """Make these tensors real; they stay the same objects, and all others stay on meta.

        All random numbers are drawn on the CPU, in the order of the block. Peak memory is about
        that of the wanted tensors and of the largest one. Tensors that share memory have to be
        made in one call to share it afterwards. What was registered with ``register_hook`` stays.

        The CPU generator is left as the block would have left it without ``deferred_init``, unless
        the script drew numbers or set a seed since: then it is left alone. After ``start_from``
        another rank's state it is left as this rank had it before the block, so that ranks with
        seeds of their own keep different random numbers.

        Args:
            wanted: parameters, buffers and others. Those that are real already are only moved.
            device: where they shall lie; by default in the CPU's memory.

        Raises:
            ValueError: one of them is on meta, but this recipe does not lead to its values.
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
        """Make every tensor real that is left, as one process without ``deferred_init`` would.

        Raises:
            ValueError: a parameter was changed after the block.
        """
        self.make(self.tensors(), device)

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the block that something holds and that have not been made.

        Not only parameters and buffers: modules keep tables in plain attributes, too. Looks at all
        objects of the process, which takes about 0.1 s for a million.
        """
        return [t for t in _living_tensors() if (tag := tag_of(t)) and tag[0] is self]

    def values(self, view: View, operation: str) -> torch.Tensor:
        """The values of one tensor of an unfinished block, if they are not random.

        Raises:
            ValueError: they are.
        """
        plan = self._plan({view.storage}, draws=False)
        if any(isinstance(event, Call) and event.random for event, _ in plan):
            raise ValueError(
                f"{operation} needs the values of a tensor of shape {view.size}, but they depend "
                f"on random numbers, which are not drawn {IN_BLOCK}: compute it from "
                "Python's or NumPy's numbers, or move it after hvkit.distribute"
            )
        return view.on(self._run(plan)[view.storage])

    def finish(self, left: bytes | None) -> None:
        """Note what the end of the block leaves, to notice later what the script changed."""
        self._left = left
        if left is not None:
            _left_by[left] = self
        parameters = (t for t in self.tensors() if isinstance(t, nn.Parameter))
        self._versions = {id(p): version_of(p) for p in parameters}

    def lost(self, tensor: torch.Tensor) -> str | None:
        """Why this recipe would not give the values of a tensor on the meta device."""
        tag = tag_of(tensor)
        if tag is None:
            return _NO_RECIPE
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
        if reason := self.lost(tensor):
            raise ValueError(f"tensor of shape {tuple(tensor.shape)} {reason}")
        return View.of(tensor, tag_of(tensor)[1])  # type: ignore[index]

    def _own_state(self) -> torch.Tensor:
        first = self.start._end_state() if isinstance(self.start, Recipe) else self.start
        return torch.stack([first, *self.seeds])

    def _end_state(self) -> torch.Tensor:
        if self._end is None:
            self._draw(set())
        assert self._end is not None
        return self._end

    def _draw(self, wanted: set[int]) -> dict[int, torch.UntypedStorage]:
        """Draw all random numbers, make the wanted storages, and leave the generator behind."""
        before, states = torch.get_rng_state(), self.random_state
        torch.set_rng_state(states[0].clone())
        try:
            storages = self._run(self._plan(wanted, draws=True), states)
            self._end = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)
        if digest(before) == self._left:
            torch.set_rng_state(self._end if self._given is None else self._own_state()[0].clone())
        return storages

    def _plan(self, wanted: set[int], *, draws: bool) -> list[tuple[Event, frozenset[int]]]:
        """The events that have to run, each with the storages to drop after it.

        Args:
            wanted: storages to keep.
            draws: whether to draw the random numbers of all others.
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


def recipe_of(model: nn.Module) -> Recipe | None:
    """How to make a model that was built in a ``hvkit.deferred_init()`` block; None if all is real.

    The model may contain the deferred one, or be a part of it.

    Raises:
        ValueError: names a parameter or buffer that no recipe leads to, or which was changed after
            the block; or the parts come from two blocks.
    """
    recipe: Recipe | None = None
    named = [("parameter", *each) for each in model.named_parameters()]
    for kind, name, tensor in [*named, *(("buffer", *each) for each in model.named_buffers())]:
        if not tensor.is_meta:
            continue
        tag = tag_of(tensor)
        recipe = recipe or (tag[0] if tag else None)
        if reason := recipe.lost(tensor) if recipe else _NO_RECIPE:
            raise ValueError(f"{kind} {name} of {type(model).__name__} {reason}")
    return recipe


def previous(state: torch.Tensor) -> Recipe | None:
    """The recipe of the block that left the generator in this state, if it is still held."""
    return _left_by.get(digest(state))


def digest(state: torch.Tensor) -> bytes:
    """16 bytes that tell states of a generator apart."""
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


def tag_of(tensor: torch.Tensor) -> tuple[Recipe, int] | None:
    """The recipe of a tensor on the meta device, and the number of its storage."""
    if not tensor.is_meta or tensor.layout is not torch.strided:
        return None
    tag: tuple[Recipe, int] | None = getattr(tensor.untyped_storage(), _ATTRIBUTE, None)
    return tag


def set_tag(tensor: torch.Tensor, recipe: Recipe, number: int) -> None:
    """Make a recipe known to all tensors that share this one's storage."""
    setattr(tensor.untyped_storage(), _ATTRIBUTE, (recipe, number))


def _moved(storage: torch.UntypedStorage, device: torch.device | str) -> torch.UntypedStorage:
    return (
        View(0, (storage.nbytes(),), (1,), 0, torch.uint8, False, False)
        .on(storage)
        .to(device)
        .untyped_storage()
    )


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
    # issubclass of the type: isinstance would wake objects that pretend to be others.
    return (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
