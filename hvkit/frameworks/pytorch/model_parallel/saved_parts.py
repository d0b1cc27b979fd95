"""What a checkpoint saves of a model and its optimizers of which this rank holds a part."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.model_parallel.mesh_keeper import MeshKeeper
from hvkit.frameworks.pytorch.model_parallel.parallel_model import ParallelModel
from hvkit.frameworks.pytorch.model_parallel.parts import ModelParts, own_state
from hvkit.frameworks.pytorch.model_parallel.shares import (
    SavedState,
    model_plan,
    optimizer_plan,
    part,
)


class _InParts:
    """Implements ``hvkit.sync.port.InParts``.

    Args:
        parallel: divides the model.
        keeper: of the model; None if its strategy keeps nothing.
    """

    def __init__(self, parallel: ParallelModel, keeper: MeshKeeper | None) -> None:
        self._parallel, self._keeper = parallel, keeper

    @property
    def is_divided(self) -> bool:
        return self._parallel.parts is not None

    @property
    def reads_shares(self) -> bool:
        return self.is_divided or self._parallel.is_deferred

    @property
    def _parts(self) -> ModelParts:
        parts = self._parallel.parts
        assert parts is not None
        return parts

    def load_own(self, load: Callable[[], None]) -> None:
        if self._keeper is not None:
            self._keeper.in_saved_round(load)

    def load_shares(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        self._parallel.when_divided(functools.partial(self._load, saved, load))

    @abstractmethod
    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        """Read this rank's part."""


class ModelInParts(_InParts):
    """A model."""

    def __init__(
        self, parallel: ParallelModel, keeper: MeshKeeper | None, model: nn.Module
    ) -> None:
        super().__init__(parallel, keeper)
        self._model = model

    def own(self) -> dict[str, Any]:
        return self._parts.own_of(self._model) if self.is_divided else {}

    def shares(self) -> dict[str, Any]:
        names = set(self.plan()["names"].values())  # without buffers that are not saved
        own = self._parts.own_of(self._model)
        return self._parts.shares_of({n: t for n, t in own.items() if n in names})

    def plan(self) -> dict[str, Any]:
        return model_plan(*self._parts.named_state(self._model))

    @torch.no_grad()
    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        expected = set(self.plan()["names"].values())
        if expected != saved.values.keys():
            missing, unknown = expected - saved.values.keys(), saved.values.keys() - expected
            raise ValueError(f"it lacks {sorted(missing)}, and has unknown {sorted(unknown)}")
        for name, own in self._parts.own_of(self._model).items():
            if name in expected:
                found = self._parts.part_of_saved(name, saved.values[name])
                if found.shape != own.shape:
                    raise ValueError(
                        f"{name} has the shape {tuple(own.shape)} on this rank, the saved part "
                        f"{tuple(found.shape)}"
                    )
                own.copy_(found)
        names = saved.plan["names"]
        if rest := {k: v for k, v in saved.plan["state"].items() if k not in names}:
            load(rest)


class OptimizerInParts(_InParts):
    """An optimizer of it."""

    def __init__(
        self, parallel: ParallelModel, keeper: MeshKeeper | None, optimizer: Optimizer
    ) -> None:
        super().__init__(parallel, keeper)
        self._optimizer = optimizer

    def own(self) -> dict[str, Any]:
        return own_state(self._optimizer)

    def shares(self) -> dict[str, Any]:
        state = self._optimizer.state
        return self._parts.shares_of({n: state.get(p) for n, p in self._named().items()})

    def plan(self) -> dict[str, Any]:
        return optimizer_plan(own_state(self._optimizer), list(self._named()))

    def _named(self) -> dict[str, torch.Tensor]:
        return self._parts.named(self._optimizer)

    def _load(self, saved: SavedState, load: Callable[[dict[str, Any]], None]) -> None:
        state = {
            i: part(saved.values[name], functools.partial(self._parts.part_of_saved, name))
            for i, (name, p) in enumerate(self._named().items())
            if name in saved.values and not p.is_meta
        }
        # Rates, which a scheduler may have changed meanwhile, stay as they are.
        groups = own_state(self._optimizer)["param_groups"]
        load({"state": state | saved.plan["other"], "param_groups": groups})
