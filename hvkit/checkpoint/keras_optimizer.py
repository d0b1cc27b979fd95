"""Keras's optimizers."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.adapters.keras.checks import compared_in
from hvkit.adapters.keras.initial_state import tf_variable
from hvkit.adapters.keras.optimizers import inner_optimizer
from hvkit.checkpoint.keras_variables import as_dtype_of, require_shapes, shapes_of
from hvkit.checkpoint.parts import Arrays


class OptimizerPart:
    """An optimizer: its variables, in their order, in a plain ``.npz`` file."""

    def __init__(self, name: str, optimizer: Any, models: Sequence[Any]) -> None:
        self.name = name
        self.file = f"{name}.npz"
        self.optimizer = optimizer
        self._models = models

    def facts(self) -> dict[str, Any]:
        self._check_not_wrapped()
        weights = [id(tf_variable(w)) for w in self._weights()]
        trained = None
        if self.optimizer.built:
            updated = inner_optimizer(self.optimizer)._trainable_variables
            trained = [
                weights.index(id(tf_variable(v))) if id(tf_variable(v)) in weights else None
                for v in updated
            ]
        return {"trained": trained, "shapes": shapes_of(self.optimizer.variables)}

    def save(self, path: Path) -> None:
        values = {str(i): v.numpy() for i, v in enumerate(self.optimizer.variables)}
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **values)

    def load(self, content: bytes, facts: Mapping[str, Any]) -> None:
        self._check_not_wrapped()
        with tf.init_scope():
            self._build(facts["trained"])
            variables = self.optimizer.variables
            require_shapes("variables", facts["shapes"], shapes_of(variables))
            with np.load(io.BytesIO(content)) as values:
                for i, variable in enumerate(variables):
                    variable.assign(as_dtype_of(variable, values[str(i)]))

    def _build(self, trained: Sequence[int | None] | None) -> None:
        """Make the variables, for the weights that the saved optimizer updated."""
        if self.optimizer.built or trained is None:
            return
        weights = self._weights()
        if any(i is None or i >= len(weights) for i in trained):
            raise ValueError(
                "it updates variables that are no weights of the checkpoint's models: build it "
                "before restore(), with optimizer.build(variables)"
            )
        self.optimizer.build([weights[i] for i in trained if i is not None])

    def own(self) -> Arrays:
        """Gradients that were accumulated since the last update: not averaged yet."""
        return {name: np.array(v.numpy()) for name, v in self._accumulators().items()}

    def load_own(self, arrays: Arrays) -> None:
        variables = self._accumulators()
        for name, array in arrays.items():
            variables[name].assign(as_dtype_of(variables[name], array))

    def _accumulators(self) -> dict[str, Any]:
        found = [
            variable
            for part in _parts(self.optimizer)
            if part.built and part.gradient_accumulation_steps
            for variable in part._accumulated_gradients
        ]
        return {f"accumulator-{i}": v for i, v in enumerate(found)}

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        return compared_in(self.optimizer)

    def end_epoch(self) -> None:
        pass

    def _weights(self) -> list[Any]:
        return [w for model in self._models for w in getattr(model, "weights", ())]

    def _check_not_wrapped(self) -> None:
        """``compile`` under ``mixed_float16`` wraps it in an optimizer with a state of its own."""
        for model in self._models:
            used = getattr(model, "optimizer", None)
            if used is not self.optimizer and inner_optimizer(used) is self.optimizer:
                raise ValueError(
                    f"model {model.name!r} trains with a {type(used).__name__} around this "
                    f"{type(self.optimizer).__name__}: pass model.optimizer to Checkpoint, after "
                    "compile()"
                )


def _parts(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: several in a ``MultiOptimizer``."""
    inner = inner_optimizer(optimizer)
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    return list(inner.optimizers) if multi and isinstance(inner, multi) else [inner]
