"""Optimizers whose state is divided among the ranks: by ``ShardedOptimizer``, and in pipelines.

Keras makes the state of all weights when it builds an optimizer, and numbers it. So a weight of
another rank gets a placeholder without elements in the place of its state.

With ``ShardedOptimizer`` the update leaves out the variables of other ranks. Afterwards the owners
send their variables to all. An optimizer that is not Keras's own is tried on a few small weights
first.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.exchanges import chunks_by_owner
from hvkit.frameworks.keras.backends import (
    ON_TENSORFLOW,
    backend_variable,
    numpy_dtype,
    outside_graphs,
    set_anew,
)
from hvkit.frameworks.keras.optimizers import inner_optimizer, new_like, parts_of
from hvkit.runtime import Group
from hvkit.strategies import ShardedOptimizer

# By optimizer: the innermost ones, which do the update.
_states: WeakKeyDictionary[Any, PartialState] = WeakKeyDictionary()


def _states_of(optimizer: Any) -> list[PartialState]:
    """Those of an optimizer, or of the ones inside it; empty if no state is divided."""
    return [_states[part] for part in parts_of(inner_optimizer(optimizer)) if part in _states]


def ids_of_slots(optimizers: Sequence[Any]) -> set[int]:
    states = [state for each in optimizers for state in _states_of(each)]
    return {id(slot) for state in states for slot, _ in state.slots}


def gathered(optimizer: Any) -> AbstractContextManager[None]:
    """A context in which rank 0 holds an optimizer's whole state; a collective if it is divided."""
    return _all_of(state.gathered() for state in _states_of(optimizer))


def unfolded(optimizer: Any) -> AbstractContextManager[None]:
    """A context with room for an optimizer's whole state, to load it."""
    return _all_of(state.unfolded() for state in _states_of(optimizer))


@contextmanager
def _all_of(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


# The gradients that Keras adds up before an update.
_ACCUMULATOR = "gradient_accumulator"


class PartialState(ABC):
    """Divides the state of one optimizer, which updates variables and does not scale the loss.

    ``slots`` are the state of single weights, each with its weight.
    """

    # The rest of the error for saving a part.
    how_to_save: ClassVar[str]
    # Whether every rank keeps the sums of all gradients.
    whole_accumulators: ClassVar[bool]

    def __init__(self, optimizer: Any, divider: str) -> None:
        # Weak: the optimizer's methods keep this object.
        self._optimizer = ref(optimizer)
        self._divider = divider
        self.slots: list[tuple[Any, Any]] = []
        # Whether this rank holds the state of all weights now.
        self._whole = False
        make, build = optimizer.add_variable_from_reference, optimizer.build
        save, load = optimizer.save_own_variables, optimizer.load_own_variables

        def make_slot(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            if self.whole_accumulators and name == _ACCUMULATOR:
                return make(reference_variable, name=name, initializer=initializer)
            if self.holds(reference_variable):
                slot = make(reference_variable, name=name, initializer=initializer)
            else:
                slot = optimizer.add_variable((0,), "zeros", reference_variable.dtype, name=name)
            self.slots.append((slot, reference_variable))
            return slot

        def build_part(variables: Sequence[Any]) -> None:
            self.know(variables)
            build(variables)
            self._refuse_shared()

        def save_whole(store: Any) -> None:
            if not self._whole:
                raise ValueError(
                    f"saving {type(optimizer).__name__} on rank {runtime.rank()} would save only "
                    f"the part of this rank: {self.how_to_save}"
                )
            save(store)

        def load_own(store: Any) -> None:
            with self.unfolded():
                load(store)

        optimizer.add_variable_from_reference = make_slot
        optimizer.build = build_part
        optimizer.save_own_variables = save_whole
        optimizer.load_own_variables = load_own
        _states[optimizer] = self
        if optimizer.built:
            self._divide()

    @abstractmethod
    def holds(self, variable: Any) -> bool:
        """Whether this rank holds the state of a weight."""

    def know(self, variables: Sequence[Any]) -> None:  # noqa: B027  # most need not
        """Called with all weights of the optimizer, before it is asked who holds them."""

    @property
    @abstractmethod
    def keeps_whole(self) -> bool:
        """Whether ``collected`` returns the values on this rank."""

    @abstractmethod
    def collected(self) -> Iterable[tuple[Any, np.ndarray[Any, Any]]]:
        """Send the values of this rank's slots, or return slots with values; a collective."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A context in which rank 0 holds the whole state; a collective."""
        with self.unfolded() if self.keeps_whole else nullcontext():
            for slot, array in self.collected():
                slot.assign(array)
            yield

    def _divide(self) -> None:
        """Keep this rank's part of a state that was made before."""
        optimizer: Any = self._optimizer()
        variables = optimizer._trainable_variables
        self.know(variables)
        self.slots += _slots_of(optimizer, variables)
        if optimizer.gradient_accumulation_steps and not self.whole_accumulators:
            self.slots += zip(optimizer._accumulated_gradients, variables, strict=True)
        self._refuse_shared()
        self._fold()

    def _refuse_shared(self) -> None:
        """Raise if the optimizer keeps arrays that are not made for single weights."""
        optimizer: Any = self._optimizer()
        known = {id(slot) for slot, _ in self.slots}
        known |= {id(v) for v in getattr(optimizer, "_accumulated_gradients", ())}
        for v in optimizer.variables:
            if id(v) not in known and len(v.shape):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {v.path} of shape {tuple(v.shape)}, which "
                    f"Keras does not count to one weight: {self._divider} needs an optimizer "
                    "whose state has the shape of the weights, such as keras.optimizers.AdamW"
                )

    def _others(self) -> list[tuple[Any, Any]]:
        return [(slot, v) for slot, v in self.slots if not self.holds(v)]

    def _fold(self) -> None:
        for slot, _ in self._others():
            set_anew(slot, np.zeros(0, numpy_dtype(slot.dtype)))

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """A context with room for the whole state; afterwards this rank keeps its part."""
        for slot, variable in self._others():
            set_anew(slot, np.zeros(variable.shape, numpy_dtype(slot.dtype)))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._fold()


def _slots_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The state of single weights, and these: as an equal optimizer makes it, in the same order."""
    twin = new_like(optimizer)
    make = twin.add_variable_from_reference
    of: dict[int, Any] = {}

    def note(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        made = make(reference_variable, name=name, initializer=initializer)
        if name != _ACCUMULATOR:
            of[id(made)] = reference_variable
        return made

    twin.add_variable_from_reference = note
    twin.build(variables)
    return [
        (slot, of[id(twin_slot)])
        for slot, twin_slot in zip(optimizer.variables, twin.variables, strict=True)
        if id(twin_slot) in of
    ]


class VariableSender(Protocol):
    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Note the gradients of variables that other ranks update."""

    def send(self, number: int, piece: list[list[int]], variables: Sequence[Any]) -> None:
        """Send a piece, numbers of variables by owner in rank order, and receive the rest."""


class OptimizerShards(PartialState):
    """Divides an optimizer's state; ``owned_bytes`` of each rank, in rank order, count up."""

    how_to_save = (
        "save with hvkit.Checkpoint (in fit, with its callback() in place of ModelCheckpoint), or "
        "on rank 0 inside `with hvkit.settled(optimizer):`, which every rank enters"
    )
    # Every rank needs all sums of gradients: it averages them before it updates its own.
    whole_accumulators = True

    def __init__(
        self,
        strategy: ShardedOptimizer,
        optimizer: Any,
        owned_bytes: list[int],
        sender: VariableSender,
        group: Group,
    ) -> None:
        self._strategy, self._owned_bytes = strategy, owned_bytes
        self._group = group
        self._owner: dict[int, int] = {}
        super().__init__(optimizer, str(strategy))
        update = optimizer._backend_update_step

        def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
            owners = self.owner_of(variables)
            pairs = list(zip(owners, grads, variables, strict=True))
            sender.leave_out([g for owner, g, _ in pairs if owner != group.rank])
            own = [(g, v) for owner, g, v in pairs if owner == group.rank]
            if own or ON_TENSORFLOW:  # PyTorch's operations on lists need at least one tensor
                update([g for g, _ in own], [v for _, v in own], rate)
            values = [backend_variable(v) for v in variables]
            plan = chunks_by_owner([nbytes(v) for v in values], owners, group.size)
            for number, piece in enumerate(plan):
                sender.send(number, piece, values)

        optimizer._backend_update_step = update_own

    def holds(self, variable: Any) -> bool:
        return self.owner_of([variable])[0] == self._group.rank

    def know(self, variables: Sequence[Any]) -> None:
        self.owner_of(variables)

    def owner_of(self, variables: Sequence[Any]) -> list[int]:
        """The ranks that own variables; new ones get an owner. Every rank passes the same."""
        keys = [id(backend_variable(v)) for v in variables]
        new = [v for v, key in zip(variables, keys, strict=True) if key not in self._owner]
        owners = self._strategy.owners([nbytes(v) for v in new], self._owned_bytes)
        self._owner.update(zip((id(backend_variable(v)) for v in new), owners, strict=True))
        return [self._owner[key] for key in keys]

    @property
    def keeps_whole(self) -> bool:
        return runtime.rank() == 0

    def collected(self) -> Iterator[tuple[Any, np.ndarray[Any, Any]]]:
        self._group.require_all_ranks("hvkit.settled of an optimizer")
        owners = self.owner_of([variable for _, variable in self.slots])
        owned = {
            i: np.array(slot.numpy())
            for i, ((slot, _), owner) in enumerate(zip(self.slots, owners, strict=True))
            if owner == runtime.rank() != 0
        }
        for of_rank in collectives.collect("hvkit.settled", owned):  # on rank 0
            yield from ((self.slots[i][0], array) for i, array in of_rank.items())


def refuse_joint_updates(strategy: ShardedOptimizer, optimizer: Any) -> None:
    if reason := why_not_by_variable(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} does not update each weight on its own, as {strategy} "
            f"needs ({reason}): use an optimizer such as keras.optimizers.AdamW, or "
            "hvkit.Synchronous()"
        )
    if optimizer.use_ema:
        raise ValueError(
            f"{type(optimizer).__name__} has use_ema=True, but with {strategy} no rank holds the "
            "averages of all weights: leave use_ema out, or use hvkit.Synchronous()"
        )


def nbytes(variable: Any) -> int:
    dtype = numpy_dtype(keras.backend.standardize_dtype(variable.dtype))
    return int(math.prod(variable.shape)) * dtype.itemsize


# The trial of an optimizer: steps, ranks, and shapes of weights.
_STEPS = 10
_RANKS = 2
_SHAPES = [(4, 3), (4, 3), (4,), (4,)]

# Keras's own, each of which updates a weight from its own gradient and state.
_BY_VARIABLE = frozenset(
    getattr(keras.optimizers, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl"),
        *("Lamb", "Lion", "Muon", "Nadam", "RMSprop", "SGD"),
    )
    if hasattr(keras.optimizers, name)
)


def why_not_by_variable(optimizer: Any) -> str:
    """Why ranks cannot update some of the weights each; empty if they can."""
    if type(optimizer).__name__ == "ScheduleFreeAdamW":
        return "it changes all weights when it is built"
    if type(optimizer) in _BY_VARIABLE:
        return ""
    before = random.getstate()  # Keras draws seeds from it
    try:
        with outside_graphs():
            return _tried(optimizer)
    except Exception as error:  # of any type: the script's optimizer's
        return f"a trial on small weights failed with {type(error).__name__}: {error}"
    finally:
        random.setstate(before)


def _tried(optimizer: Any) -> str:
    numbers = np.random.default_rng(0)
    begin, slopes = ([numbers.normal(size=shape) for shape in _SHAPES] for _ in range(2))
    whole, *ranks = [new_like(optimizer) for _ in range(1 + _RANKS)]
    weights = [
        [keras.Variable(value, name=f"trial_{i}") for i, value in enumerate(begin)]
        for _ in range(1 + _RANKS)
    ]
    for each, variables in zip((whole, *ranks), weights, strict=True):
        each.build(variables)
    for rank, each in enumerate(ranks):
        _update_only(each, {id(v) for v in weights[1 + rank][rank::_RANKS]})
    for _ in range(_STEPS):
        noise = (numbers.normal(size=shape).astype(np.float32) for shape in _SHAPES)
        gradients = [slope + 0.1 * each for slope, each in zip(slopes, noise, strict=True)]
        for each, variables in zip((whole, *ranks), weights, strict=True):
            sent = [
                keras.ops.convert_to_tensor(g, v.dtype)
                for g, v in zip(gradients, variables, strict=True)
            ]
            each.apply(sent, variables)
        for i, (expected, *of_ranks) in enumerate(zip(*weights, strict=True)):
            if not np.array_equal(of_ranks[i % _RANKS].numpy(), expected.numpy()):
                return "its update of one weight depends on others, or is random"
            for each in of_ranks:
                each.assign(expected)
        for v, *of_ranks in zip(*(each.variables for each in (whole, *ranks)), strict=True):
            if not len(v.shape) and any(each.numpy() != v.numpy() for each in of_ranks):
                return f"it computes {v.name!r} from all weights together"
    return ""


def _update_only(optimizer: Any, updated: set[int]) -> None:
    """Let an optimizer update only the variables with these ids."""
    update = optimizer._backend_update_step

    def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        kept = [(g, v) for g, v in zip(grads, variables, strict=True) if id(v) in updated]
        update([g for g, _ in kept], [v for _, v in kept], rate)

    optimizer._backend_update_step = update_own
