"""The regularisation of a model whose layers are on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend

from hvkit.frameworks.keras.pipeline.model_parts import ModelParts
from hvkit.frameworks.keras.pipeline.stage_messages import StageLinks


@dataclass
class Penalties:
    """The regularisation losses of a model.

    Attributes:
        values: of all stages.
        own: by the place in ``values``, the variables of this rank.
        losses: of these, on the tape.
        tape: of this rank's losses.
    """

    values: list[tf.Tensor]
    own: dict[int, Any]
    losses: dict[int, tf.Tensor]
    tape: tf.GradientTape

    def gradients(self, of_values: Sequence[tf.Tensor]) -> dict[int, tf.Tensor]:
        """By the id of a variable of this rank, the gradient, from those of ``values``."""
        if not self.own:
            return {}
        found = self.tape.gradient(
            list(self.losses.values()),
            [v._value for v in self.own.values()],
            output_gradients=[of_values[i] for i in self.own],
        )
        return {id(v): g for v, g in zip(self.own.values(), found, strict=True)}


def penalties_of(model: keras.Model, parts: ModelParts, links: StageLinks) -> Penalties:
    """The regularisation of all stages; a collective of the pipeline if there is any."""
    variables = [v for v in model.trainable_variables if v.regularizer is not None]
    own = {i: v for i, v in enumerate(variables) if parts.holds(v)}
    with backend.AutocastScope(None), tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([v._value for v in own.values()])
        mine = {i: v.regularizer(v) for i, v in own.items()}
    if not variables:
        return Penalties([], own, mine, tape)
    values = np.zeros(len(variables), np.float64)
    for i, loss in mine.items():
        values[i] = float(loss)
    everyone = links.gather(values)
    shown = [
        tf.constant(everyone[parts.stages.holder(v), i], v._value.dtype)
        for i, v in enumerate(variables)
    ]
    return Penalties(shown, own, mine, tape)
