"""Copies the first rank's weights and optimizer state to every rank, bit for bit.

The first of all ranks is rank 0, as messages and names here call it; a group has another.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend import AutocastScope

from hvkit.communication import collectives
from hvkit.communication.collectives import require_equal
from hvkit.communication.group import Group
from hvkit.frameworks.keras.backends import have_values, outside_graphs


class Together(keras.Model):  # type: ignore[misc]
    """Several models that train together, as one that contains them; nobody calls it."""

    def __init__(self, models: Sequence[keras.Model]) -> None:
        super().__init__()
        self.models = list(models)


def has_weights(model: keras.Model) -> bool:
    """Whether the model has all its weights, with values.

    A model that only contains others (with a ``train_step`` that calls them and no ``build`` of its
    own) is never built itself; its parts count.
    """
    return _is_built(model) and have_values(model.weights)


def _is_built(model: keras.Model) -> bool:
    if model.built:
        return True
    parts = model._flatten_layers(include_self=False)
    own_build = type(model).build is not keras.Model.build
    return bool(parts) and not own_build and all(part.built for part in parts)


def synchronise(weights: Sequence[Any], group: Group) -> None:
    """Overwrite weights with the first rank's, in place; a collective.

    Raises:
        RanksDisagreeError: the ranks' weights differ in number, path, shape or dtype.
    """
    with outside_graphs():
        facts = [f"{_name(w)}: shape {tuple(w.shape)}, {w.dtype}" for w in weights]
        advice = (
            "build the same model on every rank; if only numbers in names differ, some rank has "
            "made other models before: call keras.utils.clear_session() there, or name the layers"
        )
        require_equal("model", facts, advice, group=group)
        _broadcast(weights, group)


def _name(weight: Any) -> str:
    """The weight's name after that of its layer.

    Not its whole path: that has the model's name only if the layer was built inside the model, and
    rank 0's may have been built before, by ``adapt``.
    """
    return "/".join(getattr(weight, "path", weight.name).split("/")[-2:])


def synchronise_optimizers(
    optimizers: Sequence[Any],
    trained: Sequence[Any],
    group: Group,
    leave_out: Container[int] = (),
) -> None:
    """Overwrite the state of optimizers with the first rank's, in place; a collective.

    If an optimizer has slot variables on some ranks only, because a script loaded a checkpoint
    there, this makes them on all ranks, for the ``trained`` variables.

    Args:
        optimizers: all of a model.
        trained: the model's trainable variables.
        group: the ranks that take part.
        leave_out: ids of variables of the optimizers that differ between ranks.

    Raises:
        RanksDisagreeError: the ranks' states differ in number, shape or dtype.
    """
    with outside_graphs():
        built = collectives.gather("distribute", [each.built for each in optimizers], group)
        for i, optimizer in enumerate(optimizers):
            if not optimizer.built and any(theirs[i] for theirs in built):
                optimizer.build(trained)
            variables = [v for v in optimizer.variables if id(v) not in leave_out]
            require_equal(
                "optimizer",
                # Without names: a loaded optimizer names its variables differently.
                [f"variable: shape {tuple(v.shape)}, {v.dtype}" for v in variables],
                "make the same optimizer, and load the same checkpoint, on every rank",
                group=group,
            )
            _broadcast(variables, group)


def _broadcast(variables: Sequence[Any], group: Group) -> None:
    if not variables:
        return
    with AutocastScope(None):  # in a layer's call, variables look as if they had 16 bits
        values = [np.array(v.numpy(), order="C") for v in variables]
        sent = [value.reshape(-1).view(np.uint8) for value in values]
        received = collectives.broadcast_state(np.concatenate(sent), group)
        ends = np.cumsum([piece.size for piece in sent])
        pieces = np.split(received, ends[:-1])
        for variable, value, piece in zip(variables, values, pieces, strict=True):
            variable.assign(piece.view(value.dtype).reshape(value.shape))
