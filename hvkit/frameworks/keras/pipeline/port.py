"""The steps of ``distribute`` for a Keras model on TensorFlow in a pipeline."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from hvkit.frameworks.keras.averaged_updates import average_in_apply, finite_in
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.initial_state import Together
from hvkit.frameworks.keras.loss_means import use_counts_of_all_ranks
from hvkit.frameworks.keras.loss_scale import Agree, skip_together
from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.pipeline.divided_model import DividedModel
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.refusals import (
    refuse_models,
    refuse_optimizers_in_parts,
)
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.keras.traced_steps import marks
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Keeper, Options, Record


class KerasMeshPort(KerasPort):
    """A Sequential or Functional model in a pipeline, and the optimizers that update it.

    The ranks of ``options.group`` hold the same layers, and average their gradients.
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
        self._pending, self._optimizers_pending = [], False

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        if self.options.group.size > 1:
            self._samples = self._counts()
        for each in updating(self.optimizers):
            self._average_in(each)
            skip_together(each, self._finite_on_all())
        wait = None
        if self.options.batch_norm == "average" and self.options.group.size > 1:
            wait = self._wait(self._name())
        end_epoch = functools.partial(self._end_epoch, wait)
        records = self._divided.attach(self.averagers, end_epoch, marks, self.options.group)
        if self._samples:
            use_counts_of_all_ranks(self.models[0], self._samples)
        return records, None

    def _take_part(self, pipelined: PipelinedModel) -> None:
        """Average and compare what this rank holds."""
        self.model.models = pipelined.stage.layers
        weights = self.models[0].weights
        self._synchronised.update((id(backend_variable(w)), w) for w in weights)

    def _average_in(self, optimizer: Any) -> None:
        if self.options.group.size == 1:
            return
        assert isinstance(self.options.strategy, Averaging)
        average_in_apply(optimizer, self._average(self.options.strategy), self._before_update)

    def _finite_on_all(self) -> Agree:
        """Whether gradients are finite on all ranks; those of other stages are norms here."""
        if self.options.group.size == 1:
            return lambda finite, _: finite
        return finite_in(self.options.group)
