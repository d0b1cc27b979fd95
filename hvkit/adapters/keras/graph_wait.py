"""Counts how often a graph comes to its collectives, for whoever asks why a rank waits.

No Python code runs when a graph does, so two counters in the graph stand for the ``with`` statement
that marks a wait elsewhere: one goes up before the collectives, one after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkit.watch import calls


class GraphWait:
    """The counters of some collectives that are used in graphs.

    Args:
        key: the same on every rank, and no other collectives'.
    """

    def __init__(self, key: str) -> None:
        self.key = key
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

    def read(self) -> tuple[int, int]:
        """How often ranks have come to the collectives, and how often they were over."""
        left = int(self._left.numpy())
        return int(self._entered.numpy()), left
