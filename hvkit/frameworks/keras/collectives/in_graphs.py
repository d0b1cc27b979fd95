"""``hvkit.allreduce``, ``average`` and ``any_rank`` while TensorFlow traces a graph."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvkit import runtime
from hvkit.frameworks.keras.backends import not_converted
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait, name_in_graph
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.graph_refusals import refuse_xla


@not_converted
def allreduce(value: Any, op: str, sent_as: str) -> tf.Tensor:
    """``hvkit.allreduce`` of a tensor or variable, without gradients.

    Args:
        value: of a dtype other than complex.
        op: ``"mean"``, ``"sum"``, ``"min"`` or ``"max"``.
        sent_as: the name of the dtype in which ranks send it.
    """
    tensor = tf.convert_to_tensor(value)
    return tf.cast(_reduced(tf.cast(tensor, sent_as), op, "hvkit.allreduce"), tensor.dtype)


@not_converted
def average(values: Mapping[str, Any], weight: Any) -> dict[str, tf.Tensor]:
    """``hvkit.average`` of numbers, each a tensor of its own dtype, or of float32 if of integers.

    A weight that is negative or not finite makes the means NaN.
    """
    numbers = [tf.reshape(tf.cast(v, tf.float64), []) for v in values.values()]
    w = tf.reshape(tf.cast(1.0 if weight is None else weight, tf.float64), [])
    w = tf.where(tf.math.is_finite(w) & (w >= 0), w, tf.constant(math.nan, tf.float64))
    counted = [tf.where(tf.equal(w, 0), tf.zeros_like(v), v * w) for v in numbers]
    *totals, total = tf.unstack(_reduced(tf.stack([*counted, w]), "sum", "hvkit.average"))
    kinds = [tf.convert_to_tensor(v).dtype for v in values.values()]
    return {
        name: tf.cast(each / total, kind if kind.is_floating else tf.float32)
        for name, each, kind in zip(values, totals, kinds, strict=True)
    }


@not_converted
def any_rank(flag: Any) -> tf.Tensor:
    """``hvkit.any_rank`` of one truth value."""
    mine = tf.cast(tf.reshape(tf.cast(flag, tf.bool), []), tf.int32)
    return _reduced(mine, "max", "hvkit.any_rank") > 0


def _reduced(tensor: tf.Tensor, op: str, call: str) -> tf.Tensor:
    if runtime.size() == 1:
        return tf.stop_gradient(tensor)
    refuse_xla(call)
    name = name_in_graph(call)
    wire = Wire("objects")
    kind = {"mean": wire.sum, "sum": wire.sum, "min": wire.lowest, "max": wire.highest}[op]
    with tf.device("CPU:0"):
        reduced = _wait().around(tensor, lambda sent: kind(sent, name))
        if op in ("min", "max") and tensor.dtype.is_floating:
            # With MPI the result of a NaN depends on the order of ranks.
            mine = tf.cast(tf.math.is_nan(tensor), tf.int32)
            nan = _wait().around(mine, lambda sent: wire.highest(sent, f"{name}.nan")) > 0
            reduced = tf.where(nan, tf.constant(math.nan, tensor.dtype), reduced)
        reduced = tf.ensure_shape(reduced, tensor.shape)
        return tf.stop_gradient(reduced / wire.size if op == "mean" else reduced)


@functools.cache
def _wait() -> GraphWait:
    """One counter for all calls together: each one costs the watcher time."""
    return GraphWait("hvkit.allreduce", "hvkit.allreduce")
