"""The parts of a model and of its optimizers: giving up the others, gathering, and loading.

Files stay those of the plain model: rank 0 saves whole weights, and loading takes this rank's part
of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend import AutocastScope

from hvkit import runtime
from hvkit.frameworks.keras.divided_state import gathered as gathered_optimizer
from hvkit.frameworks.keras.divided_state import remember
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.partial_state import PartialState
from hvkit.frameworks.keras.pipeline.layer_graph import Stages
from hvkit.frameworks.keras.pipeline.tensors import Tensors
from hvkit.pipeline.channel import Channel

Array = np.ndarray[Any, Any]


class ModelParts:
    """Who holds which weight of a model, and the whole of it for a while.

    The weights of other stages keep their shapes, but not their values.

    Args:
        model: whole, on every rank.
        stages: of it.
        links: to the ranks of this pipeline.
        tensors: of the backend.
        collects: whether this pipeline is the one with rank 0.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Stages,
        links: Channel,
        tensors: Tensors,
        *,
        collects: bool,
    ) -> None:
        self._model, self.stages, self.links, self.tensors = model, stages, links, tensors
        self.collects = collects
        self._whole = False
        self.weights: list[Any] = list(model.weights)
        self.own = [w for w in self.weights if self.holds(w)]
        # What stands for the values of other stages' weights.
        self._placeholders = {
            id(w): tensors.placeholder_of(w) for w in self.weights if not self.holds(w)
        }
        self._give_up()
        self._guard()

    def holds(self, variable: Any) -> bool:
        """Whether this rank's stage holds a Keras variable."""
        return self.stages.holder(variable) == self.links.rank

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank holds the whole weights in ``gathered``."""
        return self.collects and self.links.rank == 0

    def _give_up(self) -> None:
        for w in self.weights:
            if not self.holds(w):
                self.tensors.hold(w, self._placeholders[id(w)])

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole weights on rank 0 for a while; a collective."""
        found = self.collected([(w, w) for w in self.weights])
        if not self.keeps_whole:
            yield
            return
        for w, array in found:
            self.tensors.hold(w, array)
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._give_up()

    def collected(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Array]]:
        """What other ranks of the pipeline hold, on rank 0; nothing on the others; a collective.

        Args:
            pairs: variables, each with the weight whose stage holds its value.

        Returns:
            Those that other ranks hold, with their values.
        """
        found: list[tuple[Any, Array]] = []
        if not self.collects:
            return found
        with self.links.in_call("hvkit.settled"):
            for variable, weight in pairs:
                source = self.stages.holder(weight)
                if source == self.links.rank != 0:
                    self.links.send([ops.convert_to_tensor(variable._value)], 0)
                    self.links.flush()
                elif source != 0 == self.links.rank:
                    (value,) = self.links.receive(source)[1]()
                    found.append((variable, ops.convert_to_numpy(value)))
            # A rank that ended now would end MPI, while rank 0 still receives.
            self.links.from_rank(0)
        return found

    def _guard(self) -> None:
        """Let the model, and layers of other stages, save only while the model is whole.

        Those layers load only then, too: loading the whole goes over all of them.
        """
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
        """Let a method do nothing while the model is not whole, or raise with this name."""
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
        """As ``set_weights`` of the model: of whole weights, take this rank's part."""
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


class OptimizerParts:
    """Lets an optimizer update the weights of this rank's stage, and hold their state.

    The script, or ``fit``, passes gradients of all weights. For a weight of another stage this is
    one number, the norm of its gradient there, so that norms over all gradients are right on every
    rank.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
        parts: of the model.

    Raises:
        ValueError: the optimizer keeps a state that belongs to no single weight.
    """

    def __init__(self, optimizer: Any, parts: ModelParts) -> None:
        self._parts = parts
        self._state = PartialState(
            optimizer,
            parts.holds,
            "a pipeline",
            "save with hvkit.Checkpoint, or on rank 0 inside `with hvkit.settled(model, "
            "optimizer):`, which every rank enters",
            whole_accumulators=False,
        )
        remember(optimizer, self)
        self._follow(optimizer)
        if optimizer.built:
            self._state.divide()

    def _follow(self, optimizer: Any) -> None:
        """Replace the methods of the optimizer that make and use its state."""
        apply, build, clip = optimizer.apply, optimizer.build, optimizer._clip_gradients

        def build_in_parts(variables: Sequence[Any]) -> None:
            build(variables)
            self._state.refuse_shared()

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
                if average is not None and self._parts.holds(v):
                    v.assign(average)

        optimizer.build = build_in_parts
        optimizer.apply = apply_to_own
        optimizer._clip_gradients = clip_over_stages
        optimizer._overwrite_model_variables_with_average_value = overwrite_own

    def _apply(self, optimizer: Any, apply: Any, grads: list[Any], variables: Any) -> None:
        """Update this rank's variables; count the step also where it has none."""
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
        """The norm of what other stages pass to this; a collective of the pipeline."""
        links, norm_of = self._parts.links, self._parts.tensors.norm_of
        squares = links.gather_numbers([float(sum(norm_of(g) ** 2 for g in grads))])
        return float(np.sqrt(np.delete(squares, links.rank).sum()))

    def slots(self) -> list[Any]:
        """The variables with the state of single weights."""
        return [slot for slot, _ in self._state.slots]

    def unfolded(self) -> AbstractContextManager[None]:
        """Have room for the whole state for a while; afterwards keep this rank's part."""
        return self._state.unfolded()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole state on rank 0 for a while; a collective."""
        found = self._parts.collected(self._state.slots)
        if not self._parts.keeps_whole:
            yield
            return
        with self.unfolded():
            for slot, array in found:
                slot.assign(array)
            yield


def show_in_parts(callback: Any, parts: Callable[[], ModelParts]) -> None:
    """Let a callback of Keras that saves the model, or keeps its weights, do so in parts.

    Args:
        callback: any of Keras.
        parts: of the model; called once it is divided.
    """
    if isinstance(callback, keras.callbacks.ModelCheckpoint | keras.callbacks.EarlyStopping):
        set_model = type(callback).set_model
        callback.set_model = lambda model: set_model(callback, _ModelInParts(model, parts))


class _ModelInParts:
    """The model as a callback sees it; all ranks of the pipeline call the same methods.

    What is not here goes to the model itself.
    """

    is_in_parts = True

    def __init__(self, model: Any, parts: Callable[[], ModelParts]) -> None:
        vars(self).update(_model=model, _parts=parts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    def get_weights(self) -> list[Array]:
        """This rank's."""
        with AutocastScope(None):
            return [np.array(w.numpy()) for w in self._parts().own]

    def set_weights(self, weights: Sequence[Array]) -> None:
        """Set this rank's."""
        for w, array in zip(self._parts().own, weights, strict=True):
            w.assign(array)

    def save_weights(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole weights on rank 0."""
        self._save(self._model.save_weights, args, kwargs)

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Save the whole model on rank 0, with its optimizer."""
        self._save(self._model.save, args, kwargs)

    def _save(self, method: Callable[..., Any], args: Any, kwargs: Any) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._parts().gathered())
            if (optimizer := self._model.optimizer) is not None:
                stack.enter_context(gathered_optimizer(optimizer))
            if self._parts().keeps_whole:
                method(*args, **kwargs)
