"""Variables that an optimizer updates together, and functions of their values that graphs call."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, ref

import numpy as np
import tensorflow as tf

from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.variables import STEP, Array, flat_values, shaped
from hvkit.watch.rank_errors import mark_as_shown_by


class Group:
    """Variables that an optimizer updates together, and its steps since they agreed.

    For ``hvkit.sync`` it is an optimizer.

    Args:
        variables: the same ones, in the same order, on every rank.
        numbers: of the variables in the model's ``Variables``.
        optimizer: theirs, weakly.
        optimizer_number: its number.
        number: of this group in its model.

    Attributes:
        counted: the steps, for graphs.
        begun: whether the variables' state has begun, for graphs.
        rate: the optimizer's learning rate at the end of the round.
    """

    call = STEP

    def __init__(
        self,
        variables: list[tf.Variable],
        numbers: list[int],
        optimizer: ref[Any],
        optimizer_number: int,
        number: int,
    ) -> None:
        self.variables = variables
        self.numbers = numbers
        self.optimizer_number = optimizer_number
        self.number = number
        self.rate = 0.0
        self._optimizer = optimizer
        with tf.init_scope(), tf.device("CPU:0"):
            self.counted = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.begun = tf.Variable(False, trainable=False)

    @functools.cached_property
    def queue(self) -> Any:
        """What graphs wait in for agreements on the variables."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.queue.FIFOQueue(10, [tf.bool], [()])

    @property
    def steps(self) -> int:
        return int(self.counted.numpy())

    @steps.setter
    def steps(self, number: int) -> None:
        self.counted.assign(number)

    @property
    def taken(self) -> int:
        optimizer = self._optimizer()
        return 0 if optimizer is None else calls_of_apply(optimizer)

    def held(self) -> set[int]:
        return set(self.numbers)

    def trained(self) -> set[int]:
        return set(self.numbers)

    def checksum_of_rates(self) -> int:
        return zlib.crc32(repr(self.rate).encode())

    def refuse_differences(self, call: str) -> None:
        everyone = collectives.gather(call, self.rate)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                error = RanksDisagreeError(
                    f"the learning rate of an optimizer is {everyone[0]!r} on rank 0 but "
                    f"{theirs!r} on rank {rank}: set the same rate on every rank"
                )
                raise mark_as_shown_by(error, 0)


Method = Callable[[int, Sequence[Array]], list[Array]]
"""A method of a group's number and its values as vectors; it returns others."""


def begin_once(group: Group, method: Method) -> tf.Tensor:
    """Call a method of a group's values before the first update; it returns that it is done."""

    def begin() -> tf.Tensor:
        flat = [flat_values(v) for v in group.variables]
        return group.begun.assign(in_numpy(method, group, flat, [tf.bool])[0])

    return tf.cond(group.begun, nothing, begin)


def set_in_numpy(group: Group, method: Method, *further: tf.Tensor) -> tf.Tensor:
    """Set the variables of a group to what a method returns.

    Args:
        group: of variables.
        method: its values end with those of ``further``.
        further: tensors.
    """
    flat = [flat_values(v) for v in group.variables]
    values = in_numpy(method, group, [*flat, *further], [each.dtype for each in flat])
    for v, vector in zip(group.variables, values, strict=True):
        v.assign(shaped(vector, v))
    return tf.constant(True)


def in_numpy(
    method: Method, group: Group, inputs: Sequence[tf.Tensor], dtypes: list[tf.DType]
) -> list[Any]:
    """The results of a method on NumPy arrays, in eager code and in graphs.

    Graphs call such methods one after another, in the order of the program: with two optimizers in
    a graph, TensorFlow would otherwise run their collectives at the same time.

    Args:
        method: a graph does not keep its object.
        group: a graph keeps its number alone.
        inputs: the arrays.
        dtypes: of the results.
    """
    weak: Callable[[], Any] = WeakMethod(method)
    number = group.number

    def call(*arrays: Array) -> list[Array]:
        results: list[Array] = weak()(number, [np.asarray(each) for each in arrays])
        return results

    if tf.executing_eagerly():
        return call(*(each.numpy() for each in inputs))
    # TensorFlow keeps the order of operations that use the same variable.
    with tf.control_dependencies([_turn().assign_add(1, read_value=False)]):
        results: list[Any] = tf.numpy_function(call, inputs, dtypes)
    with tf.control_dependencies(results):
        _turn().assign_add(1, read_value=False)
    return results


@functools.cache
def _turn() -> tf.Variable:
    """Counts the methods that graphs have called and left."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)
