"""Optimizers whose state is divided among the ranks: each updates the variables that it owns.

Keras makes the state of all variables when it builds an optimizer, and numbers it. So a variable
of another rank gets a placeholder without elements instead of its state, and the update leaves it
out. Afterwards the owners send their variables to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from weakref import ref

import keras
import numpy as np

from hvkit import runtime
from hvkit.communication import large_objects
from hvkit.communication.group import Group, refuse_in_group
from hvkit.frameworks.keras.backends import (
    ON_TENSORFLOW,
    backend_variable,
    numpy_dtype,
    set_anew,
)
from hvkit.frameworks.keras.divided_state import remember
from hvkit.frameworks.keras.trials import why_not_by_variable
from hvkit.strategies import ShardedOptimizer
from hvkit.sync.chunking import pieces

# The gradients that Keras adds up before an update; every rank needs all of them.
_ACCUMULATOR = "gradient_accumulator"


class ShareExchange(Protocol):
    """Sends what ranks have updated, with the collectives of a backend."""

    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Note the gradients of variables that other ranks update."""

    def send(self, number: int, piece: list[list[int]], variables: Sequence[Any]) -> None:
        """Send some of the variables that this rank owns, and take over others; a collective.

        Args:
            number: of the piece.
            piece: the numbers of variables by owner, in rank order.
            variables: the backend's own.
        """


class OptimizerShards:
    """Divides the state of one optimizer among the ranks.

    Args:
        strategy: chooses the owners.
        optimizer: one that updates variables, not one that scales the loss.
        held: bytes that each rank owns already, in rank order; counts up.
        shares: sends what ranks have updated.
        group: these ranks; owners are places in it.
    """

    def __init__(
        self,
        strategy: ShardedOptimizer,
        optimizer: Any,
        held: list[int],
        shares: ShareExchange,
        group: Group,
    ) -> None:
        self._strategy = strategy
        self._group = group
        self._held = held
        self._shares = shares
        # Weak: the optimizer's methods keep this object.
        self._optimizer = ref(optimizer)
        self._owner: dict[int, int] = {}
        # The state of single variables, with the variable that each part belongs to.
        self._slots: list[tuple[Any, Any]] = []
        # Whether this rank holds the state of all variables for a while.
        self._whole = False
        remember(optimizer, self)
        self._follow(optimizer)
        if optimizer.built:
            self._divide(optimizer)

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make, use, save and load its state."""
        make, update = optimizer.add_variable_from_reference, optimizer._backend_update_step
        build = optimizer.build
        save, load = optimizer.save_own_variables, optimizer.load_own_variables

        def build_divided(variables: Sequence[Any]) -> None:
            self.owner_of(variables)
            build(variables)
            self._refuse_shared_state(optimizer)

        def make_slot(reference_variable: Any, name: Any = None, initializer: Any = "zeros") -> Any:
            if name == _ACCUMULATOR:
                return make(reference_variable, name=name, initializer=initializer)
            if self.owner_of([reference_variable])[0] == self._group.rank:
                slot = make(reference_variable, name=name, initializer=initializer)
            else:
                slot = optimizer.add_variable((0,), "zeros", reference_variable.dtype, name=name)
            self._slots.append((slot, reference_variable))
            return slot

        def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
            owners = self.owner_of(variables)
            mine = [i for i, owner in enumerate(owners) if owner == self._group.rank]
            self._shares.leave_out([g for i, g in enumerate(grads) if i not in mine])
            if mine or ON_TENSORFLOW:  # PyTorch's operations on lists need at least one tensor
                update([grads[i] for i in mine], [variables[i] for i in mine], rate)
            self._send([backend_variable(v) for v in variables], owners)

        def save_whole(store: Any) -> None:
            self._refuse_partial_state()
            save(store)

        def load_own(store: Any) -> None:
            with self.unfolded():
                load(store)

        optimizer.build = build_divided
        optimizer.add_variable_from_reference = make_slot
        optimizer._backend_update_step = update_own
        optimizer.save_own_variables = save_whole
        optimizer.load_own_variables = load_own

    def _divide(self, optimizer: Any) -> None:
        """Keep this rank's part of a state that was made before."""
        variables = optimizer._trainable_variables
        self.owner_of(variables)
        for slot, variable in slots_of(optimizer, variables):
            self._slots.append((slot, variable))
        self._refuse_shared_state(optimizer)
        self._fold()

    def _refuse_shared_state(self, optimizer: Any) -> None:
        """Raise if the optimizer keeps arrays that are not made for single weights.

        Raises:
            ValueError: names the first one.
        """
        known = {id(slot) for slot in self.slots()}
        known |= {id(v) for v in getattr(optimizer, "_accumulated_gradients", ())}
        for v in optimizer.variables:
            if id(v) not in known and len(v.shape):
                raise ValueError(
                    f"{type(optimizer).__name__} keeps {v.path} of shape {tuple(v.shape)}, which "
                    f"Keras does not count to one weight: {self._strategy} needs an optimizer "
                    "whose state has the shape of the weights, such as keras.optimizers.AdamW"
                )

    def owner_of(self, variables: Sequence[Any]) -> list[int]:
        """The ranks that own variables; new ones get an owner. Every rank passes the same."""
        keys = [id(backend_variable(v)) for v in variables]
        new = [v for v, key in zip(variables, keys, strict=True) if key not in self._owner]
        owners = self._strategy.owners([_bytes(v) for v in new], self._held)
        self._owner.update(zip((id(backend_variable(v)) for v in new), owners, strict=True))
        return [self._owner[key] for key in keys]

    def _send(self, variables: Sequence[Any], owners: Sequence[int]) -> None:
        """Send the variables that this rank owns, and take over the others; a collective."""
        plan = pieces([_bytes(v) for v in variables], owners, self._group.size)
        for number, piece in enumerate(plan):
            self._shares.send(number, piece, variables)

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._slots]

    def _fold(self) -> None:
        """Drop the state of variables that other ranks own."""
        for slot, variable in self._slots:
            if self.owner_of([variable])[0] != self._group.rank:
                set_anew(slot, np.zeros(0, numpy_dtype(slot.dtype)))

    @contextmanager
    def unfolded(self) -> Iterator[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        for slot, variable in self._slots:
            if self.owner_of([variable])[0] != self._group.rank:
                set_anew(slot, np.zeros(variable.shape, numpy_dtype(slot.dtype)))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._fold()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        refuse_in_group("hvkit.settled of an optimizer", self._group)
        owners = self.owner_of([variable for _, variable in self._slots])
        own = {
            i: np.array(slot.numpy())
            for i, ((slot, _), owner) in enumerate(zip(self._slots, owners, strict=True))
            if owner == runtime.rank() != 0
        }
        with ExitStack() as stack:
            if runtime.rank() == 0:
                stack.enter_context(self.unfolded())
            for theirs in large_objects.collect("hvkit.settled", own):  # on rank 0
                for i, array in theirs.items():
                    self._slots[i][0].assign(array)
            yield

    def _refuse_partial_state(self) -> None:
        """Raise if this rank holds only its own part of the state.

        Raises:
            ValueError: names the ways to save all of it.
        """
        if not self._whole:
            raise ValueError(
                f"saving {type(self._optimizer()).__name__} on rank {runtime.rank()} would save "
                "only the part of this rank: save with hvkit.Checkpoint (in fit, with its "
                "callback() in place of ModelCheckpoint), or on rank 0 inside `with "
                "hvkit.settled(optimizer):`, which every rank enters"
            )


def refuse_joint_updates(strategy: ShardedOptimizer, optimizer: Any) -> None:
    """Raise if an optimizer does not update each weight on its own.

    Raises:
        ValueError: names the optimizer, and what it does.
    """
    if type(optimizer).__name__ == "ScheduleFreeAdamW":
        raise ValueError(
            f"ScheduleFreeAdamW changes all weights when it is built, but with {strategy} no rank "
            "holds the state of all: use keras.optimizers.AdamW, or hvkit.Synchronous()"
        )
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


def slots_of(optimizer: Any, variables: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The optimizer's variables with the state of single weights, and these weights.

    Keras does not note which belong together. An equal optimizer, built for the same weights,
    makes them in the same order.
    """
    twin = type(optimizer).from_config(optimizer.get_config())
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
        (own, of[id(theirs)])
        for own, theirs in zip(optimizer.variables, twin.variables, strict=True)
        if id(theirs) in of
    ]


def _bytes(variable: Any) -> int:
    size: int = (
        math.prod(variable.shape)
        * numpy_dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
    )
    return size
