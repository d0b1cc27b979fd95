"""Optimizers whose state is divided among the ranks: each updates the parameters that it owns.

While an optimizer steps, the parameters of other ranks have no gradient, so that it skips them and
keeps no state for them. Afterwards the owners send their parameters to all.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from hvkit import runtime
from hvkit.communication import collectives
from hvkit.communication.encoding import bytes_of
from hvkit.communication.exchanges import chunks_by_owner
from hvkit.frameworks.pytorch.divided_state.trials import why_not_by_element, why_not_by_parameter
from hvkit.frameworks.pytorch.optimizers import has_step_length, optimizers_inside, parameters_of
from hvkit.frameworks.pytorch.step_hooks import (
    Closure,
    Feature,
    HiddenGradients,
    Order,
    UpdateHooks,
)
from hvkit.frameworks.pytorch.wire import Wire
from hvkit.runtime import Group
from hvkit.strategies import FullyShard, ShardedOptimizer
from hvkit.strategies.strategy import Strategy
from hvkit.watch.calls import call

_DIVIDED = "_hvkit_divided_state"


class OwnedParameters:
    """Which rank of a group updates which parameter of one model; sends them after the update."""

    def __init__(self, strategy: ShardedOptimizer, name: str, group: Group) -> None:
        self.group = group
        self._strategy = strategy
        self._name = name
        self._wire = Wire("weights", group)
        self._owned_bytes = [0] * group.size  # by rank
        self._owner: dict[torch.Tensor, int] = {}
        self._steps = itertools.count(1)

    def owner_of(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The ranks that own parameters; new ones get an owner. Every rank passes the same."""
        new = [p for p in dict.fromkeys(parameters) if p not in self._owner]
        owners = self._strategy.owners([p.nbytes for p in new], self._owned_bytes)
        self._owner.update(zip(new, owners, strict=True))
        return [self._owner[p] for p in parameters]

    @torch.no_grad()
    def send(self, parameters: Sequence[torch.Tensor], step: str) -> None:
        """Send what this rank owns, and take over the rest, in a script's call; a collective."""
        owners = self.owner_of(parameters)
        plan = chunks_by_owner([p.nbytes for p in parameters], owners, self.group.size)
        with call(step, next(self._steps), self._name):
            started: list[tuple[int, list[list[int]]]] = []
            for number, piece in enumerate(plan):
                sent = owned_bytes(parameters, piece, self.group)
                handle = self._wire.start_gather(sent, f"{self._name}.shares.{number}")
                started.append((handle, piece))
                if len(started) > 1:  # one travels while the next is put together
                    self._receive(*started.pop(0), parameters)
            for each in started:
                self._receive(*each, parameters)

    def _receive(
        self, handle: int, piece: list[list[int]], parameters: Sequence[torch.Tensor]
    ) -> None:
        set_others(parameters, piece, self._wire.wait(handle), self.group)


def owned_bytes(
    parameters: Sequence[torch.Tensor], piece: list[list[int]], group: Group
) -> torch.Tensor:
    """The bytes of this rank's parameters, of those whose indices a piece has by rank."""
    owned = [bytes_of(parameters[i]) for i in piece[group.rank]]
    return torch.cat([*owned, bytes_of(parameters[0])[:0]])


def set_others(
    parameters: Sequence[torch.Tensor], piece: list[list[int]], received: torch.Tensor, group: Group
) -> None:
    """Set the other ranks' parameters of a piece from the bytes of all ranks."""
    start = 0
    for rank, numbers in enumerate(piece):
        for p in (parameters[i] for i in numbers):
            data = received[start : start + p.nbytes]
            start += p.nbytes
            if rank != group.rank:
                if data.storage_offset() % p.element_size():  # behind values of fewer bytes
                    data = data.clone()
                p.copy_(data.view(p.dtype).view(p.shape))


class PartOfState(ABC):
    """Refuses to save a part of a state as the whole; an attribute of the optimizer."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Whether a part of the state, or the state of all ranks, may be saved now.
        self._may_save = False
        vars(optimizer)[_DIVIDED] = self
        optimizer.register_state_dict_pre_hook(self._refuse_partial_state)
        vars(optimizer)["__getstate__"] = self._refuse_copy

    def _refuse_copy(self) -> Any:
        """Replaces ``__getstate__``, which pickling and copying call."""
        raise partial_state("a copy", self._optimizer, "optimizer")

    def _refuse_partial_state(self, optimizer: Optimizer) -> None:
        if not self._may_save:
            raise partial_state("state_dict()", optimizer, "optimizer")

    @abstractmethod
    def _full_state(self) -> Mapping[torch.Tensor, Any] | None:
        """The state of all parameters, in the optimizer's order; None on ranks but one."""

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the full state on rank 0 for a while; a collective."""
        full, state = self._full_state(), self._optimizer.state
        before = dict(state)
        if full is not None:
            state.clear()
            state.update(full)
            self._may_save = True
        try:
            yield
        finally:
            self._may_save = False
            state.clear()
            state.update(before)

    def _parameters(self) -> list[torch.Tensor]:
        return parameters_of(self._optimizer)


class OwnedState(PartOfState):
    """Keeps the state of the parameters that this rank owns; an attribute of the optimizer."""

    def __init__(
        self, parameters: OwnedParameters, optimizer: Optimizer, hooks: UpdateHooks
    ) -> None:
        super().__init__(optimizer)
        self._owned = parameters
        self._updated: list[torch.Tensor] = []
        self._hidden = HiddenGradients()
        self._drop_state_of_others(optimizer)
        optimizer.register_load_state_dict_post_hook(self._drop_state_of_others)
        hooks.add(
            Feature(
                Order.DIVISION,
                before=self._refuse_closure,
                gradients=self._hide_gradients,
                after=self._send,
                failed=self._hidden.show,
            )
        )

    def _of_others(self, parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        owners = zip(parameters, self._owned.owner_of(parameters), strict=True)
        return [p for p, owner in owners if owner != self._owned.group.rank]

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        self._updated = [p for p in self._parameters() if p.grad is not None]
        self._hidden.hide(self._of_others(self._updated))

    def _send(self, optimizer: Optimizer) -> None:
        self._hidden.show()
        if self._updated:
            self._owned.send(self._updated, f"{type(optimizer).__name__}.step()")
        self._updated = []

    def _refuse_closure(self, optimizer: Optimizer, closure: Closure | None) -> None:
        """Raise if the step computes gradients itself: they could not be hidden."""
        if closure is not None:
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) computes gradients inside the step, but "
                "ShardedOptimizer updates only some of the parameters on each rank: call "
                "backward() before step()"
            )

    def _drop_state_of_others(self, optimizer: Optimizer) -> None:
        for p in self._of_others(self._parameters()):
            optimizer.state.pop(p, None)

    def _full_state(self) -> Mapping[torch.Tensor, Any] | None:
        self._owned.group.require_all_ranks("hvkit.settled of an optimizer")
        parameters, state = self._parameters(), self._optimizer.state
        owners = self._owned.owner_of(parameters)
        owned = {
            i: tree_map_only(torch.Tensor, torch.Tensor.cpu, state[p])
            for i, (p, owner) in enumerate(zip(parameters, owners, strict=True))
            if owner == runtime.rank() != 0 and p in state
        }
        everything = dict(state)
        for received in collectives.collect("hvkit.settled", owned):
            everything.update({parameters[i]: values for i, values in received.items()})
        if runtime.rank():
            return None
        return {p: everything[p] for p in parameters if p in everything}


def is_sharded(optimizer: Optimizer) -> bool:
    return isinstance(part_of_state(optimizer), OwnedState)


def gathered(optimizer: Optimizer) -> AbstractContextManager[None]:
    """A context in which rank 0 holds the optimizer's full state; a collective."""
    part = part_of_state(optimizer)
    return nullcontext() if part is None else part.gathered()


def part_of_state(optimizer: Optimizer) -> PartOfState | None:
    """The object that refuses to save a part of the state; None if the state is not divided."""
    found: PartOfState | None = vars(optimizer).get(_DIVIDED)
    return found


def partial_state(what: str, of: object, argument: str) -> ValueError:
    """The error for a copy or file with only one rank's part of a model or optimizer."""
    return ValueError(
        f"{what} of {type(of).__name__} on rank {runtime.rank()} would hold only the part of this "
        "rank: save with hvkit.Checkpoint, or call state_dict() on rank 0 inside `with "
        f"hvkit.settled({argument}):`, which every rank enters"
    )


def refuse_joint_updates(strategy: Strategy, optimizer: Optimizer) -> None:
    """Raise if an optimizer does not update each parameter, or each part of one, on its own."""
    name = type(optimizer).__name__
    instead = "use an optimizer such as torch.optim.AdamW, or hvkit.Synchronous()"
    if has_step_length(optimizer) or optimizers_inside(optimizer):
        raise ValueError(
            f"{name} computes its step from all parameters together, but {strategy} updates each "
            f"on one rank: {instead}"
        )
    if isinstance(strategy, ShardedOptimizer) and (reason := why_not_by_parameter(optimizer)):
        raise ValueError(
            f"{name} does not update each parameter on its own, as {strategy} needs ({reason}): "
            f"{instead}"
        )
    if isinstance(strategy, FullyShard) and (reason := why_not_by_element(optimizer)):
        raise ValueError(
            f"{name} computes with whole parameters, which no rank holds with {strategy} "
            f"({reason}): {instead}"
        )
