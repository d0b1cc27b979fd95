"""Saves and loads a model in a mesh, its optimizers, and the state of its strategy.

Each rank keeps the strategy's state of its own parameters. A checkpoint holds it for the full
parameters, as without a mesh, so that ranks of another mesh can load it. The state of the
compression, and pending agreements, are saved for each rank, which loads them in the same mesh
only.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.optim import Optimizer

from hvkit.compression import Compression
from hvkit.frameworks.pytorch.model_parallel.model_state import ModelState, rank_state
from hvkit.frameworks.pytorch.model_parallel.parallel_model import ParallelModel
from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import (
    COUNTS,
    SavedState,
    model_plan,
    optimizer_plan,
    strategy_arrays,
    strategy_plan,
    strategy_values,
)
from hvkit.log import logger
from hvkit.mesh import MeshOptions
from hvkit.strategies.strategy import Rounds, Strategy
from hvkit.sync.agreements import SENT
from hvkit.sync.port import Sync

_Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class _Part:
    """This rank's part of a divided model, and of the strategy's state."""

    sync: Sync
    model: ModelState
    own: dict[str, int]  # the numbers of its parameters in the sync

    def by_parameter(self, state: _Arrays) -> dict[str, dict[str, torch.Tensor]]:
        """The strategy's state of this rank's parameters, in the shape of its slices."""
        return strategy_values(state, self.own, self.model.shape_of)

    def slices_of(self, arrays: _Arrays, number: dict[str, int]) -> _Arrays:
        """The same from the state of full parameters, which have these numbers."""
        if COUNTS not in arrays:
            return {}
        numbers = {name: number[name] for name in self.own}
        full = strategy_values(arrays, numbers, self.model.full_shape_of)
        own = {
            name: {key: self.model.slicing(name).tensor_slice(t) for key, t in kept.items()}
            for name, kept in full.items()
        }
        return strategy_arrays(arrays[COUNTS], own, self.own)

    def saved_slices(self, saved: SavedState) -> _Arrays:
        own = {name: self.model.part_of_saved(name, saved) for name in self.own}
        return strategy_arrays(saved.plan[COUNTS].numpy(), own, self.own)


class MeshSync:
    """A ``hvkit.sync.port.Sync`` of a model that is divided when its first batch comes.

    It gets the names of all parameters in the order in which one process numbers them.
    """

    equal_steps = True

    def __init__(
        self,
        strategy: Strategy,
        compression: Compression | None,
        options: MeshOptions,
        names: Sequence[str],
    ) -> None:
        self.strategy, self.compression = strategy, compression
        self.local = isinstance(strategy, Rounds)
        self.mesh = repr(options.mesh)
        self.layout: int | None = None
        self.saved_layout: int | None = None
        self._rank = options.position.rank
        self._number = {name: i for i, name in enumerate(names)}
        self._part: _Part | None = None
        self._in_round = False
        # Loads that wait until the model is divided.
        self._pending: list[Callable[[_Part], None]] = []
        self._settled = 0  # how many open contexts began while loads were pending
        self._full: _Arrays = {}  # on rank 0 inside ``gathered``

    def divided(self, sync: Sync, model: ModelState, own: Sequence[str], layout: int) -> None:
        """Begin with this rank's part: the names of its parameters, in the sync's order."""
        self._part = _Part(sync, model, {name: i for i, name in enumerate(own)})
        self.layout = layout

    def load_pending(self) -> None:
        """Load what a checkpoint has read before the model was divided.

        Until then, and inside ``settled``, the ranks hold the weights that they had agreed on.
        """
        if self._part is not None and not self._settled:
            pending, self._pending = self._pending, []  # none waits any longer if one raises
            for load in pending:
                load(self._part)

    def _when_divided(self, load: Callable[[_Part], None]) -> None:
        if self._part is None or self._pending:
            self._pending.append(load)
        else:
            load(self._part)

    def in_saved_round(self, load: Callable[[], None]) -> None:
        """Load rank-local state if the ranks continue the saved round."""
        self._when_divided(lambda _: load() if self._in_round else None)

    def wait_for_agreements(self) -> None:
        if self._part is not None:
            self._part.sync.wait_for_agreements()

    @contextmanager
    def settled(self) -> Iterator[None]:
        if self._part is not None and not self._pending:
            with self._part.sync.settled():
                yield
            return
        self._settled += 1
        try:
            yield
        finally:
            self._settled -= 1
            self.load_pending()

    def unsettled(self) -> AbstractContextManager[None]:
        return nullcontext() if self._part is None else self._part.sync.unsettled()

    def start_over(self) -> None:
        self._pending.clear()
        self._in_round = False
        if self._part is not None:
            self._part.sync.start_over()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        if (part := self._part) is not None and self.local:
            state = part.sync.state()
            found = part.model.collected(part.by_parameter(state), self._number)
            if part.model.keeps_whole:
                self._full = strategy_arrays(state[COUNTS], found, self._number)
        try:
            yield
        finally:
            self._full = {}

    @property
    def is_divided(self) -> bool:
        return self._part is not None and self.local

    def plan(self) -> dict[str, Any]:
        return strategy_plan(cast(_Part, self._part).sync.state()[COUNTS], list(self._number))

    def shards(self) -> dict[str, Any]:
        part = cast(_Part, self._part)
        return part.model.saved_slices(part.by_parameter(part.sync.state()))

    def state(self) -> _Arrays:
        return self._full

    def load_state(self, arrays: _Arrays, *, in_round: bool) -> None:
        self._load_later(lambda part: part.slices_of(arrays, self._number), in_round=in_round)

    def load_shards(self, saved: SavedState, *, in_round: bool) -> None:
        self._load_later(lambda part: part.saved_slices(saved), in_round=in_round)

    def _load_later(self, own: Callable[[_Part], _Arrays], *, in_round: bool) -> None:
        self._pending.clear()
        saved_layout = self.saved_layout

        def load(part: _Part) -> None:
            self._in_round = in_round and saved_layout == self.layout
            if in_round and not self._in_round and self._rank == 0:
                logger.info(
                    f"{self.strategy} begins a new round: the model was divided in another way "
                    "when it was saved"
                )
            arrays = own(part) if self.local else {}
            if self.local and not arrays:  # saved before a first step
                part.sync.start_over()
            else:
                part.sync.load_state(arrays, in_round=self._in_round)

        self._when_divided(load)

    def rank_state(self) -> _Arrays:
        if self._pending:
            raise ValueError(
                f"the state of {self.strategy} in a checkpoint is loaded when the first batch "
                "shows how to divide the model, and cannot be saved before: call model(x) first"
            )
        if self._part is None:
            return {}
        sync = self._part.sync
        common = {
            key.removeprefix(SENT): array
            for key, array in sync.state().items()
            if not self.local or key.startswith(SENT)
        }
        return sync.rank_state() | common

    def load_rank_state(self, arrays: _Arrays) -> None:
        self.in_saved_round(lambda: cast(_Part, self._part).sync.load_rank_state(arrays))


class _MeshState:
    """Implements ``hvkit.sync.port.ShardedObject``; no sync if the strategy keeps nothing."""

    def __init__(self, parallel: ParallelModel, sync: MeshSync | None) -> None:
        self._parallel, self._sync = parallel, sync

    @property
    def is_divided(self) -> bool:
        return self._parallel.state is not None

    @property
    def reads_shards(self) -> bool:
        return self.is_divided or self._parallel.is_deferred

    @property
    def _state(self) -> ModelState:
        return cast(ModelState, self._parallel.state)

    def load_rank_state(self, load: Callable[[], None]) -> None:
        if self._sync is not None:
            self._sync.in_saved_round(load)

    def load_shards(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        self._parallel.when_divided(functools.partial(self._load, saved, load))

    @abstractmethod
    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None: ...


class MeshModelState(_MeshState):
    def rank_state(self) -> dict[str, Any]:
        return self._state.slices() if self.is_divided else {}

    def shards(self) -> dict[str, Any]:
        names = set(self.plan()["names"].values())  # without buffers that are not saved
        own = self._state.slices()
        return self._state.saved_slices({n: t for n, t in own.items() if n in names})

    def plan(self) -> dict[str, Any]:
        return model_plan(*self._state.named_state())

    @torch.no_grad()
    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        expected = set(self.plan()["names"].values())
        if expected != saved.values.keys():
            missing, unknown = expected - saved.values.keys(), saved.values.keys() - expected
            raise ValueError(f"it lacks {sorted(missing)}, and has unknown {sorted(unknown)}")
        for name, own in self._state.slices().items():
            if name in expected:
                found = self._state.part_of_saved(name, saved)
                if found.shape != own.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(own.shape)} on this rank, the saved part "
                        f"{tuple(found.shape)}"
                    )
                own.copy_(found)
        names = saved.plan["names"]
        if rest := {k: v for k, v in saved.plan["state"].items() if k not in names}:
            load(rest)


class MeshOptimizerState(_MeshState):
    def __init__(
        self, parallel: ParallelModel, sync: MeshSync | None, optimizer: Optimizer
    ) -> None:
        super().__init__(parallel, sync)
        self._optimizer = optimizer

    def rank_state(self) -> dict[str, Any]:
        return rank_state(self._optimizer)

    def shards(self) -> dict[str, Any]:
        state = self._optimizer.state
        return self._state.saved_slices({n: state.get(p) for n, p in self._named().items()})

    def plan(self) -> dict[str, Any]:
        return optimizer_plan(rank_state(self._optimizer), list(self._named()))

    def _named(self) -> dict[str, torch.Tensor]:
        return self._state.named(self._optimizer)

    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        state = {
            i: self._state.part_of_saved(name, saved)
            for i, (name, p) in enumerate(self._named().items())
            if name in saved.values and not p.is_meta
        }
        # A scheduler may have changed the rates meanwhile: they stay as they are.
        groups = rank_state(self._optimizer)["param_groups"]
        load({"state": state | saved.plan["other"], "param_groups": groups})
