"""Gradients that travel in 16 bits and are summed in 32.

The same two collectives in place of an allreduce as in :mod:`hvkit.adapters.pytorch.compression`,
where the reasons are.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import tensorflow as tf

_NARROW = (tf.float16, tf.bfloat16)

DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


def narrow_mean(
    gradients: Sequence[tf.Tensor], dtype: tf.DType, hvd: ModuleType, name: str
) -> list[tf.Tensor]:
    """The means over ranks of some gradients; a collective.

    Args:
        gradients: float32 tensors of shapes that are alike on all ranks.
        dtype: of 16 bits, for the way.
        hvd: Horovod's TensorFlow binding.
        name: the same on every rank, and no other collective's.
    """
    sizes = [int(g.shape.num_elements()) for g in gradients]
    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0)
    padding = -sum(sizes) % hvd.size()
    sent = to_bits(tf.pad(flat, [[0, padding]]), dtype)
    shares = hvd.alltoall(sent, name=f"{name}.shares", ignore_name_scope=True)
    mean = tf.reduce_mean(tf.reshape(from_bits(shares, dtype), [hvd.size(), -1]), axis=0)
    means = hvd.allgather(to_bits(mean, dtype), name=f"{name}.means", ignore_name_scope=True)
    received = from_bits(means, dtype)[: sum(sizes)]
    pieces = tf.split(received, sizes)
    return [tf.reshape(piece, g.shape) for piece, g in zip(pieces, gradients, strict=True)]


def to_bits(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round to 16 bits, in a dtype that Horovod moves without looking inside."""
    return tf.bitcast(tf.cast(values, dtype), tf.int16)


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The float32 values of what :func:`to_bits` gave."""
    return tf.cast(tf.bitcast(bits, dtype), tf.float32)


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """Horovod has no bfloat16, and float16 would overflow in the sum where the mean fits."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in _NARROW else tensor
