"""The steps of ``distribute`` for a Keras model in a pipeline."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import tensorflow as tf

from hvkit import runtime
from hvkit.communication.collectives import require_equal
from hvkit.communication.group import all_ranks
from hvkit.frameworks.keras.adapted import Learnt
from hvkit.frameworks.keras.averaged_updates import average_in_apply, finite_in, skip_together
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.divided_state import gathered as gathered_optimizer
from hvkit.frameworks.keras.fit import share_results, train_uncompiled
from hvkit.frameworks.keras.initial_state import Together, synchronise, synchronise_optimizers
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
from hvkit.frameworks.keras.pipeline.refusals import (
    refuse_models,
    refuse_optimizers_in_parts,
)
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.keras.refusals import let_differ, refuse_other_optimizers
from hvkit.frameworks.keras.synchronised_norm import layers_of
from hvkit.frameworks.keras.traced_steps import marks
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.strategies.strategy import Averaging
from hvkit.sync.port import Keeper, Options, Record

_HELD = "_hvkit_pipeline"


class KerasMeshPort(KerasPort):
    """A Sequential or Functional model in a pipeline, and the optimizers that update it.

    The ranks of ``options.group`` hold the same layers, and average their gradients. A Sequential
    model without weights is divided when its first call builds it.
    """

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        refuse_models(models, options)
        super().__init__(models, optimizers, options)
        refuse_optimizers_in_parts(self.optimizers)
        assert options.mesh is not None
        self._mesh = options.mesh
        self._whole_model = models[0]
        # What is averaged and compared is this rank's part.
        self.model = Together([])
        self._plan: tuple[LayerGraph, Stages] | None = None
        self._parts: ModelParts | None = None
        self._pipelined: PipelinedModel | None = None
        if self._is_built:
            self._plan = self._planned()

    @property
    def _is_built(self) -> bool:
        model = self._whole_model
        return not isinstance(model, keras.Sequential) or bool(model._functional)

    def _planned(self) -> tuple[LayerGraph, Stages]:
        graph, choice = LayerGraph(self._whole_model), self._mesh.stages
        named = choice if isinstance(choice, str) else list(choice)
        return graph, plan_stages(graph, self._mesh.mesh.pipeline, named)

    def synchronise(self) -> None:
        everyone, model = all_ranks(), self._whole_model
        require_equal(
            "model",
            [f"model {type(model).__name__}: {'with' if self._is_built else 'without'} weights"],
            "build the model before hvkit.distribute on every rank, or on none",
        )
        learnt = Learnt(model)
        synchronise(model.weights, everyone)
        learnt.take_from_first(everyone)
        synchronise_optimizers(self.optimizers, model.trainable_variables, everyone)
        self._pending, self._optimizers_pending = [], False

    def keep_in_step(self) -> tuple[list[tuple[Any, Record]], Keeper | None]:
        model, inner = self._whole_model, updating(self.optimizers)
        ranks = self._mesh.position.members("pipeline")
        self._links = StageLinks(ranks, all_ranks().numbered("hvkit.pipeline"))
        let_differ([model], inner)
        refuse_other_optimizers(model, [o for each in self.optimizers for o in _with_inner(each)])
        for each in inner:
            self._average_in(each)
            skip_together(each, self._finite_on_all())
        self._replace_methods(model)
        vars(model)[_HELD] = self
        if self._is_built:
            self._divide()
        else:
            model.build = self._building_in_parts(model.build)
        # The model keeps this port; a record must not lead to the model.
        held: Any = weakref.proxy(self)
        records = [(model, Record(gathered=functools.partial(KerasMeshPort.gathered, held)))]
        return [*records, *((each, self._record(each)) for each in self.optimizers)], None

    def _building_in_parts(self, build: Callable[..., None]) -> Callable[..., None]:
        """As ``build`` of the model, but makes the weights of this rank only; a collective."""

        @functools.wraps(build)  # Keras looks at the names of its arguments
        def build_in_parts(*args: Any, **kwargs: Any) -> None:
            without_values(lambda: build(*args, **kwargs), self._whole_model.name)
            self._whole_model.build = build
            self._take_built()

        return build_in_parts

    def _take_built(self) -> None:
        model = self._whole_model
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
        (graph, stages), model = self._plan, self._whole_model
        if runtime.rank() == 0:
            logger.info(stages.described())
        collects = self._mesh.position.along("data") == 0
        self._parts = ModelParts(model, stages, self._links, collects=collects)
        self._pipelined = PipelinedModel(
            model, graph, self._parts, self._links, self._mesh.microbatches
        )
        model.call = self._pipelined
        self.model.models = self._pipelined.stage.layers
        self._synchronised.update((id(backend_variable(w)), w) for w in model.weights)
        for each in updating(self.optimizers):
            OptimizerParts(each, self._parts, self._links)
        self._warn_of_microbatches()

    def gathered(self) -> AbstractContextManager[None]:
        """A context in which rank 0 has the whole weights; a collective."""
        return nullcontext() if self._parts is None else self._parts.gathered()

    def show_to(self, callback: Any) -> None:
        """Let a callback that saves the model, or keeps its weights, do so in parts."""
        show_in_parts(callback, self._divided_parts)

    def _divided_parts(self) -> ModelParts:
        assert self._parts is not None
        return self._parts

    def note_targets(self, data: Any) -> None:
        """Have the next forward pass compare what ``fit`` passes to a step."""
        if self._pipelined is not None:
            self._pipelined.note_targets(data)

    def _average_in(self, optimizer: Any) -> None:
        if self.options.group.size == 1:
            return
        assert isinstance(self.options.strategy, Averaging)
        average_in_apply(optimizer, self._average(self.options.strategy), self._before_update)

    def _finite_on_all(self) -> Callable[[tf.Tensor], tf.Tensor]:
        """Whether gradients are finite on all ranks; those of other stages are norms here."""
        if self.options.group.size == 1:
            return tf.identity  # type: ignore[no-any-return]
        return finite_in(self.options.group)

    def _warn_of_microbatches(self) -> None:
        if self._mesh.microbatches > 1 and layers_of(self._whole_model):
            warn_once(
                "batch norm in micro-batches",
                "batch norm uses the statistics of micro-batches, as one process does that trains "
                "in micro-batches; other normalisation layers do not depend on the batch",
            )

    def _replace_methods(self, model: Any) -> None:
        """Have the model's own methods run the pipeline."""
        train_uncompiled(model)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, _in_eager_code(model, getattr(model, name)))
        for name in ("train_step", "test_step"):
            setattr(model, name, _noting_targets(getattr(model, name), self.note_targets))
        wait = None
        if self.options.batch_norm == "average" and self.options.group.size > 1:
            wait = self._wait(self._name())
        share_results(
            model,
            self.averagers,
            functools.partial(self._end_epoch, wait),
            all_ranks(),
            watching=marks,
            parts=self,
            same_part=self.options.group,
        )

    def _record(self, optimizer: Any) -> Record:
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


def _noting_targets(
    step: Callable[[Any], Any], note: Callable[[Any], None]
) -> Callable[[Any], Any]:
    @functools.wraps(step)
    def noting(data: Any) -> Any:
        note(data)
        return step(data)

    return noting
