"""Rank 0's weights and optimizer state to every rank, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvkit import runtime
from hvkit.agreement import require_equal


def is_built(model: keras.Model) -> bool:
    """Whether all the weights that the model will have are there.

    A model that is only a frame for others (with a ``train_step`` that calls them and no ``build``
    of its own) is never built itself; its parts count.
    """
    if model.built:
        return True
    parts = model._flatten_layers(include_self=False)
    own_build = type(model).build is not keras.Model.build
    return bool(parts) and not own_build and all(part.built for part in parts)


def synchronise(model: keras.Model, optimizers: Sequence[Any]) -> None:
    """Overwrite weights and optimizer state with rank 0's, in place.

    An optimizer that has slot variables on some ranks only, since a checkpoint was loaded there,
    gets them everywhere.

    Raises:
        RanksDisagreeError: the ranks' variables differ in number, path, shape or dtype.
    """
    with tf.init_scope():
        weights = model.weights
        require_equal("model", _facts(weights), "build the same model on every rank")
        built = runtime.allgather([each.built for each in optimizers])
        for i, optimizer in enumerate(optimizers):
            if not optimizer.built and any(theirs[i] for theirs in built):
                with keras.name_scope(optimizer.name):
                    optimizer.build(model.trainable_variables)
            require_equal(
                "optimizer",
                _facts(optimizer.variables),
                "make the same optimizer, and load the same checkpoint, on every rank",
            )
            weights = weights + optimizer.variables
        _broadcast(weights)


def _facts(variables: Sequence[Any]) -> list[str]:
    return [f"{v.path}: shape {tuple(v.shape)}, {v.dtype}" for v in variables]


def _broadcast(variables: Sequence[Any]) -> None:
    values = [np.array(v.numpy(), order="C") for v in variables]
    sent = [value.reshape(-1).view(np.uint8) for value in values]
    if not sent:
        return
    received = runtime.broadcast_bytes(np.concatenate(sent))
    ends = np.cumsum([piece.size for piece in sent])
    for variable, value, piece in zip(
        variables, values, np.split(received, ends[:-1]), strict=True
    ):
        variable.assign(piece.view(value.dtype).reshape(value.shape))
