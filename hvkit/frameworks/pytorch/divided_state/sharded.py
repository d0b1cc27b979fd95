"""Optimizers whose state is divided among the ranks: each updates the parameters that it owns.

While an optimizer steps, the parameters of other ranks have no gradient, so that it skips them and
keeps no state for them. Afterwards the owners send their parameters to all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit import runtime
from hvkit.communication import large_objects
from hvkit.communication.encoding import bytes_of
from hvkit.communication.group import Group, refuse_in_group
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.divided_state.trials import why_not_by_element, why_not_by_parameter
from hvkit.frameworks.pytorch.optimizers import (
    has_step_length,
    optimizers_inside,
)
from hvkit.frameworks.pytorch.step_hooks import UpdateHooks
from hvkit.strategies import FullyShard, ShardedOptimizer
from hvkit.strategies.strategy import Strategy
from hvkit.sync.chunking import pieces
from hvkit.sync.update_hooks import Closure, Feature, Order
from hvkit.watch.calls import call

_SHARDS = "_hvkit_shards"


class OptimizerShards:
    """Divides the state of the optimizers of one model among the ranks.

    Args:
        strategy: chooses the owners.
        name: the same on every rank, and no other model's.
        group: the ranks that train it; owners are places in it.
    """

    def __init__(self, strategy: ShardedOptimizer, name: str, group: Group) -> None:
        self.group = group
        self._strategy = strategy
        self._name = name
        self._wire = Wire("weights", group)
        self._held = [0] * group.size
        self._owner: dict[torch.Tensor, int] = {}
        self._steps = itertools.count(1)

    def attach(self, optimizer: Optimizer, hooks: UpdateHooks) -> None:
        """Divide this optimizer's state from now on."""
        # In the instance, so that it may refer to the optimizer; pickled ones leave it out.
        vars(optimizer)[_SHARDS] = shards = _Shards(self, optimizer)
        shards.keep_own_state()
        hooks.add(shards.feature())
        optimizer.register_state_dict_pre_hook(shards.refuse_partial_state)
        vars(optimizer)["__getstate__"] = shards.refuse_copy
        optimizer.register_load_state_dict_post_hook(lambda _: shards.keep_own_state())

    def owner_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """The ranks that own parameters; new ones get an owner. Every rank passes the same."""
        held = list(parameters)
        new = [p for p in dict.fromkeys(held) if p not in self._owner]
        owners = self._strategy.owners([p.nbytes for p in new], self._held)
        self._owner.update(zip(new, owners, strict=True))
        return [self._owner[p] for p in held]

    @torch.no_grad()
    def send(self, parameters: Sequence[torch.Tensor], step: str) -> None:
        """Send the parameters that this rank owns, and take over the others; a collective.

        Args:
            parameters: those that the step has changed.
            step: the call that the script made.
        """
        owners = self.owner_of(parameters)
        plan = pieces([p.nbytes for p in parameters], owners, self.group.size)
        with call(step, next(self._steps), self._name):
            started: list[tuple[int, list[list[int]]]] = []
            for number, piece in enumerate(plan):
                mine = [bytes_of(parameters[i]) for i in piece[self.group.rank]]
                device = parameters[0].device
                sent = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
                handle = self._wire.start_gather(sent, f"{self._name}.shares.{number}")
                started.append((handle, piece))
                if len(started) > 1:  # one travels while the next is put together
                    self._receive(*started.pop(0), parameters)
            for each in started:
                self._receive(*each, parameters)

    def _receive(
        self, handle: int, piece: list[list[int]], parameters: Sequence[torch.Tensor]
    ) -> None:
        received = self._wire.wait(handle)
        start = 0
        for rank, numbers in enumerate(piece):
            for i in numbers:
                p = parameters[i]
                if rank != self.group.rank:
                    p.copy_(_from_bytes(received[start : start + p.nbytes], p))
                start += p.nbytes


class PartOfState:
    """What refuses to save the part of an optimizer's state that this rank has as the whole.

    Args:
        optimizer: its state is divided among the ranks.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        # Whether the optimizer holds the state of all ranks for a while.
        self._whole = False

    def refuse_copy(self) -> Any:
        """In place of ``__getstate__``, which pickling and copying call.

        Raises:
            ValueError: as ``refuse_partial_state``.
        """
        raise partial_state("a copy", self._optimizer, "optimizer")

    def refuse_partial_state(self, optimizer: Optimizer) -> None:
        """Raise if this rank holds only its own part of the state.

        Raises:
            ValueError: names the ways to save all of it.
        """
        if not self._whole:
            raise partial_state("state_dict()", optimizer, "optimizer")


class _Shards(PartOfState):
    """One optimizer whose state is divided."""

    def __init__(self, shards: OptimizerShards, optimizer: Optimizer) -> None:
        super().__init__(optimizer)
        self._shards = shards
        self._updated: list[torch.Tensor] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def feature(self) -> Feature:
        """What it does around each update."""
        return Feature(
            Order.DIVISION,
            before=self._refuse_closure,
            gradients=self._hide_gradients,
            after=self._send,
            failed=self._show_gradients,
        )

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        """Hide the gradients of parameters that other ranks own."""
        self._updated = [p for p in self._parameters() if p.grad is not None]
        owners = self._shards.owner_of(self._updated)
        for p, owner in zip(self._updated, owners, strict=True):
            if owner != self._shards.group.rank:
                self._hidden.append((p, p.grad))
                p.grad = None

    def _show_gradients(self, optimizer: Optimizer) -> None:
        """Put the gradients back that ``_hide_gradients`` has hidden."""
        for p, gradient in self._hidden:
            if p.grad is None:  # else it is newer
                p.grad = gradient
        self._hidden.clear()

    def _send(self, optimizer: Optimizer) -> None:
        """Send what this rank has updated."""
        self._show_gradients(optimizer)
        if self._updated:
            self._shards.send(self._updated, f"{type(optimizer).__name__}.step()")
        self._updated = []

    def _refuse_closure(self, optimizer: Optimizer, closure: Closure | None) -> None:
        """Raise if the step computes gradients itself: they could not be hidden.

        Raises:
            ValueError: the script passed a closure.
        """
        if closure is not None:
            raise ValueError(
                f"{type(optimizer).__name__}.step(closure) computes gradients inside the step, but "
                "ShardedOptimizer updates only some of the parameters on each rank: call "
                "backward() before step()"
            )

    def keep_own_state(self) -> None:
        """Drop the state of parameters that other ranks own."""
        parameters = self._parameters()
        for p, owner in zip(parameters, self._shards.owner_of(parameters), strict=True):
            if owner != self._shards.group.rank:
                self._optimizer.state.pop(p, None)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        refuse_in_group("hvkit.settled of an optimizer", self._shards.group)
        parameters = self._parameters()
        owners = self._shards.owner_of(parameters)
        own = {
            i: _in_host_memory(self._optimizer.state[p])
            for i, (p, owner) in enumerate(zip(parameters, owners, strict=True))
            if owner == runtime.rank() != 0 and p in self._optimizer.state
        }
        state = self._optimizer.state
        before = dict(state)
        everything = dict(before)
        for theirs in large_objects.collect("hvkit.settled", own):
            everything.update({parameters[i]: values for i, values in theirs.items()})
        # In the order in which one process holds them.
        state.clear()
        state.update({p: everything[p] for p in parameters if p in everything})
        self._whole = runtime.rank() == 0
        try:
            yield
        finally:
            self._whole = False
            state.clear()
            state.update(before)

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]


def is_sharded(optimizer: Optimizer) -> bool:
    """Whether this optimizer's state is divided among the ranks."""
    return _SHARDS in vars(optimizer)


def gathered(optimizer: Optimizer) -> Any:
    """A context in which rank 0 holds the optimizer's whole state; a collective."""
    return vars(optimizer)[_SHARDS].gathered()


def partial_state(what: str, of: object, argument: str) -> ValueError:
    """The error for what would hold one rank's part of a divided state.

    Args:
        what: the script's call, or what it makes.
        of: a model or an optimizer.
        argument: what it is, for the fix.
    """
    return ValueError(
        f"{what} of {type(of).__name__} on rank {runtime.rank()} would hold only the part of this "
        "rank: save with hvkit.Checkpoint, or call state_dict() on rank 0 inside `with "
        f"hvkit.settled({argument}):`, which every rank enters"
    )


def refuse_joint_updates(strategy: Strategy, optimizer: Optimizer) -> None:
    """Raise if an optimizer does not update each parameter, or each part of one, on its own.

    Raises:
        ValueError: names the optimizer, and what it does.
    """
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


def _from_bytes(data: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if data.storage_offset() % parameter.element_size():  # behind values of fewer bytes
        data = data.clone()
    return data.view(parameter.dtype).view(parameter.shape)


def _in_host_memory(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return values.cpu()
    if isinstance(values, dict):
        return {key: _in_host_memory(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_in_host_memory(value) for value in values)
    return values
