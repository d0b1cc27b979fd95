"""Optimizers whose state is divided among the ranks: each updates the variables that it owns.

The update leaves out the variables of other ranks, of whose state there are placeholders
(``partial_state``). Afterwards the owners send their variables to all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import keras
import numpy as np

from hvkit import runtime
from hvkit.communication import messages
from hvkit.communication.exchanges import chunks_by_owner
from hvkit.communication.group import Group, refuse_in_group
from hvkit.frameworks.keras.backends import (
    ON_TENSORFLOW,
    backend_variable,
    numpy_dtype,
)
from hvkit.frameworks.keras.divided_state import remember
from hvkit.frameworks.keras.partial_state import PartialState
from hvkit.frameworks.keras.trials import why_not_by_variable
from hvkit.strategies import ShardedOptimizer


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
        self._owner: dict[int, int] = {}
        # Every rank needs all sums of gradients: it averages them before it updates its own.
        self._state = PartialState(
            optimizer,
            self._owns,
            str(strategy),
            "save with hvkit.Checkpoint (in fit, with its callback() in place of "
            "ModelCheckpoint), or on rank 0 inside `with hvkit.settled(optimizer):`, which every "
            "rank enters",
            whole_accumulators=True,
        )
        remember(optimizer, self)
        self._follow(optimizer)
        if optimizer.built:
            self.owner_of(optimizer._trainable_variables)
            self._state.divide()

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make and use its state."""
        build, update = optimizer.build, optimizer._backend_update_step

        def build_divided(variables: Sequence[Any]) -> None:
            self.owner_of(variables)
            build(variables)
            self._state.refuse_shared()

        def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
            owners = self.owner_of(variables)
            mine = [i for i, owner in enumerate(owners) if owner == self._group.rank]
            self._shares.leave_out([g for i, g in enumerate(grads) if i not in mine])
            if mine or ON_TENSORFLOW:  # PyTorch's operations on lists need at least one tensor
                update([grads[i] for i in mine], [variables[i] for i in mine], rate)
            self._send([backend_variable(v) for v in variables], owners)

        optimizer.build = build_divided
        optimizer._backend_update_step = update_own

    def _owns(self, variable: Any) -> bool:
        return self.owner_of([variable])[0] == self._group.rank

    def owner_of(self, variables: Sequence[Any]) -> list[int]:
        """The ranks that own variables; new ones get an owner. Every rank passes the same."""
        keys = [id(backend_variable(v)) for v in variables]
        new = [v for v, key in zip(variables, keys, strict=True) if key not in self._owner]
        owners = self._strategy.owners([_bytes(v) for v in new], self._held)
        self._owner.update(zip((id(backend_variable(v)) for v in new), owners, strict=True))
        return [self._owner[key] for key in keys]

    def _send(self, variables: Sequence[Any], owners: Sequence[int]) -> None:
        """Send the variables that this rank owns, and take over the others; a collective."""
        plan = chunks_by_owner([_bytes(v) for v in variables], owners, self._group.size)
        for number, piece in enumerate(plan):
            self._shares.send(number, piece, variables)

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._state.slots]

    def unfolded(self) -> AbstractContextManager[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        return self._state.unfolded()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        refuse_in_group("hvkit.settled of an optimizer", self._group)
        owners = self.owner_of([variable for _, variable in self._state.slots])
        own = {
            i: np.array(slot.numpy())
            for i, ((slot, _), owner) in enumerate(zip(self._state.slots, owners, strict=True))
            if owner == runtime.rank() != 0
        }
        with ExitStack() as stack:
            if runtime.rank() == 0:
                stack.enter_context(self.unfolded())
            for theirs in messages.collect("hvkit.settled", own):  # on rank 0
                for i, array in theirs.items():
                    self._state.slots[i][0].assign(array)
            yield


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


def _bytes(variable: Any) -> int:
    size: int = (
        math.prod(variable.shape)
        * numpy_dtype(keras.backend.standardize_dtype(variable.dtype)).itemsize
    )
    return size
