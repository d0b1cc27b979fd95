"""The steps of ``distribute`` for a Keras model on PyTorch in a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hvkit.frameworks.keras.as_pytorch import KerasStep, ModelWeights
from hvkit.frameworks.keras.initial_state import Together
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.on_pytorch import KerasOnPyTorchPort
from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.pipeline.divided_model import DividedModel
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.refusals import (
    refuse_models,
    refuse_optimizers_in_parts,
)
from hvkit.frameworks.keras.pytorch_sample_counts import PyTorchSampleCounts
from hvkit.frameworks.pytorch import PyTorchPort
from hvkit.sync.distributed_objects import record
from hvkit.sync.port import Keeper, Options, Record


class KerasOnPyTorchMeshPort(KerasOnPyTorchPort):
    """A Sequential or Functional model in a pipeline, and the optimizers that update it.

    The ranks of ``options.group`` hold the same layers, and PyTorch's port averages their
    gradients at the end of each backward pass.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        refuse_models(models, options)
        super().__init__(models, optimizers, options)
        refuse_optimizers_in_parts(self.optimizers)
        assert options.mesh is not None
        # What is averaged and compared is this rank's part.
        self.model = Together([])
        self._divided = DividedModel(models[0], self.optimizers, options.mesh, self._take_part)

    def synchronise(self) -> None:
        self._divided.synchronise()

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        group = self.options.group
        if group.size > 1:
            self._samples = PyTorchSampleCounts(group.numbered("hvkit"), group)
        records = self._divided.attach((), self._end_epoch, list, group)
        if self._samples:
            use_counts_of_all_ranks(self.models[0], self._samples)
        return records, None

    def _take_part(self, pipelined: PipelinedModel) -> None:
        """Average and compare what this rank holds."""
        self.model.models = pipelined.stage.layers
        if self.options.group.size == 1 or not self.model.trainable_variables:
            return
        steps: list[Any] = [
            type(type(each).__name__, (KerasStep,), {})(each, _nothing, updates_only=False)
            for each in updating(self.optimizers)
        ]
        for step in steps:
            step.may_update(self.model.trainable_variables)
        port = PyTorchPort([ModelWeights(self.model)], steps, replace(self.options, mesh=None))
        reducer, keeper = port.average_in_passes()
        if self._samples:
            reducer.weigh(self._samples.weight)
        record(self.models, [], keeper, self.options.group if keeper else None)

        def around_backward() -> Callable[[], None]:
            reducer.begin_pass()
            return reducer.end_pass

        pipelined.around_backward = around_backward


def _nothing(variables: Sequence[Any]) -> None:
    """Before an update, of variables that all have their weights."""
