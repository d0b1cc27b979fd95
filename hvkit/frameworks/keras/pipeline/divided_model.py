"""A model, and what updates it, as the ranks of a pipeline hold them; the same on every backend.

A Sequential model without weights is divided when its first call builds it.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras

from hvkit import runtime
from hvkit.communication.collectives import require_equal
from hvkit.communication.group import Group, all_ranks
from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.callbacks import Averager
from hvkit.frameworks.keras.divided_state import gathered as gathered_optimizer
from hvkit.frameworks.keras.fit import share_results, train_uncompiled
from hvkit.frameworks.keras.initial_state import synchronise, synchronise_optimizers
from hvkit.frameworks.keras.optimizers import inner_optimizer, parts_of, updating
from hvkit.frameworks.keras.pipeline.deferred_build import (
    make_values,
    share_seeds,
    without_values,
)
from hvkit.frameworks.keras.pipeline.layer_graph import LayerGraph, Stages, plan_stages
from hvkit.frameworks.keras.pipeline.model_parts import ModelParts, show_in_parts
from hvkit.frameworks.keras.pipeline.optimizer_parts import OptimizerParts
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.refusals import let_differ, refuse_other_optimizers
from hvkit.frameworks.keras.synchronised_norm import layers_of
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.mesh import MeshOptions
from hvkit.sync.port import Record

_HELD = "_hvkit_pipeline"


class DividedModel:
    """A Sequential or Functional model in a pipeline, and the optimizers that update it.

    Args:
        model: whole, on every rank, or without weights.
        optimizers: of the model.
        mesh: with a pipeline axis.
        divided: called with the model of which this rank has its part, and the layers of that.
    """

    def __init__(
        self,
        model: Any,
        optimizers: Sequence[Any],
        mesh: MeshOptions,
        divided: Callable[[PipelinedModel], None],
    ) -> None:
        self._model, self._optimizers, self._mesh = model, list(optimizers), mesh
        self._when_divided = divided
        self._plan: tuple[LayerGraph, Stages] | None = None
        self._parts: ModelParts | None = None
        self._pipelined: PipelinedModel | None = None
        if self._is_built:
            self._plan = self._planned()

    @property
    def _is_built(self) -> bool:
        model = self._model
        return not isinstance(model, keras.Sequential) or bool(model._functional)

    def _planned(self) -> tuple[LayerGraph, Stages]:
        graph, choice = LayerGraph(self._model), self._mesh.stages
        named = choice if isinstance(choice, str) else list(choice)
        return graph, plan_stages(graph, self._mesh.mesh.pipeline, named)

    def synchronise(self) -> None:
        """Copy rank 0's weights, and the state of optimizers; a collective."""
        everyone, model = all_ranks(), self._model
        require_equal(
            "model",
            [f"model {type(model).__name__}: {'with' if self._is_built else 'without'} weights"],
            "build the model before hvkit.distribute on every rank, or on none",
        )
        learnt = Learnt(model)
        synchronise(model.weights, everyone)
        learnt.take_from_first(everyone)
        synchronise_optimizers(self._optimizers, model.trainable_variables, everyone)

    def attach(
        self,
        averagers: Sequence[Averager],
        end_epoch: Callable[[], None],
        watching: Callable[[], list[Any]],
        same_part: Group,
    ) -> list[tuple[Any, Record]]:
        """Have the model's methods run the pipeline; returns records for all; a collective.

        Args:
            averagers: of the optimizers.
            end_epoch: compares ranks that hold the same part.
            watching: returns callbacks for ``fit``.
            same_part: the ranks that hold the same part.
        """
        model = self._model
        ranks = self._mesh.position.members("pipeline")
        self._links = StageLinks(ranks, all_ranks().numbered("hvkit.pipeline"))
        let_differ([model], updating(self._optimizers))
        refuse_other_optimizers(model, [o for each in self._optimizers for o in _with_inner(each)])
        train_uncompiled(model)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, _in_eager_code(model, getattr(model, name)))
        for name in ("train_step", "test_step"):
            setattr(model, name, self._noting_targets(getattr(model, name)))
        share_results(
            model,
            averagers,
            end_epoch,
            all_ranks(),
            watching=watching,
            parts=self,
            same_part=same_part,
        )
        vars(model)[_HELD] = self
        if self._is_built:
            self._divide()
        else:
            model.build = self._building_in_parts(model.build)
        # The model keeps this object; a record must not lead to the model.
        held: Any = weakref.proxy(self)
        records = [(model, Record(gathered=functools.partial(DividedModel.gathered, held)))]
        return [*records, *((each, _record(each)) for each in self._optimizers)]

    def _building_in_parts(self, build: Callable[..., None]) -> Callable[..., None]:
        """As ``build`` of the model, but makes the weights of this rank only; a collective."""

        @functools.wraps(build)  # Keras looks at the names of its arguments
        def build_in_parts(*args: Any, **kwargs: Any) -> None:
            without_values(lambda: build(*args, **kwargs), self._model.name)
            self._model.build = build
            self._take_built()

        return build_in_parts

    def _take_built(self) -> None:
        model = self._model
        if not self._is_built:
            raise ValueError(
                f"Sequential model {model.name!r} gets more than one tensor, and its layers cannot "
                "be divided: make it with the functional API, keras.Model(inputs, outputs)"
            )
        share_seeds(model)
        self._plan = self._planned()
        _, stages = self._plan
        make_values(model, lambda v: stages.holder(v) == self._links.rank)
        self._divide()

    def _divide(self) -> None:
        """Keep this rank's part of the model, and give up the rest."""
        assert self._plan is not None
        (graph, stages), model = self._plan, self._model
        if runtime.rank() == 0:
            logger.info(stages.described())
        collects = self._mesh.position.along("data") == 0
        self._parts = ModelParts(model, stages, self._links, collects=collects)
        self._pipelined = PipelinedModel(
            model, graph, self._parts, self._links, self._mesh.microbatches
        )
        model.call = self._pipelined
        self._when_divided(self._pipelined)
        for each in updating(self._optimizers):
            OptimizerParts(each, self._parts, self._links)
        if self._mesh.microbatches > 1 and layers_of(model):
            warn_once(
                "batch norm in micro-batches",
                "batch norm uses the statistics of micro-batches, as one process does that trains "
                "in micro-batches; other normalisation layers do not depend on the batch",
            )

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has the whole weights; a collective."""
        return nullcontext() if self._parts is None else self._parts.gathered()

    def show_to(self, callback: Any) -> None:
        """Let a callback that saves the model, or keeps its weights, do so in parts."""
        show_in_parts(callback, self._divided_parts)

    def _divided_parts(self) -> ModelParts:
        assert self._parts is not None
        return self._parts

    def _noting_targets(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step of ``fit`` whose forward pass compares all that the step gets."""

        @functools.wraps(step)
        def noting(data: Any) -> Any:
            if self._pipelined is not None:
                self._pipelined.note_targets(data)
            return step(data)

        return noting


def _record(optimizer: Any) -> Record:
    reference = weakref.ref(optimizer)  # the record lives as long as the optimizer
    return Record(gathered=lambda: gathered_optimizer(reference()))


def _with_inner(optimizer: Any) -> list[Any]:
    inner = inner_optimizer(optimizer)
    return [inner, *parts_of(inner)]


def _in_eager_code(model: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """What makes a function of Keras, without a graph around the pipeline."""

    @functools.wraps(make)
    def make_eager(*args: Any, **kwargs: Any) -> Any:
        model.run_eagerly, model.jit_compile = True, False
        return make(*args, **kwargs)

    return make_eager
