"""Sends the variables that ranks own, in eager code and in graphs of TensorFlow."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire


class GraphShares:
    """What ``hvkit.frameworks.keras.sharded`` needs of TensorFlow.

    Args:
        name: the same on every rank, and no other optimizer's.
        group: the ranks among which the state is divided.
    """

    def __init__(self, name: str, group: Group) -> None:
        self._wait = GraphWait(f"{name}.shares", group=group)
        self._wire = Wire("weights", group)
        with tf.init_scope():
            self._used = tf.Variable(0.0, trainable=False)

    def leave_out(self, gradients: Sequence[Any]) -> None:
        """Use gradients, so that a graph computes their means: other ranks wait for this one."""
        used = [tf.convert_to_tensor(0.0)]
        for each in gradients:
            values = each.values if isinstance(each, tf.IndexedSlices) else each
            used.append(tf.cast(tf.reduce_sum(tf.reshape(values, [-1])[:1]), tf.float32))
        self._used.assign(tf.add_n(used))

    def send(self, number: int, piece: list[list[int]], variables: Sequence[tf.Variable]) -> None:
        mine = [_as_bytes(variables[i].value()) for i in piece[self._wire.rank]]
        # A graph computes with constants only once, even if there is nothing in them.
        nothing = _as_bytes(variables[0].value())[:0]
        sizes = [_bytes(variables[i]) for i in itertools.chain(*piece)]

        def gather(sent: tf.Tensor) -> tf.Tensor:
            received = self._wire.gather(sent, f"{self._wait.key}.{number}")
            # Keeps the operation in the graph of a rank that needs no other's variables.
            self._used.assign(tf.cast(tf.reduce_sum(received[:1]), tf.float32))
            return tf.ensure_shape(received, sum(sizes))

        parts = tf.split(self._wait.around(tf.concat([*mine, nothing], axis=0), gather), sizes)
        for rank, numbers in enumerate(piece):
            theirs, parts = parts[: len(numbers)], parts[len(numbers) :]
            for i, part in zip(numbers, theirs, strict=True):
                if rank != self._wire.rank:
                    variables[i].assign(_from_bytes(part, variables[i]))


def _bytes(variable: tf.Variable) -> int:
    return int(math.prod(variable.shape)) * int(variable.dtype.size)


def _as_bytes(value: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.bitcast(value, tf.uint8), [-1])


def _from_bytes(data: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
    size = variable.dtype.size
    shape = [*variable.shape, size] if size > 1 else variable.shape
    return tf.bitcast(tf.reshape(data, shape), variable.dtype)
