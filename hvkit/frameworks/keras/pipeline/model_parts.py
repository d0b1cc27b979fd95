"""A model of which each rank holds some layers: giving up the others, gathering, and loading.

Files stay those of the plain model: rank 0 saves whole weights, and loading takes this rank's part
of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend import AutocastScope

from hvkit import runtime
from hvkit.frameworks.keras.divided_state import gathered as gathered_optimizer
from hvkit.frameworks.keras.pipeline.layer_graph import Stages
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.pipeline.tensors import hold, placeholder_of, values_for


class ModelParts:
    """Who holds which weight of a model, and the whole of it for a while.

    The weights of other stages keep their shapes, but not their values.

    Args:
        model: whole, on every rank.
        stages: of it.
        links: to the ranks of this pipeline.
        collects: whether this pipeline is the one with rank 0.
    """

    def __init__(
        self, model: keras.Model, stages: Stages, links: StageLinks, *, collects: bool
    ) -> None:
        self._model, self.stages, self._links = model, stages, links
        self.collects = collects
        self._whole = False
        self.weights: list[Any] = list(model.weights)
        self.own = [w for w in self.weights if self.holds(w)]
        # What stands for the values of other stages' weights.
        self._placeholders = {id(w): placeholder_of(w) for w in self.weights if not self.holds(w)}
        self._give_up()
        for layer in model._flatten_layers(include_self=False):
            variables = [*layer._trainable_variables, *layer._non_trainable_variables]
            if any(id(v) in self._placeholders for v in variables):
                self._guard_layer(layer)
        self._guard_model()

    def holds(self, variable: Any) -> bool:
        """Whether this rank's stage holds a Keras variable."""
        return self.stages.holder(variable) == self._links.rank

    @property
    def keeps_whole(self) -> bool:
        """Whether this rank holds the whole weights in ``gathered``."""
        return self.collects and self._links.rank == 0

    def _give_up(self) -> None:
        for w in self.weights:
            if not self.holds(w):
                hold(w, self._placeholders[id(w)])

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Hold the whole weights on rank 0 for a while; a collective."""
        values = dict(enumerate(self.weights))
        holders = {i: self.stages.holder(w) for i, w in values.items()}
        arrays = self.collected(values, holders)
        if not self.keeps_whole:
            yield
            return
        for i, array in arrays.items():
            hold(self.weights[i], values_for(self.weights[i], array))
        self._whole = True
        try:
            yield
        finally:
            self._whole = False
            self._give_up()

    def collected(
        self, variables: dict[int, Any], holders: dict[int, int]
    ) -> dict[int, np.ndarray[Any, Any]]:
        """The values that other ranks of the pipeline hold, on rank 0; nothing on the others.

        Args:
            variables: by a number; those that other ranks hold count there.
            holders: by this number, the rank along the pipeline; the same on every rank.
        """
        found: dict[int, np.ndarray[Any, Any]] = {}
        if not self.collects:
            return found
        with self._links.in_call("hvkit.settled"):
            for i, source in holders.items():
                if source == self._links.rank != 0:
                    self._links.send([ops.convert_to_tensor(variables[i]._value)], 0)
                    self._links.flush()
                elif source != 0 == self._links.rank:
                    (value,) = self._links.receive(source)
                    assert value is not None
                    found[i] = ops.convert_to_numpy(value)
            # A rank that ended now would end MPI, while rank 0 still receives.
            self._links.from_rank(0, [] if self._links.rank == 0 else None)
        return found

    def _guard_layer(self, layer: Any) -> None:
        """Let a layer of another stage save and load only while the model is whole."""
        for name in ("save_own_variables", "get_weights"):
            setattr(layer, name, self._refusing(getattr(layer, name), f"layer {layer.name!r}"))
        for name in ("load_own_variables", "set_weights"):
            setattr(layer, name, self._if_whole(getattr(layer, name)))

    def _guard_model(self) -> None:
        model: Any = self._model
        of = f"model {model.name!r}"
        for name in ("get_weights", "save_weights", "save", "state_dict"):
            if hasattr(model, name):  # the last one on PyTorch only
                setattr(model, name, self._refusing(getattr(model, name), of))
        model.set_weights = self._set_own_weights
        model.__deepcopy__ = functools.partial(_refuse_copy, model.name)

    def _refusing(self, method: Callable[..., Any], of: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def if_whole(*args: Any, **kwargs: Any) -> Any:
            if not self._whole:
                raise ValueError(
                    f"{method.__name__}() of {of} on rank {runtime.rank()} would give only the "
                    "weights of this rank's stage: save with hvkit.Checkpoint, or on rank 0 inside "
                    "`with hvkit.settled(model):`, which every rank enters"
                )
            return method(*args, **kwargs)

        return if_whole

    def _if_whole(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def if_whole(*args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs) if self._whole else None

        return if_whole

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

    def own_values(self) -> list[np.ndarray[Any, Any]]:
        """The weights of this rank."""
        with AutocastScope(None):
            return [np.array(w.numpy()) for w in self.own]

    def set_own_values(self, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set what ``own_values`` returned."""
        for w, array in zip(self.own, arrays, strict=True):
            w.assign(array)


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

    def get_weights(self) -> list[np.ndarray[Any, Any]]:
        """This rank's."""
        found: list[np.ndarray[Any, Any]] = self._parts().own_values()
        return found

    def set_weights(self, weights: Sequence[np.ndarray[Any, Any]]) -> None:
        """Set this rank's."""
        self._parts().set_own_values(weights)

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


def _refuse_copy(name: str, memo: Any) -> Any:
    raise ValueError(
        f"model {name!r} is in a pipeline, where each rank has a part of it, and cannot be copied: "
        "copy it before hvkit.distribute, or save it under `with hvkit.settled(model):` and load "
        "the file"
    )
