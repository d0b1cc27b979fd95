"""Keras models on PyTorch that optimizers of PyTorch update, in a loop of the script's own.

For PyTorch a Keras model is a module, whose ``parameters()`` are all variables: also seeds, the
states of metrics, and statistics, which no gradient reaches. An optimizer made of them holds these
as well. They are each rank's own, as PyTorch's buffers are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.as_pytorch import ModelWeights
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.comparisons import made_trainable
from hvkit.frameworks.keras.fit import share_results
from hvkit.frameworks.keras.initial_state import Together, has_weights, synchronise
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks, watch_loops
from hvkit.frameworks.keras.on_pytorch import RoundsInFit, synchronise_statistics
from hvkit.frameworks.keras.pytorch_sample_counts import PyTorchSampleCounts
from hvkit.frameworks.keras.refusals import (
    let_differ,
    living_layers,
    refuse_left_out,
    refuse_other_optimizers,
)
from hvkit.frameworks.pytorch import PyTorchPort
from hvkit.frameworks.pytorch.modules import (
    is_left_to_rank,
    leave_to_rank,
    refuse_optimizers_of_others,
)
from hvkit.frameworks.pytorch.optimizers import stepping_in
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
        self._keras_models = list(models)
        self._whole_batches = options.batch_norm == "sync"
        for model in models:
            if not has_weights(model):
                raise ValueError(
                    f"model {model.name!r} has no weights yet, which its optimizer updates: build "
                    "it, then make the optimizer, then call hvkit.distribute"
                )
        weights = list(map(ModelWeights, models))
        for model, its in zip(models, weights, strict=True):
            its.add_tensors_of_pytorch(model)
            for tensor in _untrained(model):
                leave_to_rank(tensor)
        if self._whole_batches:  # which Keras's layers do, not those of PyTorch
            options = replace(options, batch_norm="local")
        super().__init__(weights, optimizers, options)

    def _refuse_optimizers_of_others(self) -> None:
        held = [p for each in self.optimizers for g in each.param_groups for p in g["params"]]
        left_out = refuse_left_out(self._keras_models, self.optimizers, held)
        _leave_untrained(held)
        refuse_optimizers_of_others(self.models, self.optimizers, left_out)

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
        for optimizer in self.optimizers:
            for stepping in stepping_in(optimizer):
                _leave_untrained_of_later_groups(stepping)
        records, keeper = super().keep_in_step()
        rounds: RoundsInFit | None = None
        if isinstance(strategy, Rounds | ParameterServer):
            assert isinstance(keeper, LocalWeightsKeeper)
            rounds = RoundsInFit(not isinstance(strategy, ParameterServer))
            rounds.keeper = keeper
            let_differ([together, *self._keras_models], [])
        for each in self._keras_models:
            refuse_other_optimizers(each, [])
            watch_loops(each)
            samples = PyTorchSampleCounts(group.numbered("hvkit"), group)
            use_counts_of_all_ranks(each, samples, trains=False)
            share_results(each, (), lambda: None, group, rounds)
        return records, keeper


def _untrained(layer: Any) -> list[torch.Tensor]:
    """Variables of a layer or model that no gradient reaches, and no script's own parameters."""
    trained = set(map(id, made_trainable(layer)))
    variables = (*layer.variables, *layer.metrics_variables)
    return [backend_variable(v) for v in variables if id(v) not in trained]


def _leave_untrained(parameters: Iterable[torch.Tensor]) -> None:
    """Leave to each rank those that are variables of any layer which no gradient reaches."""
    new = {id(p) for p in parameters if not (p.requires_grad or is_left_to_rank(p))}
    for layer in living_layers() if new else ():
        for tensor in _untrained(layer):
            if id(tensor) in new:
                leave_to_rank(tensor)


def _leave_untrained_of_later_groups(optimizer: Optimizer) -> None:
    """Do so with what the script adds to an optimizer; pickled optimizers leave this out."""

    def add_and_leave(add: Callable[[Any], None], param_group: dict[str, Any]) -> None:
        add(param_group)
        _leave_untrained(optimizer.param_groups[-1]["params"])

    optimizer.add_param_group = functools.partial(  # type: ignore[method-assign]
        add_and_leave, optimizer.add_param_group
    )
