"""Helpers for collectives in eager code and in graphs: counted waits, and compressed means.

No Python code runs while a graph does, so no ``with`` statement can mark a wait inside one. Two
counters in the graph take its place: one goes up before the collectives, one after them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkit.adapters.keras import ops
from hvkit.adapters.keras.wire import Wire
from hvkit.compression import Compression
from hvkit.engines import waiting_for_all_ranks
from hvkit.watch import calls


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


def compressed_mean(
    vector: tf.Tensor, compression: Compression, wire: Wire, name: str
) -> tf.Tensor:
    """The mean over ranks of a float32 vector that travels compressed; a collective.

    Args:
        vector: of shape (n,), the same on all ranks.
        compression: how it travels.
        wire: counts the bytes.
        name: the same on every rank, and no other collective's.
    """
    flow = compression.reduce(vector, ops, wire.size)
    result, number = None, 0
    while True:
        try:
            exchange = flow.send(result)
        except StopIteration as end:
            return end.value
        result = wire.exchange(exchange, f"{name}.{number}")
        number += 1


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits.

    Horovod has no bfloat16, and a sum in float16 may overflow although the mean fits.
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor
