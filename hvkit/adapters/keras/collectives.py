"""Counts how often a graph comes to its collectives, for whoever asks why a rank waits.

No Python code runs when a graph does, so two counters in the graph stand for the ``with`` statement
that marks a wait elsewhere: one goes up before the collectives, one after them.

Gradients that travel in 16 bits and are summed in 32.

The same two collectives in place of an allreduce as in :mod:`hvkit.adapters.pytorch.buckets`,
where the reasons are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf

from hvkit.engines import waiting_for_all_ranks
from hvkit.watch import calls


class GraphWait:
    """The counters of some collectives that are used in graphs.

    Args:
        key: the same on every rank, and no other collectives'.
        name: what to say that a rank waits in, where the script made no call of hvkit's.
    """

    def __init__(self, key: str, name: str = "optimizer.apply()") -> None:
        self.key = key
        self.name = name
        with tf.init_scope(), tf.device("CPU:0"):
            self._entered = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._left = tf.Variable(0, trainable=False, dtype=tf.int64)
        calls.watch_graph(self)

    def enter(self, ready: Sequence[Any]) -> tf.Operation:
        """The operation that the collectives come after; it comes after ``ready``."""
        with tf.control_dependencies(list(ready)), tf.device("CPU:0"):
            return self._entered.assign_add(1, read_value=False)

    def leave(self, results: Sequence[Any]) -> None:
        """Count the collectives as over when their results are there."""
        with tf.control_dependencies(list(results)), tf.device("CPU:0"):
            self._left.assign_add(1, read_value=False)

    def around(self, sent: tf.Tensor, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """The result of a collective on one tensor, counted in graphs and marked in eager code."""
        if tf.executing_eagerly():
            with calls.call(self.name), waiting_for_all_ranks():
                return collective(sent)
        with tf.control_dependencies([self.enter([sent])]):
            result = collective(sent)
        self.leave([result])
        return result

    def read(self) -> tuple[int, int]:
        """How often ranks have come to the collectives, and how often they were over."""
        left = int(self._left.numpy())
        return int(self._entered.numpy()), left


_NARROW = (tf.float16, tf.bfloat16)

NARROW_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


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
