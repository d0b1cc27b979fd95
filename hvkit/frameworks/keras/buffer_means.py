"""The means over ranks of variables that layers assign in ``call``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.buffers import fingerprints_of, learnt_in
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait, widened
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.graph_refusals import refuse_xla
from hvkit.sync.buffers import require_same_buffers, warn_of_integers


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
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
