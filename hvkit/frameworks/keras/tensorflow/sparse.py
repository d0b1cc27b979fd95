"""The mean over ranks of the row-sparse gradients (``tf.IndexedSlices``) of embeddings.

Ranks gather the rows that they touched instead of summing dense tensors: a table of millions of
rows costs as much as the rows of a batch.

Keras's optimizers square the rows of such a gradient one by one, even if several rows have the same
index. To update as one process with all ranks' samples would, the ranks need the rows that this
process would have:

- rows looked up for each sample, such as tokens: those of all ranks, one after the other;
- rows looked up once for the whole batch, such as positions: one set, the sum of the ranks' rows.

Rows belong to the whole batch if every rank has the same ones in rising order. A rank with shorter
sequences may have fewer, counted from the first. A few samples can look like that by chance, so the
graph must also compute the indices without reading the samples. Eager code does not show how it
computed them; there, a single row counts as one sample's.
"""

from __future__ import annotations

import enum
from typing import Any

import tensorflow as tf

from hvkit.compression import Compression, for_rows
from hvkit.frameworks.keras.tensorflow import ops
from hvkit.frameworks.keras.tensorflow.wire import Wire, widened


class Origin(enum.IntEnum):
    """Where a rank's indices come from; the ranks send this mark before their indices."""

    BATCH = -1
    SAMPLES = -2
    UNKNOWN = -3


# Operations whose results depend on shapes only.
_OF_SHAPES = frozenset(
    ["Shape", "ShapeN", "Size", "Rank", "OnesLike", "ZerosLike", "BroadcastGradientArgs"]
)
# Calls of functions inside a graph; ``origin`` does not look into them.
_CALLS = frozenset(
    ["PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile"]
)


def average_rows(
    slices: tf.IndexedSlices, name: str, wire: Wire, compression: Compression | None = None
) -> tf.IndexedSlices:
    """The mean over ranks of a gradient that is sparse in its first dimension; a collective.

    The values have the shape (rows, ...); rows may be 0. A compression that rounds value by value
    is used for float32 values; others are not.
    """
    dtype = slices.values.dtype
    values = widened(slices.values)
    rounding = for_rows(compression) if values.dtype == tf.float32 else None
    sent = values
    if rounding:
        encoded = rounding.encode(tf.reshape(values, [-1]), ops)
        sent = tf.reshape(encoded, tf.shape(values))
    values = wire.gather(sent, f"{name}.values")
    if rounding:
        shape = tf.shape(values)
        values = tf.reshape(rounding.decode(tf.reshape(values, [-1, 1]), ops), shape)
    mark = tf.constant([origin(slices.indices)], tf.int64)
    # In one dtype on all ranks: a rank without this gradient does not know the others' dtype.
    indices = tf.concat([mark, tf.cast(slices.indices, tf.int64)], axis=0)
    indices = wire.gather(indices, f"{name}.indices")
    values, indices = _as_in_one_process(values, indices)
    return tf.IndexedSlices(
        tf.cast(values / wire.size, dtype),
        tf.cast(indices, slices.indices.dtype),
        slices.dense_shape,
    )


def _as_in_one_process(values: tf.Tensor, marked: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """All ranks' rows of shape (rows, ...), added up if looked up for the whole batch.

    ``marked`` are their indices, with a mark before each rank's, of shape (rows + ranks,).
    """
    is_row = marked >= 0
    begins = tf.where(~is_row)[:, 0]
    rank = tf.cumsum(tf.cast(~is_row, tf.int64)) - 1
    position = tf.range(tf.size(marked, tf.int64)) - tf.gather(begins, rank) - 1
    indices, position = tf.boolean_mask(marked, is_row), tf.boolean_mask(position, is_row)
    count = tf.reduce_max(tf.concat([position + 1, [0]], axis=0))
    at_position = tf.math.unsorted_segment_max(indices, position, count)
    marks = tf.gather(marked, begins)
    per_batch = (
        tf.reduce_all(marks != Origin.SAMPLES)
        & (tf.reduce_all(marks == Origin.BATCH) | (count > 1))
        & tf.reduce_all(at_position[1:] > at_position[:-1])
        & tf.reduce_all(tf.gather(at_position, position) == indices)
    )
    found: tuple[tf.Tensor, tf.Tensor] = tf.cond(
        per_batch,
        lambda: (tf.math.unsorted_segment_sum(values, position, count), at_position),
        lambda: (values, indices),
    )
    return found


def origin(indices: tf.Tensor) -> Origin:
    """Where indices come from: samples, if a graph's arguments or random numbers decide them."""
    if tf.executing_eagerly():
        return Origin.UNKNOWN
    while indices.op.type == "Identity":
        indices = indices.op.inputs[0]
    if _is_argument(indices):
        return Origin.UNKNOWN  # another function computed the whole gradient
    found = Origin.BATCH
    seen: set[Any] = set()
    waiting = [indices]
    while waiting:
        tensor = waiting.pop()
        if isinstance(tensor, tf.__internal__.EagerTensor) or tensor.ref() in seen:
            continue
        seen.add(tensor.ref())
        op = tensor.op
        if op.type in _CALLS:
            found = Origin.UNKNOWN
        elif op.type == "Placeholder" and not _is_argument(tensor):
            waiting.append(_captured(tensor))
        elif op.type == "Placeholder" or (op.op_def.is_stateful and op.type != "ReadVariableOp"):
            return Origin.SAMPLES
        elif op.type not in _OF_SHAPES:
            waiting.extend(op.inputs)
    return found


def _is_argument(tensor: tf.Tensor) -> bool:
    return tensor.op.type == "Placeholder" and _captured(tensor) is None


def _captured(placeholder: tf.Tensor) -> Any:
    """The outer tensor that a function's placeholder stands for; None for an argument."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside.name == placeholder.name:
            return outside
    return None
