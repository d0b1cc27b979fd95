"""Keras models on PyTorch that optimizers of PyTorch update, in a loop of the script's own.

For PyTorch a Keras model is a module, whose ``parameters()`` are all variables: also seeds, the
states of metrics, and statistics, which no gradient reaches. An optimizer made of them holds these
as well. They are each rank's own, as PyTorch's buffers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.as_pytorch import ModelWeights
from hvkit.frameworks.keras.fit import share_results
from hvkit.frameworks.keras.initial_state import Together, has_weights, synchronise
from hvkit.frameworks.keras.on_pytorch import RoundsInFit, synchronise_statistics
from hvkit.frameworks.keras.refusals import let_differ, refuse_options, refuse_other_optimizers
from hvkit.frameworks.pytorch import PyTorchPort
from hvkit.frameworks.pytorch.modules import leave_to_rank
from hvkit.strategies import ParameterServer
from hvkit.strategies.strategy import Rounds
from hvkit.sync.local_weights import LocalWeightsKeeper
from hvkit.sync.port import Keeper, Options, Record


class KerasLoopPort(PyTorchPort):
    """Implements ``hvkit.sync.port.Port``.

    Args:
        models: of Keras on PyTorch, with weights.
        optimizers: of PyTorch.
        options: as passed to ``distribute``.

    Raises:
        ValueError: a model has no weights yet, or an option does not suit it.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        refuse_options(options)
        self._keras_models = list(models)
        self._whole_batches = options.batch_norm == "sync"
        for model in models:
            if not has_weights(model):
                raise ValueError(
                    f"model {model.name!r} has no weights yet, which its optimizer updates: build "
                    "it, then make the optimizer, then call hvkit.distribute"
                )
        weights = list(map(ModelWeights, models))
        trained = {p for each in weights for p in each.parameters()}
        for model in models:
            for p in nn.Module.parameters(model):
                if p not in trained:
                    leave_to_rank(p)
        if self._whole_batches:  # which Keras's layers do, not those of PyTorch
            options = replace(options, batch_norm="local")
        super().__init__(weights, optimizers, options)

    def synchronise(self) -> None:
        group = self.options.group
        for model in self._keras_models:
            learnt = Learnt(model)
            synchronise(model.weights, group)
            learnt.take_from_first(group)
        super().synchronise()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        group, strategy = self.options.group, self.options.strategy
        model = self._keras_models[0] if len(self._keras_models) == 1 else None
        together = model or Together(self._keras_models)
        if self._whole_batches:
            synchronise_statistics(together, group)
        records, keeper = super().keep_in_step()
        rounds: RoundsInFit | None = None
        if isinstance(strategy, Rounds | ParameterServer):
            assert isinstance(keeper, LocalWeightsKeeper)
            rounds = RoundsInFit(not isinstance(strategy, ParameterServer))
            rounds.keeper = keeper
            let_differ([together, *self._keras_models], [])
        for each in self._keras_models:
            refuse_other_optimizers(each, [])
            share_results(each, (), lambda: None, group, rounds)
        return records, keeper
