"""The regularisation of a model whose layers are on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src import backend

from hvkit.frameworks.keras.pipeline.model_parts import ModelParts
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks
from hvkit.frameworks.keras.pipeline.tensors import recorded


@dataclass
class Penalties:
    """The regularisation losses of a model.

    Attributes:
        values: of all stages.
        own: by the place in ``values``, the variables of this rank.
        losses: of these, as recorded.
        of_losses: gives the gradients of the variables, from those of the losses.
    """

    values: list[Any]
    own: dict[int, Any]
    losses: dict[int, Any]
    of_losses: Callable[..., list[Any]]

    def gradients(self, of_values: Sequence[Any]) -> dict[int, Any]:
        """By the id of a variable of this rank, the gradient, from those of ``values``."""
        if not self.own:
            return {}
        found = self.of_losses(list(self.losses.values()), [of_values[i] for i in self.own])
        return {id(v): g for v, g in zip(self.own.values(), found, strict=True)}


def penalties_of(model: keras.Model, parts: ModelParts, links: StageLinks) -> Penalties:
    """The regularisation of all stages; a collective of the pipeline if there is any."""
    variables = [v for v in model.trainable_variables if v.regularizer is not None]
    own = {i: v for i, v in enumerate(variables) if parts.holds(v)}
    with backend.AutocastScope(None):
        mine, of_losses = recorded(
            lambda: {i: v.regularizer(v) for i, v in own.items()},
            [v._value for v in own.values()],
        )
    if not variables:
        return Penalties([], own, mine, of_losses)
    values = np.zeros(len(variables), np.float64)
    for i, loss in mine.items():
        values[i] = ops.convert_to_numpy(loss)
    everyone = links.gather(values)
    shown = [
        ops.convert_to_tensor(everyone[parts.stages.holder(v), i], v._dtype)
        for i, v in enumerate(variables)
    ]
    return Penalties(shown, own, mine, of_losses)
