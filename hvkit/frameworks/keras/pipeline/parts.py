"""Each rank's part of a model and of its optimizers: drops the rest, gathers the whole, and loads.

Files are as those of the plain model: rank 0 saves whole weights, and each rank loads its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend import AutocastScope

from hvkit import runtime
from hvkit.frameworks.keras.divided_state import PartialState
from hvkit.frameworks.keras.divided_state import gathered as gathered_optimizer
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.pipeline.layer_graph import stage_of
from hvkit.frameworks.keras.pipeline.tensors import Tensors
from hvkit.pipeline.gpipe import Stages
from hvkit.pipeline.messages import Channel

Array = np.ndarray[Any, Any]


class ModelParts:
    """Knows which rank holds which weight of a model, and gathers all; others keep their shapes.

    ``collects`` is whether rank 0 is in this pipeline.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Stages,
        channel: Channel,
        tensors: Tensors,
        *,
        collects: bool,
    ) -> None:
        self._model, self.stages, self.channel, self.tensors = model, stages, channel, tensors
        self.collects = collects
        self._whole = False
        self.weights: list[Any] = list(model.weights)
        self.own_weights = [w for w in self.weights if self.holds(w)]
        # They stand for the values of other stages' weights.
        self._placeholders = {
            id(w): tensors.placeholder_of(w) for w in self.weights if not self.holds(w)
        }
        self._drop_others()
        self._guard_methods()

    def holds(self, variable: Any) -> bool:
        return stage_of(variable, self.stages) == self.channel.rank

    @property
    def keeps_whole(self) -> bool:
        return self.collects and self.channel.rank == 0

    def _drop_others(self) -> None:
        for w in self.weights:
            if not self.holds(w):
                self.tensors.set_value(w, self._placeholders[id(w)])

    @contextmanager
    def gathered(self) -> Iterator[None]:
        for w, array in self.collected([(w, w) for w in self.weights]):
            self.tensors.set_value(w, array)
        self._whole = self.keeps_whole
        try:
            yield
        finally:
            self._whole = False
            self._drop_others()

    def collected(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Array]]:
        """Collect values from the other ranks of the pipeline on rank 0; a collective.

        The pairs are variables, each with the weight whose stage holds its value. Returns on rank 0
        the variables that other ranks hold, with their values; elsewhere nothing.
        """
        found: list[tuple[Any, Array]] = []
        if not self.collects:
            return found
        with self.channel.in_call("hvkit.settled"):
            for variable, weight in pairs:
                source = stage_of(weight, self.stages)
                if source == self.channel.rank != 0:
                    self.channel.send([ops.convert_to_tensor(variable._value)], 0)
                    self.channel.flush()
                elif source != 0 == self.channel.rank:
                    (value,) = self.channel.receive(source)[1]()
                    found.append((variable, ops.convert_to_numpy(value)))
            # A rank that ended now would end MPI, while rank 0 still receives.
            self.channel.from_rank(0)
        return found

    def _guard_methods(self) -> None:
        """Let the model and layers of other stages save and load only while the model is whole."""
        model: Any = self._model
        for layer in model._flatten_layers(include_self=False):
            variables = [*layer._trainable_variables, *layer._non_trainable_variables]
            if any(id(v) in self._placeholders for v in variables):
                for name in ("save_own_variables", "get_weights"):
                    self._guard_method(layer, name, f"layer {layer.name!r}")
                for name in ("load_own_variables", "set_weights"):
                    self._guard_method(layer, name)
        for name in ("get_weights", "save_weights", "save", "state_dict"):
            if hasattr(model, name):  # the last one on PyTorch only
                self._guard_method(model, name, f"model {model.name!r}")
        model.set_weights = self._set_own_weights
        model.__deepcopy__ = self._refuse_copy

    def _guard_method(self, thing: Any, name: str, refusing: str = "") -> None:
        """Unless the model is whole, let a method raise for ``refusing``, or do nothing."""
        method = getattr(thing, name)

        @functools.wraps(method)
        def if_whole(*args: Any, **kwargs: Any) -> Any:
            if self._whole:
                return method(*args, **kwargs)
            if refusing:
                raise ValueError(
                    f"{name}() of {refusing} on rank {runtime.rank()} would give only the "
                    "weights of this rank's stage: save with hvkit.Checkpoint, or on rank 0 inside "
                    "`with hvkit.settled(model):`, which every rank enters"
                )
            return None

        setattr(thing, name, if_whole)

    def _refuse_copy(self, memo: Any) -> Any:
        raise ValueError(
            f"model {self._model.name!r} is in a pipeline, where each rank has a part of it, and "
            "cannot be copied: copy it before hvkit.distribute, or save it under "
            "`with hvkit.settled(model):` and load the file"
        )

    def _set_own_weights(self, weights: Sequence[Any]) -> None:
        """Replaces ``set_weights`` of the model: takes this rank's part of whole weights."""
        shapes = [tuple(np.shape(array)) for array in weights]
        expected = [tuple(w.shape) for w in self.weights]
        if shapes != expected:
            raise ValueError(
                f"set_weights() of model {self._model.name!r} takes {len(expected)} arrays of the "
                f"shapes {expected}, got {len(shapes)} of the shapes {shapes}"
            )
        for w, array in zip(self.weights, weights, strict=True):
            if self._whole or self.holds(w):
                w.assign(array)


class OptimizerParts(PartialState):
    """Lets an optimizer update the weights of this rank's stage, and keep their state.

    The script, or ``fit``, passes gradients of all weights. For a weight of another stage it passes
    one number, the norm of the gradient, so that norms over all gradients are right on every rank.
    """

    how_to_save = (
        "save with hvkit.Checkpoint, or on rank 0 inside `with hvkit.settled(model, optimizer):`, "
        "which every rank enters"
    )
    whole_accumulators = False

    def __init__(self, optimizer: Any, parts: ModelParts) -> None:
        self._parts = parts
        super().__init__(optimizer, "a pipeline")
        apply, clip = optimizer.apply, optimizer._clip_gradients

        def apply_to_own(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            self._apply(optimizer, apply, list(grads), trainable_variables)

        def clip_over_stages(grads: list[Any]) -> list[Any]:
            if not optimizer.global_clipnorm:
                return list(clip(grads))
            rest = ops.convert_to_tensor([self._norm_of_others(grads)], grads[0].dtype)
            return list(clip([*grads, rest]))[:-1]

        def overwrite_own(variables: Sequence[Any]) -> None:
            averages = optimizer._model_variables_moving_average
            for v, average in zip(variables, averages, strict=True):
                if average is not None and parts.holds(v):
                    v.assign(average)

        optimizer.apply = apply_to_own
        optimizer._clip_gradients = clip_over_stages
        optimizer._overwrite_model_variables_with_average_value = overwrite_own

    def holds(self, variable: Any) -> bool:
        return self._parts.holds(variable)

    def _apply(self, optimizer: Any, apply: Any, grads: list[Any], variables: Any) -> None:
        """Update this rank's variables, and count the step even if it has none."""
        variables = list(optimizer._trainable_variables if variables is None else variables)
        if not optimizer.built:
            optimizer.build(variables)
        own = [(g, v) for g, v in zip(grads, variables, strict=True) if self._parts.holds(v)]
        if any(g is not None for g, _ in own):
            apply([g for g, _ in own], [v for _, v in own])
            return
        steps = optimizer.gradient_accumulation_steps or 1
        if optimizer.global_clipnorm and (calls_of_apply(optimizer) + 1) % steps == 0:
            self._norm_of_others([])
        optimizer._iterations.assign_add(1)

    def _norm_of_others(self, grads: list[Any]) -> float:
        """The norm of the gradients that other stages have; a collective of the pipeline."""
        channel, norm_of = self._parts.channel, self._parts.tensors.norm_of
        squares = channel.gather_numbers([float(sum(norm_of(g) ** 2 for g in grads))])
        return float(np.sqrt(np.delete(squares, channel.rank).sum()))

    @property
    def keeps_whole(self) -> bool:
        return self._parts.keeps_whole

    def collected(self) -> list[tuple[Any, Array]]:
        return self._parts.collected(self.slots)


class ModelForCallbacks:
    """The model that a callback sees; all ranks of the pipeline call the same methods."""

    is_in_parts = True

    def __init__(self, model: Any, parts: Callable[[], ModelParts]) -> None:
        vars(self).update(_model=model, _parts=parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def get_weights(self) -> list[Array]:
        with AutocastScope(None):
            return [np.array(w.numpy()) for w in self._parts().own_weights]

    def set_weights(self, weights: Sequence[Array]) -> None:
        for w, array in zip(self._parts().own_weights, weights, strict=True):
            w.assign(array)

    def _save(self, name: str, *args: Any, **kwargs: Any) -> None:
        optimizer = self._model.optimizer
        of_optimizer = nullcontext() if optimizer is None else gathered_optimizer(optimizer)
        with self._parts().gathered(), of_optimizer:
            if self._parts().keeps_whole:
                getattr(self._model, name)(*args, **kwargs)

    save = functools.partialmethod(_save, "save")
    save_weights = functools.partialmethod(_save, "save_weights")
