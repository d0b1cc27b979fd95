"""Variables that an optimizer updates together, and functions of their values that graphs call."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakMethod, ref

import keras
import tensorflow as tf
from keras.src.backend import Variable as KerasVariable  # keras.Variable of 3.5 is a subclass

from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait, nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply, parts_of
from hvkit.frameworks.keras.weights.variables import STEP, Array, Variables
from hvkit.sync.local_weights import pieces
from hvkit.watch.rank_errors import mark_as_shown_by, raised_in_graph

# Bytes.
_LARGE = 1 << 17


class UpdatedVariables:
    """Variables that an optimizer updates together, and its steps since they agreed.

    For ``hvkit.sync`` it is an optimizer.

    Args:
        variables: the same ones, in the same order, on every rank.
        of: all that ranks agree on.
        optimizer: theirs, weakly.
        optimizer_number: its number.
        calls: counts the calls of its ``apply``, for messages.
        number: of this object in its model.

    Attributes:
        numbers: of the variables.
        vectors: the numbers of those that graphs hand over in one vector: a large one alone.
        pieces: the same, some at a time, in order.
        counted: the calls of ``apply``, for graphs.
        calls_per_step: of ``apply``; the optimizer may accumulate gradients.
        rounds_counted: the rounds that have ended, for graphs.
        rounds_seen: of these, those whose training has been noted.
        begun: whether the variables' state has begun, for graphs.
        wait: counts the waits in graphs.
    """

    call = STEP

    def __init__(
        self,
        variables: list[tf.Variable],
        of: Variables,
        optimizer: ref[Any],
        optimizer_number: int,
        calls: tf.Variable,
        number: int,
    ) -> None:
        self.variables = variables
        self.of = of
        self.numbers = of.numbers(variables)
        self.vectors = [run for kind in of.kinds(self.numbers) for run in _large_alone(of, kind)]
        self.pieces = pieces(of, sorted(self.numbers))
        self.optimizer_number = optimizer_number
        self.number = number
        self.calls_per_step = getattr(optimizer(), "gradient_accumulation_steps", None) or 1
        self.wait = GraphWait(f"{of.name}.updated.{number}", group=of.group)
        self.rounds_seen = 0
        self._calls = calls
        self._optimizer = optimizer
        with tf.init_scope(), tf.device("CPU:0"):
            self.counted = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.rounds_counted = tf.Variable(0, dtype=tf.int64, trainable=False)
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
    def step(self) -> int:
        """How many steps the optimizer has taken since the script began, also with others."""
        return -(-int(self._calls.numpy()) // self.calls_per_step)

    @property
    def rounds(self) -> int:
        return int(self.rounds_counted.numpy())

    @rounds.setter
    def rounds(self, number: int) -> None:
        self.rounds_counted.assign(number)

    @property
    def taken(self) -> int:
        optimizer = self._optimizer()
        return 0 if optimizer is None else calls_of_apply(optimizer)

    def joined(self) -> list[tf.Tensor]:
        """The variables' values, as ``vectors`` says."""
        return [self.of.joined(numbers) for numbers in self.vectors]

    def held(self) -> set[int]:
        return set(self.numbers)

    def trained(self) -> set[int]:
        return set(self.numbers)

    def _rates(self) -> list[str]:
        """The learning rates that the script has set."""
        optimizer = self._optimizer()
        return [] if optimizer is None else [_rate(part) for part in parts_of(optimizer)]

    def checksum_of_rates(self) -> int:
        return zlib.crc32("\n".join(self._rates()).encode())

    def require_same_training(self, call: str) -> None:
        group = self.of.group
        everyone = collectives.gather(call, self._rates(), group)
        for rank, theirs in zip(group.members, everyone, strict=True):
            for first, other in zip(everyone[0], theirs, strict=True):
                if first != other:
                    error = RanksDisagreeError(
                        f"the learning rate of an optimizer is {first} on rank {group.first} but "
                        f"{other} on rank {rank}: set the same rate on every rank"
                    )
                    raise mark_as_shown_by(error, group.first)


def _rate(optimizer: Any) -> str:
    """The learning rate that the script has set: a number, or all that makes up a schedule.

    Not the schedule's value: a rank whose loss scale has skipped an update is at an earlier one.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return f"{type(rate).__name__}({json.dumps(rate.get_config(), default=repr)})"
    return repr(float(rate)) if isinstance(rate, KerasVariable) else type(rate).__name__


def _large_alone(of: Variables, numbers: list[int]) -> list[list[int]]:
    """Variables of one kind in groups: to join large ones costs more than to hand them over."""
    small = [i for i in numbers if of.nbytes(i) < _LARGE]
    large = [[i] for i in numbers if of.nbytes(i) >= _LARGE]
    return [small, *large] if small else large


Method = Callable[[Any, Sequence[Array]], list[Array]]
"""A method of a key, such as a number, and of arrays; it returns others."""


def begin_once(updated: UpdatedVariables, method: Method) -> tf.Tensor:
    """Call a method of variables' values before the first update; it returns that it is done."""

    def begin() -> tf.Tensor:
        done = tf.TensorSpec([], tf.bool)
        (begun,) = in_turn(lambda: in_numpy(method, updated.number, updated.joined(), [done]))
        return updated.begun.assign(begun)

    return tf.cond(updated.begun, nothing, begin)


def set_in_numpy(updated: UpdatedVariables, method: Method) -> None:
    """Set variables to what a method of their values returns."""

    def changed() -> list[tf.Tensor]:
        held = updated.joined()
        like_held = [tf.TensorSpec(v.shape, v.dtype) for v in held]
        return in_numpy(method, updated.number, held, like_held)

    for numbers, vector in zip(updated.vectors, in_turn(changed), strict=True):
        updated.of.assign_joined(numbers, vector)


def in_turn(build: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
    """Call a function that adds functions of NumPy, or collectives, to a graph.

    Graphs run what such functions add one after another, in the order of the program: with two
    optimizers in a graph, TensorFlow would otherwise run their collectives at the same time.
    """
    if tf.executing_eagerly():
        return build()
    # TensorFlow keeps the order of operations that use the same variable.
    with tf.control_dependencies([_turn().assign_add(1, read_value=False)]):
        results = build()
    with tf.control_dependencies(results):
        _turn().assign_add(1, read_value=False)
    return results


@functools.cache
def _turn() -> tf.Variable:
    """Counts what graphs have begun and ended."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(0, trainable=False, dtype=tf.int64)


def in_numpy(
    method: Method, key: Any, inputs: Sequence[tf.Tensor], results: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """The results of a method on NumPy arrays, in eager code and in graphs.

    Args:
        method: a graph does not keep its object. An array that it returns is TensorFlow's then.
        key: its first argument.
        inputs: the arrays.
        results: their shapes and dtypes.
    """
    if tf.executing_eagerly():
        return [tf.constant(each) for each in method(key, [each.numpy() for each in inputs])]
    weak: Callable[[], Any] = WeakMethod(method)

    def call(*arrays: Array) -> list[Array]:
        with raised_in_graph():
            bound = weak()
            assert bound is not None, "a graph trains a model that is gone"
            found: list[Array] = bound(key, arrays)
            return found

    found = tf.numpy_function(call, inputs, [each.dtype for each in results])
    return [tf.ensure_shape(each, spec.shape) for each, spec in zip(found, results, strict=True)]
