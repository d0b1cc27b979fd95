"""What a strategy or a compression keeps of a model in a mesh, for checkpoints.

Each rank keeps state of its own part. A checkpoint holds what the strategy keeps of each parameter
whole, as without a mesh, so that ranks of another mesh find it. What the compression keeps, and
what an agreement will still add, is saved for each rank, which finds it in the same mesh only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from hvkit.compression import Compression
from hvkit.frameworks.pytorch.model_parallel.parts import ModelParts
from hvkit.frameworks.pytorch.model_parallel.shares import (
    COUNTS,
    TRAINED,
    SavedState,
    part,
    strategy_arrays,
    strategy_plan,
)
from hvkit.log import logger
from hvkit.mesh import MeshOptions
from hvkit.strategies.strategy import Rounds, Strategy
from hvkit.sync.agreements import SENT
from hvkit.sync.port import Keeper

_Arrays = dict[str, np.ndarray[Any, Any]]


class MeshKeeper:
    """A ``hvkit.sync.port.Keeper`` of a model that is divided when its first batch comes.

    Args:
        strategy: as passed to ``distribute``.
        compression: as passed to ``distribute``.
        options: about the mesh.
        names: of all parameters, in the order in which one process numbers them.

    Attributes:
        layout: a number for who holds what; None before the model is divided.
        saved_layout: of the checkpoint that is loaded next.
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
        # By the number that the keeper of this rank's part gives them.
        self._own: list[str] = []
        self._keeper: Keeper | None = None
        self._parts: ModelParts | None = None
        self._in_round = False
        # What a checkpoint has loaded before the model is divided.
        self._waiting: list[Callable[[], None]] = []
        # How many ``settled`` are under way that began before this was loaded.
        self._showing = 0
        # The whole state, on rank 0 inside ``gathered``.
        self._whole: _Arrays = {}

    def divided(self, keeper: Keeper, parts: ModelParts, own: Sequence[str], layout: int) -> None:
        """Begin with this rank's part.

        Args:
            keeper: of it.
            parts: who holds which parameter.
            own: the names of this rank's parameters, in the keeper's order.
            layout: the same number on all ranks, and another if they hold other parts.
        """
        self._keeper, self._parts, self._own, self.layout = keeper, parts, list(own), layout

    def load_waiting(self) -> None:
        """Load what a checkpoint has read before the model was divided.

        Until then, and inside ``settled``, the ranks hold the weights that they had agreed on.
        """
        if self._keeper is None or self._showing:
            return
        waiting, self._waiting = self._waiting, []
        for load in waiting:
            load()

    def _when_divided(self, load: Callable[[], None]) -> None:
        if self._keeper is None or self._waiting:
            self._waiting.append(load)
        else:
            load()

    def in_saved_round(self, load: Callable[[], None]) -> None:
        """Load something of this rank's own if the ranks go on in the round that was saved."""
        self._when_divided(lambda: load() if self._in_round else None)

    def arrive(self) -> None:
        """Wait for overlapped agreements; a collective."""
        if self._keeper is not None:
            self._keeper.arrive()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the weights that the ranks would agree on now; a collective if ``local``."""
        if self._keeper is not None and not self._waiting:
            with self._keeper.settled():
                yield
            return
        self._showing += 1
        try:
            yield
        finally:
            self._showing -= 1
            self.load_waiting()

    def unsettled(self) -> AbstractContextManager[None]:
        """Hold this rank's own weights for a while, inside ``settled``."""
        return nullcontext() if self._keeper is None else self._keeper.unsettled()

    def begin_anew(self) -> None:
        """Forget the state; begin with the weights that the ranks hold now."""
        self._waiting.clear()
        self._in_round = False
        if self._keeper is not None:
            self._keeper.begin_anew()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Have the whole state on rank 0 for a while; a collective."""
        if self._keeper is not None and self._parts is not None and self.local:
            state = self._keeper.state()
            found = self._parts.collected(self._by_parameter(state), self._parts.of_parameters)
            if self._parts.keeps_whole:
                self._whole = strategy_arrays(state[COUNTS], found, self._number)
        try:
            yield
        finally:
            self._whole = {}

    def _by_parameter(self, state: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """What the strategy keeps of this rank's parameters, in the shape of its parts of them."""
        assert self._parts is not None
        trained = set(state[TRAINED].tolist())
        found: dict[str, dict[str, torch.Tensor]] = {
            name: {TRAINED: torch.tensor(i in trained)} for i, name in enumerate(self._own)
        }
        for key, vector in state.items():
            if _is_of_parameter(key):
                kept, _, i = key.partition(".")
                name = self._own[int(i)]
                shape = self._parts.shape_of(name)
                # A complex number travels as two.
                found[name][kept] = torch.from_numpy(vector).reshape(*shape, -1)
        return found

    @property
    def is_divided(self) -> bool:
        """Whether this rank has a part of what the strategy keeps."""
        return self._keeper is not None and self.local

    def plan(self) -> dict[str, Any]:
        """What rank 0 adds to ``shares``."""
        assert self._keeper is not None
        return strategy_plan(self._keeper.state()[COUNTS], list(self._number))

    def shares(self) -> dict[str, Any]:
        """What this rank writes into a sharded checkpoint."""
        assert self._keeper is not None
        assert self._parts is not None
        return self._parts.shares_of(self._by_parameter(self._keeper.state()))

    def state(self) -> _Arrays:
        """What a checkpoint saves, on rank 0 inside ``gathered``."""
        return self._whole

    def load_state(self, arrays: _Arrays, *, in_round: bool) -> None:
        """Set what ``state`` returned, when the model is divided."""
        self._load_later(lambda: self._own_of(arrays), in_round=in_round)

    def load_shares(self, saved: SavedState, *, in_round: bool) -> None:
        """Read this rank's part from a sharded checkpoint, when the model is divided."""
        self._load_later(lambda: self._own_of_saved(saved), in_round=in_round)

    def _load_later(self, own: Callable[[], _Arrays], *, in_round: bool) -> None:
        """Set the state of this rank's part when the model is divided.

        Args:
            own: returns it; nothing if there was none.
            in_round: whether each rank will hold its own weights again.
        """
        self._waiting.clear()
        saved_layout = self.saved_layout

        def load() -> None:
            assert self._keeper is not None
            self._in_round = in_round and saved_layout == self.layout
            if in_round and not self._in_round and self._rank == 0:
                logger.info(
                    f"{self.strategy} begins a new round: the model was divided in another way "
                    "when it was saved"
                )
            if not self.local:
                self._keeper.load_state({}, in_round=self._in_round)
            elif arrays := own():
                self._keeper.load_state(arrays, in_round=self._in_round)
            else:  # saved before a first step
                self._keeper.begin_anew()

        self._when_divided(load)

    def _own_of(self, arrays: Mapping[str, np.ndarray[Any, Any]]) -> _Arrays:
        """This rank's part of the whole state."""
        assert self._parts is not None
        if COUNTS not in arrays:
            return {}
        own: dict[str, dict[str, torch.Tensor]] = {}
        trained = set(arrays[TRAINED].tolist())
        for name in self._own:
            number = self._number[name]
            shape = self._parts.whole_shape_of(name)
            own[name] = {TRAINED: torch.tensor(number in trained)}
            for key in (k for k in arrays if k.endswith(f".{number}") and _is_of_parameter(k)):
                whole = torch.from_numpy(arrays[key]).reshape(*shape, -1)
                own[name][key.partition(".")[0]] = self._parts.cut(name, whole)
        return self._by_own_number(arrays[COUNTS], own)

    def _own_of_saved(self, saved: SavedState) -> _Arrays:
        """This rank's part of the state in a sharded checkpoint."""
        assert self._parts is not None
        own = {
            name: part(saved.values[name], functools.partial(self._parts.part_of_saved, name))
            for name in self._own
        }
        return self._by_own_number(saved.plan[COUNTS].numpy(), own)

    def _by_own_number(
        self, counts: np.ndarray[Any, Any], own: Mapping[str, Mapping[str, torch.Tensor]]
    ) -> _Arrays:
        return strategy_arrays(counts, own, {name: i for i, name in enumerate(self._own)})

    def own_state(self) -> _Arrays:
        """What a checkpoint saves for each rank, for the same mesh only."""
        if self._waiting:
            raise ValueError(
                f"what a checkpoint holds of {self.strategy} is loaded when the first batch shows "
                "how to divide the model, and cannot be saved again before: call model(x) first"
            )
        if self._keeper is None:
            return {}
        common = {
            key.removeprefix(SENT): array
            for key, array in self._keeper.state().items()
            if not self.local or key.startswith(SENT)
        }
        return self._keeper.own_state() | common

    def load_own_state(self, arrays: _Arrays) -> None:
        """Set what ``own_state`` returned on this rank."""

        def load() -> None:
            assert self._keeper is not None
            self._keeper.load_own_state(arrays)

        self.in_saved_round(load)


def _is_of_parameter(key: str) -> bool:
    """Whether an array of ``RoundKeeper.state`` is what the strategy keeps of a parameter."""
    return key not in (COUNTS, TRAINED) and not key.startswith(SENT)
