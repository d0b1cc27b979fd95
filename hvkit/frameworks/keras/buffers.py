"""Variables that layers assign in ``call``: means over ranks on TensorFlow, and differences."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras

from hvkit.frameworks.keras.backends import (
    ON_TENSORFLOW,
    backend_variable,
    not_converted,
    outside_graphs,
)
from hvkit.frameworks.keras.refusals import weights_of_models
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, Rows, require_same_buffers, warn_of_integers

if ON_TENSORFLOW:
    import tensorflow as tf

    from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait, widened
    from hvkit.frameworks.keras.collectives.wire import Wire
    from hvkit.frameworks.keras.graph_refusals import refuse_xla


@not_converted
def average(layers: Sequence[keras.layers.Layer]) -> None:
    """Average the non-trainable variables of layers over ranks, also in a graph; a collective."""
    held, first = learnt_in(layers, with_batch_norm=True), False
    if tf.executing_eagerly():
        first = require_same_buffers([f"{v.name}: {tuple(v.shape)}, {v.dtype}" for v in held])
    else:
        refuse_xla("hvkit.average_buffers")
    kinds: dict[str, list[Any]] = {}
    for v in held:
        if tf.as_dtype(v.dtype).is_floating:
            kinds.setdefault(v.dtype, []).append(v)
    for kind, together in kinds.items():
        flat = widened(tf.concat([tf.reshape(v.value, [-1]) for v in together], axis=0))
        average_of = functools.partial(
            Wire("batch norm").mean, name=f"hvkit.average_buffers.{kind}"
        )
        mean = _wait().around(flat, average_of)
        sizes = [backend_variable(v).shape.num_elements() for v in together]
        for v, piece in zip(together, tf.split(mean, sizes), strict=True):
            v.assign(tf.cast(tf.reshape(piece, v.shape), v.dtype))
    if first:
        rest = [v for v in held if not tf.as_dtype(v.dtype).is_floating]
        warn_of_integers(*fingerprints_of(rest))


@functools.cache
def _wait() -> GraphWait:
    return GraphWait("hvkit.average_buffers", "hvkit.average_buffers")


def compared_in(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """What of a model may differ between ranks although a file holds rank 0's, and fingerprints.

    These are the variables that layers assign, without those of batch norm if it was distributed:
    hvkit averages them, unless the script wants each rank's own. Of a model that was not
    distributed these are all weights.
    """
    distributed = weights_of_models()
    if any(id(w) in distributed for w in model.weights):
        return compared_of(model)
    return fingerprints_of([*model.trainable_weights, *learnt_in([model], with_batch_norm=True)])


def compared_of(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """What the forward passes of a distributed model learn outside of batch norm."""
    return fingerprints_of(learnt_in([model], with_batch_norm=False))


def learnt_in(layers: Sequence[keras.layers.Layer], *, with_batch_norm: bool) -> list[Any]:
    """The variables that layers may assign, each once; not the states of recurrent layers."""
    normalisation = keras.layers.BatchNormalization
    parts = [part for layer in layers for part in layer._flatten_layers()]
    found = {
        id(v): v
        for part in parts
        if not getattr(part, "stateful", False)
        and (with_batch_norm or not isinstance(part, normalisation))
        for v in part._non_trainable_variables
    }
    return list(found.values())


def fingerprints_of(variables: Sequence[Any]) -> tuple[list[Compared], list[Rows]]:
    with outside_graphs():
        rows = [fingerprints.fingerprint(v.numpy()) for v in variables]
    return [Compared(f"variable {getattr(v, 'path', v.name)}") for v in variables], rows
