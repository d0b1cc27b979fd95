"""Helpers for collectives in eager code and in graphs: counted waits, and sums in 16 bits.

No Python code runs while a graph does, so no ``with`` statement can mark a wait inside one. Two
counters in the graph take its place: one goes up before the collectives, one after them.

``hvkit.adapters.gradient_chunks`` explains why compressed gradients take two collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkit.adapters.keras.wire import Wire
from hvkit.engines import waiting_for_all_ranks
from hvkit.watch import calls

NARROW_DTYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class GraphWait:
    """Counts how often a rank enters and leaves some collectives that graphs contain.

    The watcher reads the counters when it looks for the reason of a long wait.

    Args:
        key: the same on every rank, and no other collectives'.
        name: what the watcher calls the wait if the script is in no call of hvkit's.
    """

    def __init__(self, key: str, name: str = "optimizer.apply()") -> None:
        self.key = key
        self.name = name
        with tf.init_scope(), tf.device("CPU:0"):
            self._entered = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._left = tf.Variable(0, trainable=False, dtype=tf.int64)
        calls.watch_graph(self)

    def enter(self, ready: Sequence[Any]) -> tf.Operation:
        """The operation that counts the entry; it runs after ``ready``, before the collectives."""
        with tf.control_dependencies(list(ready)), tf.device("CPU:0"):
            return self._entered.assign_add(1, read_value=False)

    def leave(self, results: Sequence[Any]) -> None:
        """Count the exit once the collectives' results are there."""
        with tf.control_dependencies(list(results)), tf.device("CPU:0"):
            self._left.assign_add(1, read_value=False)

    def around(self, sent: tf.Tensor, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """The result of a collective on one tensor; counts the wait, or marks it in eager code."""
        if tf.executing_eagerly():
            with calls.call(self.name), waiting_for_all_ranks():
                return collective(sent)
        with tf.control_dependencies([self.enter([sent])]):
            result = collective(sent)
        self.leave([result])
        return result

    def read(self) -> tuple[int, int]:
        """How often this rank has entered the collectives, and how often it has left them."""
        left = int(self._left.numpy())
        return int(self._entered.numpy()), left


def narrow_mean(
    gradients: Sequence[tf.Tensor], dtype: tf.DType, wire: Wire, name: str
) -> list[tf.Tensor]:
    """The means over ranks of some gradients, sent in 16 bits; a collective.

    Args:
        gradients: float32 tensors, of the same shapes on all ranks.
        dtype: the 16-bit one.
        wire: counts the bytes.
        name: the same on every rank, and no other collective's.
    """
    sizes = [int(g.shape.num_elements()) for g in gradients]
    flat = tf.concat([tf.reshape(g, [-1]) for g in gradients], axis=0)
    padding = -sum(sizes) % wire.size
    sent = to_bits(tf.pad(flat, [[0, padding]]), dtype)
    shares = wire.shares(sent, f"{name}.shares")
    mean = tf.reduce_mean(tf.reshape(from_bits(shares, dtype), [wire.size, -1]), axis=0)
    means = wire.gather(to_bits(mean, dtype), f"{name}.means")
    received = from_bits(means, dtype)[: sum(sizes)]
    pieces = tf.split(received, sizes)
    return [tf.reshape(piece, g.shape) for piece, g in zip(pieces, gradients, strict=True)]


def to_bits(values: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Round to 16 bits, in an integer dtype: Horovod moves it without arithmetic."""
    return tf.bitcast(tf.cast(values, dtype), tf.int16)


def from_bits(bits: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """The float32 values of a result of ``to_bits``."""
    return tf.cast(tf.bitcast(bits, dtype), tf.float32)


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits.

    Horovod has no bfloat16, and a sum in float16 may overflow although the mean fits.
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype in NARROW_DTYPES.values() else tensor
