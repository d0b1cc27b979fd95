"""Divides a model and its optimizers among the ranks of a pipeline, on every backend.

The first call of a Sequential model without weights builds and divides it. Keras first computes the
shapes of all weights. Each rank then makes the values of its own stage only, and the same ones as
rank 0 would make, because every rank uses the seeds of rank 0's initializers.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.models.functional import Functional

from hvkit import runtime
from hvkit.communication.collectives import from_rank, require_equal
from hvkit.frameworks.keras import initial_state
from hvkit.frameworks.keras.buffers import layers_of, made_synchronised
from hvkit.frameworks.keras.divided_state import why_not_by_variable
from hvkit.frameworks.keras.fit import FitState, combine_results
from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.pipeline.layer_graph import LayerGraph, plan_stages, stage_of
from hvkit.frameworks.keras.pipeline.parts import ModelForCallbacks, ModelParts, OptimizerParts
from hvkit.frameworks.keras.pipeline.pipelined_model import PipelinedModel
from hvkit.frameworks.keras.pipeline.tensors import Tensors
from hvkit.frameworks.keras.port import KerasPort
from hvkit.frameworks.keras.refusals import let_differ
from hvkit.log import logger
from hvkit.main_rank import warn_once
from hvkit.pipeline.gpipe import Stages
from hvkit.runtime import all_ranks
from hvkit.sync.port import Options, Record

_ATTRIBUTE = "_hvkit_pipeline"
# Variables that Keras initialises when a stateless scope ends.
_UNINITIALISED = "uninitialized_variables"


class PipelinePort(KerasPort):
    """A Sequential or Functional model in a pipeline; the group holds the same layers."""

    tensors: Tensors

    def __init__(self, models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
        refuse_in_pipeline(models, optimizers, options)
        super().__init__(models, optimizers, options)
        assert options.mesh is not None
        (self._whole,), self._mesh = models, options.mesh
        self._divides_state = True
        # Averages and comparisons cover this rank's part only, once it is known.
        self.model = initial_state.JoinedModels([])
        self._plan: tuple[LayerGraph, Stages] | None = None
        self._pipelined: PipelinedModel | None = None
        if self._is_built:
            self._plan = self._planned()

    @property
    def _is_built(self) -> bool:
        return not isinstance(self._whole, keras.Sequential) or bool(self._whole._functional)

    def _planned(self) -> tuple[LayerGraph, Stages]:
        graph, choice = LayerGraph(self._whole), self._mesh.stages
        named = choice if isinstance(choice, str) else list(choice)
        return graph, plan_stages(graph, self._mesh.mesh.pipeline, named)

    def synchronise(self) -> None:
        ranks, model = all_ranks(), self._whole
        require_equal(
            "model",
            [f"model {type(model).__name__}: {'with' if self._is_built else 'without'} weights"],
            "build the model before hvkit.distribute on every rank, or on none",
        )
        initial_state.synchronise_model(model, ranks)
        initial_state.synchronise_optimizers(self.optimizers, model.trainable_variables, ranks)

    def _take_part(self, pipelined: PipelinedModel) -> None:
        """Average and compare what this rank holds."""
        self.model.models = pipelined.stage.layers

    def _attach(self, state: FitState) -> list[tuple[Any, Record]]:
        """Let the model's methods run the pipeline; return records; a collective."""
        model = self._whole
        self._channel = self.tensors.channel(self._mesh, all_ranks().numbered("hvkit.pipeline"))
        let_differ([model], updating(self.optimizers))
        self._let_update(model)
        for name in ("make_train_function", "make_test_function", "make_predict_function"):
            setattr(model, name, _in_eager_code(model, getattr(model, name)))
        for name in ("train_step", "test_step"):
            setattr(model, name, self._noting_targets(getattr(model, name)))
        state.adapt = self._adapt
        combine_results(model, state, self.group)
        vars(model)[_ATTRIBUTE] = self
        if self._is_built:
            self._divide()
        else:
            model.build = self._building_in_parts(model.build)
        # The model keeps this object; a record must not lead to the model.
        reference: Any = weakref.proxy(self)
        records = [(model, Record(gathered=functools.partial(PipelinePort._gathered, reference)))]
        return [*records, *self._records()]

    def _building_in_parts(self, build: Callable[..., None]) -> Callable[..., None]:
        """A ``build`` that makes the weights of this rank only; a collective."""

        @functools.wraps(build)  # Keras looks at the names of its arguments
        def build_in_parts(*args: Any, **kwargs: Any) -> None:
            _without_values(lambda: build(*args, **kwargs), self._whole.name)
            self._whole.build = build
            self._divide_built()

        return build_in_parts

    def _divide_built(self) -> None:
        """Make this rank's weights of a model whose variables have shapes, but no values."""
        model = self._whole
        if not self._is_built:
            raise ValueError(
                f"Sequential model {model.name!r} gets more than one tensor, and its layers cannot "
                "be divided: make it with the functional API, keras.Model(inputs, outputs)"
            )
        _use_seeds_of_rank_0(model)
        self._plan = self._planned()
        _, stages = self._plan
        _make_values(model, lambda v: stage_of(v, stages) == self._channel.rank)
        self._divide()

    def _divide(self) -> None:
        assert self._plan is not None
        (graph, stages), model = self._plan, self._whole
        if runtime.rank() == 0:
            logger.info(stages.described())
        collects = self._mesh.position.along("data") == 0
        parts = ModelParts(model, stages, self._channel, self.tensors, collects=collects)
        self._pipelined = PipelinedModel(model, graph, parts, self._mesh.microbatches)
        model.call = self._pipelined
        self._take_part(self._pipelined)
        for each in updating(self.optimizers):
            OptimizerParts(each, parts)
        if self._mesh.microbatches > 1 and layers_of(model):
            warn_once(
                "batch norm in micro-batches",
                "batch norm uses the statistics of micro-batches, as one process does that trains "
                "in micro-batches; other normalisation layers do not depend on the batch",
            )

    def _gathered(self) -> AbstractContextManager[None]:
        return nullcontext() if self._pipelined is None else self._pipelined.parts.gathered()

    def _adapt(self, callback: Any) -> None:
        """Let a callback save the model, or keep its weights, although ranks hold parts."""
        if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.EarlyStopping):
            set_model = type(callback).set_model
            callback.set_model = lambda model: set_model(
                callback, ModelForCallbacks(model, self._divided_parts)
            )

    def _divided_parts(self) -> ModelParts:
        assert self._pipelined is not None
        return self._pipelined.parts

    def _noting_targets(self, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """A step of ``fit`` whose forward pass also compares the targets of the ranks."""

        @functools.wraps(step)
        def noting(data: Any) -> Any:
            if self._pipelined is not None:
                self._pipelined.note_targets(data)
            return step(data)

        return noting


def _in_eager_code(model: Any, make: Callable[..., Any]) -> Callable[..., Any]:
    """Have Keras make a function of a step that runs the pipeline without a graph."""

    @functools.wraps(make)
    def make_eager(*args: Any, **kwargs: Any) -> Any:
        model.run_eagerly, model.jit_compile = True, False
        return make(*args, **kwargs)

    return make_eager


def _without_values(build: Callable[[], None], name: str) -> None:
    """Build a model whose variables have shapes, but no values."""
    before = global_state.get_global_attribute(_UNINITIALISED, set_to_default=True)
    try:
        with keras.StatelessScope(initialize_variables=False):
            build()
    except ValueError as error:
        raise ValueError(
            f"model {name!r} cannot be built in parts: {error} Build it before hvkit.distribute, "
            "with model.build((None, ...)) or a keras.Input as its first layer"
        ) from error
    finally:
        global_state.set_global_attribute(_UNINITIALISED, before or [])


def _use_seeds_of_rank_0(model: Any) -> None:
    """Seed the initializers of variables without values; a collective."""
    makers = [v._initializer for v in model.variables if v._value is None]
    seeds = [getattr(maker, "seed", None) for maker in makers]
    for maker, seed in zip(makers, seeds, strict=True):
        if seed is not None and not isinstance(seed, int):
            raise ValueError(
                f"initializer {type(maker).__name__} takes its seed from {seed!r}, so that each "
                f"rank would make other weights: pass a number, or build model {model.name!r} "
                "before hvkit.distribute"
            )
    for maker, seed in zip(makers, from_rank(0, seeds), strict=True):
        if seed is not None:
            maker.seed = seed


def _make_values(model: Any, holds: Callable[[Any], bool]) -> None:
    """Make the values of this rank's variables, and of those that are no weights."""
    weights = set(map(id, model.weights))
    for v in model.variables:
        if v._value is None and (id(v) not in weights or holds(v)):
            v._deferred_initialize()


def refuse_in_pipeline(models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
    """Raise for models and optimizers that a pipeline would train differently, or cannot divide."""
    assert options.mesh is not None
    if len(models) > 1:
        raise ValueError(
            f"mesh={options.mesh.mesh} takes one model, got {len(models)}: pass one Functional "
            "model that contains them"
        )
    (model,) = models
    _refuse_own_call(model)
    if layers := made_synchronised(model):
        raise ValueError(
            f"layer {layers[0].name!r} has synchronized=True, but in micro-batches batch norm "
            "cannot use all samples of a batch: leave synchronized out"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(
                f"layer {layer.name!r} has an activity_regularizer, a sum over the samples of a "
                "micro-batch and not of the batch: leave it out, or return what it needs as an "
                "output of the model and compute it in the loss"
            )
    for each in updating(optimizers):
        if reason := why_not_by_variable(each):
            raise ValueError(
                f"optimizer {type(each).__name__} cannot update a model whose layers are on "
                f"several ranks: {reason}. Use an optimizer such as keras.optimizers.AdamW"
            )


def _refuse_own_call(model: Any) -> None:
    """Raise for a model whose layers Keras does not know as a graph."""
    cls = type(model)
    known = (isinstance(model, keras.Sequential) and cls.call is keras.Sequential.call) or (
        isinstance(model, Functional) and cls.call is Functional.call
    )
    if not known:
        raise ValueError(
            f"{cls.__name__} {model.name!r} has a call() of its own, in which Keras cannot see "
            "where it can be cut: a pipeline of Keras takes Sequential models and Functional "
            "ones, keras.Model(inputs, outputs). Make one of its layers, or write it as a "
            "torch.nn.Module, which a pipeline cuts as it is"
        )
