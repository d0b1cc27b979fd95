"""What a checkpoint saves of a model and its optimizers of which this rank holds a part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hvkit.frameworks.pytorch.model_parallel.mesh_keeper import MeshKeeper
from hvkit.frameworks.pytorch.model_parallel.parallel_model import ParallelModel
from hvkit.frameworks.pytorch.model_parallel.parts import own_state


class _InParts:
    """Implements ``hvkit.sync.port.InParts``.

    Args:
        parallel: divides the model.
        keeper: of the model; None if its strategy keeps nothing.
    """

    def __init__(self, parallel: ParallelModel, keeper: MeshKeeper | None) -> None:
        self._parallel, self._keeper = parallel, keeper

    def load_own(self, load: Callable[[], None]) -> None:
        if self._keeper is not None:
            self._keeper.in_saved_round(load)


class ModelInParts(_InParts):
    """A model."""

    def __init__(
        self, parallel: ParallelModel, keeper: MeshKeeper | None, model: nn.Module
    ) -> None:
        super().__init__(parallel, keeper)
        self._model = model

    def own(self) -> dict[str, Any]:
        parts = self._parallel.parts
        return {} if parts is None else parts.own_of(self._model)


class OptimizerInParts(_InParts):
    """An optimizer of it."""

    def __init__(
        self, parallel: ParallelModel, keeper: MeshKeeper | None, optimizer: Optimizer
    ) -> None:
        super().__init__(parallel, keeper)
        self._optimizer = optimizer

    def own(self) -> dict[str, Any]:
        return own_state(self._optimizer)
