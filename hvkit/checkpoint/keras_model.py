"""Keras's models."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.adapters.keras.checks import compared_in
from hvkit.adapters.keras.initial_state import has_weights
from hvkit.checkpoint.keras_variables import as_dtype_of, require_shapes, shapes_of
from hvkit.checkpoint.parts import Arrays


class ModelPart:
    """A model, in the file that ``model.load_weights`` takes."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self.file = f"{name}.weights.h5"
        self.model = model

    def facts(self) -> dict[str, Any]:
        self._check_built()
        return {"shapes": shapes_of(self.model.weights)}

    def save(self, path: Path) -> None:
        self._check_built()
        with _without_optimizer(self.model):
            self.model.save_weights(path)

    def load(self, content: bytes, facts: Mapping[str, Any]) -> None:
        self._check_built()
        require_shapes("weights", facts["shapes"], shapes_of(self.model.weights))
        # The file holds the seeds of one rank.
        seeds = {name: v.numpy() for name, v in self._seeds().items()}
        with tempfile.TemporaryDirectory() as folder, _without_optimizer(self.model):
            path = Path(folder, self.file)
            path.write_bytes(content)
            self.model.load_weights(path)
        self.load_own(seeds)

    def own(self) -> Arrays:
        return {name: np.array(v.numpy()) for name, v in self._own().items()}

    def load_own(self, arrays: Arrays) -> None:
        variables = self._own()
        for name, array in arrays.items():
            variables[name].assign(as_dtype_of(variables[name], array))

    def _own(self) -> dict[str, Any]:
        self._check_built()
        fixed = {f"weight-{i}": w for i, w in enumerate(self.model.non_trainable_weights)}
        return fixed | self._seeds()

    def _seeds(self) -> dict[str, Any]:
        """The states of the seed generators of all layers."""
        others = {id(v) for v in (*self.model.weights, *self.model.metrics_variables)}
        seeds = [v for v in self.model.variables if id(v) not in others]
        return {f"seed-{i}": v for i, v in enumerate(seeds)}

    def compared(self) -> tuple[list[Compared], list[Rows]]:
        return compared_in(self.model)

    def end_epoch(self) -> None:
        pass

    def _check_built(self) -> None:
        if not has_weights(self.model):
            raise ValueError(
                f"{self.name}: Keras model {self.model.name!r} has no weights yet: build it first, "
                "with model.build(input_shape), a keras.Input in front, or a call on one batch"
            )
        if not self.model.built:
            raise ValueError(
                f"{self.name}: Keras model {self.model.name!r} is only a frame for others and "
                "cannot save its weights itself: pass the models inside it, each by a name of its "
                "own, as in Checkpoint(folder, generator=generator, critic=critic, ...)"
            )


@contextmanager
def _without_optimizer(model: Any) -> Iterator[None]:
    """Keras writes the optimizer of a compiled model into the weights' file, too."""
    attributes = vars(model)
    optimizer = attributes.pop("optimizer", None)
    try:
        with warnings.catch_warnings():
            # Files of models that were compiled and of those that were not are alike for us.
            warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
            yield
    finally:
        if optimizer is not None:
            attributes["optimizer"] = optimizer
