"""Optimizers of which each rank holds the state of some weights.

Keras makes the state of all weights when it builds an optimizer, and numbers it. So a weight of
another rank gets a placeholder without elements in the place of its state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary, ref

import numpy as np

from hvkit import runtime
from hvkit.frameworks.keras.backends import numpy_dtype, set_anew
from hvkit.frameworks.keras.optimizers import inner_optimizer, new_like, parts_of

# By optimizer: the innermost ones, which do the update.
_states: WeakKeyDictionary[Any, PartialState] = WeakKeyDictionary()


def _states_of(optimizer: Any) -> list[PartialState]:
    """Those of an optimizer, or of the ones inside it; empty if no state is divided."""
    return [_states[part] for part in parts_of(inner_optimizer(optimizer)) if part in _states]


def ids_of_slots(optimizers: Sequence[Any]) -> set[int]:
    states = [state for each in optimizers for state in _states_of(each)]
    return {id(slot) for state in states for slot, _ in state.slots}


@contextmanager
def gathered(optimizer: Any) -> Iterator[None]:
    """A context in which rank 0 holds an optimizer's whole state; a collective if it is divided."""
    with ExitStack() as stack:
        for state in _states_of(optimizer):
            stack.enter_context(state.gathered())
        yield


@contextmanager
def unfolded(optimizer: Any) -> Iterator[None]:
    """A context with room for an optimizer's whole state, to load it."""
    with ExitStack() as stack:
        for state in _states_of(optimizer):
            stack.enter_context(state.unfolded())
        yield


# The gradients that Keras adds up before an update.
ACCUMULATOR = "gradient_accumulator"


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
            if self.whole_accumulators and name == ACCUMULATOR:
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
            self._refuse_part()
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

    @abstractmethod
    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 holds the whole state; a collective."""

    def _divide(self) -> None:
        """Keep this rank's part of a state that was made before."""
        optimizer: Any = self._optimizer()
        variables = optimizer._trainable_variables
        self.know(variables)
        self.slots += slots_of(optimizer, variables)
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

    def _refuse_part(self) -> None:
        """Raise if this rank holds only its own part of the state."""
        if not self._whole:
            raise ValueError(
                f"saving {type(self._optimizer()).__name__} on rank {runtime.rank()} would save "
                f"only the part of this rank: {self.how_to_save}"
            )


def slots_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The state of single weights, and these: as an equal optimizer makes it, in the same order."""
    twin = new_like(optimizer)
    make = twin.add_variable_from_reference
    of: dict[int, Any] = {}

    def note(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
        made = make(reference_variable, name=name, initializer=initializer)
        if name != ACCUMULATOR:
            of[id(made)] = reference_variable
        return made

    twin.add_variable_from_reference = note
    twin.build(variables)
    return [
        (slot, of[id(twin_slot)])
        for slot, twin_slot in zip(optimizer.variables, twin.variables, strict=True)
        if id(twin_slot) in of
    ]
