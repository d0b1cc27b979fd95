"""The mean over ranks of row-sparse gradients (``tf.IndexedSlices``), as embeddings make them.

The rows that the ranks touched are gathered rather than summed as dense tensors: a table of
millions of rows costs what the few rows of a batch cost.

Keras's optimizers square the rows of such a gradient one by one, also where several have the same
index. The update of one process with all ranks' samples therefore depends on which rows it would
have had. Rows looked up for each sample, such as tokens, it has once for each sample: those of
all ranks one after the other. Rows looked up once for the whole batch, such as positions, it has
once: the ranks' rows have to be added up.

Rows were looked up for the whole batch if every rank has the same ones in rising order; a rank may
have fewer of them, from the first on, since its sequences are shorter. A few samples may look the
same, so how a graph computes the indices counts as well: not from the samples. Eager code does not
show that; a single row is taken to be a single sample's there.
"""

from __future__ import annotations

import enum
from types import ModuleType
from typing import Any

import tensorflow as tf

from hvkit.adapters.keras.collectives import from_bits, to_bits, widened


class Origin(enum.IntEnum):
    """Where a rank's indices come from; stands before them, where all ranks' are gathered."""

    BATCH = -1
    SAMPLES = -2
    UNKNOWN = -3


# Their results depend on shapes alone.
_OF_SHAPES = frozenset(
    ["Shape", "ShapeN", "Size", "Rank", "OnesLike", "ZerosLike", "BroadcastGradientArgs"]
)
# Functions inside a graph, into which nobody looks here.
_CALLS = frozenset(
    ["PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile"]
)


def average_rows(
    slices: tf.IndexedSlices, name: str, hvd: ModuleType, narrow: tf.DType | None = None
) -> tf.IndexedSlices:
    """The mean over ranks of a gradient that is sparse in its first dimension; a collective.

    Args:
        slices: values of shape (rows, ...) and indices of shape (rows,); rows may be 0.
        name: the same on every rank, and no other collective's.
        hvd: Horovod's TensorFlow binding.
        narrow: dtype of 16 bits in which float32 values travel; None for their own.

    Returns:
        The slices that one process with all ranks' samples would have, of the same dtypes.
    """
    dtype = slices.values.dtype
    values = widened(slices.values)
    narrow = narrow if values.dtype == tf.float32 else None
    sent = to_bits(values, narrow) if narrow else values
    values = hvd.allgather(sent, name=f"{name}.values", ignore_name_scope=True)
    if narrow:
        values = from_bits(values, narrow)
    mark = tf.constant([origin(slices.indices)], tf.int64)
    # All of one dtype: that of a rank which lacks this gradient is not known.
    indices = tf.concat([mark, tf.cast(slices.indices, tf.int64)], axis=0)
    indices = hvd.allgather(indices, name=f"{name}.indices", ignore_name_scope=True)
    values, indices = _as_in_one_process(values, indices)
    return tf.IndexedSlices(
        tf.cast(values / hvd.size(), dtype),
        tf.cast(indices, slices.indices.dtype),
        slices.dense_shape,
    )


def _as_in_one_process(values: tf.Tensor, marked: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """All ranks' rows, added up if they were looked up for the whole batch.

    Args:
        values: the rows of all ranks, of shape (rows, ...).
        marked: their indices, with a mark before those of each rank, of shape (rows + ranks,).
    """
    is_row = marked >= 0
    begins = tf.where(~is_row)[:, 0]
    rank = tf.cumsum(tf.cast(~is_row, tf.int64)) - 1
    place = tf.range(tf.size(marked, tf.int64)) - tf.gather(begins, rank) - 1
    indices, place = tf.boolean_mask(marked, is_row), tf.boolean_mask(place, is_row)
    count = tf.reduce_max(tf.concat([place + 1, [0]], axis=0))
    at_place = tf.math.unsorted_segment_max(indices, place, count)
    marks = tf.gather(marked, begins)
    per_batch = (
        tf.reduce_all(marks != Origin.SAMPLES)
        & (tf.reduce_all(marks == Origin.BATCH) | (count > 1))
        & tf.reduce_all(at_place[1:] > at_place[:-1])
        & tf.reduce_all(tf.gather(at_place, place) == indices)
    )
    found: tuple[tf.Tensor, tf.Tensor] = tf.cond(
        per_batch,
        lambda: (tf.math.unsorted_segment_sum(values, place, count), at_place),
        lambda: (values, indices),
    )
    return found


def origin(indices: tf.Tensor) -> Origin:
    """Where indices come from: what a graph was called with and drew at random, or nothing such."""
    if tf.executing_eagerly():
        return Origin.UNKNOWN
    while indices.op.type == "Identity":
        indices = indices.op.inputs[0]
    if _is_argument(indices):
        return Origin.UNKNOWN  # the whole gradient was computed elsewhere
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
    """What a function's placeholder stands for outside of it; None for an argument."""
    for outside, inside in getattr(placeholder.graph, "captures", ()):
        if inside.name == placeholder.name:
            return outside
    return None
