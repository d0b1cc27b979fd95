"""Helpers for collectives in eager code and in graphs: counted waits, and compressed means.

No Python code runs while a graph does, so no ``with`` statement can mark a wait inside one. Two
counters in the graph take its place: one goes up before the collectives, one after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf

from hvkit.communication.exchanges import Exchange
from hvkit.communication.group import Group
from hvkit.compression import Compression
from hvkit.compression.compression import Shape
from hvkit.frameworks.keras.backends import backend_variable, quickly_read
from hvkit.frameworks.keras.collectives import ops
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.host.run_reports import timeline_wanted
from hvkit.watch import calls
from hvkit.watch.calls import waiting_for_all_ranks


class BlockedInGraphs:
    """The seconds that this rank has been blocked in collectives of graphs, for a monitor.

    Attributes:
        measured: whether graphs that are traced from now on measure it.
    """

    def __init__(self) -> None:
        self.measured = False
        self._seconds: Any = None
        self._ended: Any = None

    def measure(self) -> None:
        """Measure in graphs that are traced from now on."""
        self.measured = True
        if self._seconds is None:
            with tf.init_scope(), tf.device("CPU:0"):
                self._seconds = tf.Variable(0.0, trainable=False, dtype=tf.float64)
                self._ended = tf.Variable(0.0, trainable=False, dtype=tf.float64)

    def add_since(self, begun: tf.Tensor) -> None:
        """Add the time from ``begun`` to now, inside a graph."""
        now = tf.timestamp()
        if timeline_wanted():
            self._ended.assign(now, read_value=False)
        self._seconds.assign_add(now - begun, read_value=False)

    def seconds(self) -> float:
        """The sum so far."""
        return float(quickly_read(self._seconds))

    def ended(self) -> float:
        """When the last of them ended: seconds since 1970; only in runs with a timeline."""
        return float(quickly_read(self._ended))


blocked_in_graphs = BlockedInGraphs()


class GraphWait:
    """Counts how often a rank enters and leaves some collectives that graphs contain.

    The watcher reads the counters when it looks for the reason of a long wait.

    Args:
        key: the same on every rank, and no other collectives'.
        name: what the watcher calls the wait if the script is in no call of hvkit's.
        group: the ranks that take part; None for all.
    """

    def __init__(
        self, key: str, name: str = "optimizer.apply()", group: Group | None = None
    ) -> None:
        self.key = key
        self.name = name
        self._within = group.process_set if group else None
        self.ranks = self._within.ranks if self._within else ()
        with tf.init_scope(), tf.device("CPU:0"):
            self._entered = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._left = tf.Variable(0, trainable=False, dtype=tf.int64)
            self._since = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        calls.watch_graph(self)

    def enter(self, ready: Sequence[Any], last: Sequence[Any] | None = None) -> tf.Operation:
        """The operation that counts the entry; it runs after ``ready``, before the collectives.

        Args:
            ready: what the collectives wait for.
            last: what this rank computes meanwhile: it is blocked only once this is there. None: it
                computes nothing.
        """
        with tf.control_dependencies(list(ready)), tf.device("CPU:0"):
            entered = self._entered.assign_add(1, read_value=False)
        if blocked_in_graphs.measured:
            with tf.control_dependencies(list(ready if last is None else last)), tf.device("CPU:0"):
                self._since.assign(tf.timestamp(), read_value=False)
        return entered

    def leave(self, results: Sequence[Any]) -> None:
        """Count the exit once the collectives' results are there."""
        with tf.control_dependencies(list(results)), tf.device("CPU:0"):
            self._left.assign_add(1, read_value=False)
            if blocked_in_graphs.measured:
                blocked_in_graphs.add_since(self._since)

    def around(self, sent: tf.Tensor, collective: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
        """The result of a collective on one tensor; counts the wait, or marks it in eager code."""
        if tf.executing_eagerly():
            with calls.call(self.name), waiting_for_all_ranks(self._within):
                return collective(sent)
        with tf.control_dependencies([self.enter([sent])]):
            result = collective(sent)
        self.leave([result])
        return result

    def read(self) -> tuple[int, int]:
        """How often this rank has entered the collectives, and how often it has left them."""
        left = int(self._left.numpy())
        return int(self._entered.numpy()), left


# Numbers the calls in each graph: one rank may trace a graph again when others do not.
_calls: WeakKeyDictionary[Any, itertools.count[int]] = WeakKeyDictionary()


def name_in_graph(call: str) -> str:
    """A new name for a collective that a call of the script's makes in the graph being traced."""
    graph = tf.compat.v1.get_default_graph()
    while isinstance(outer := getattr(graph, "outer_graph", None), type(graph)):
        graph = outer
    return f"{call}.graph.{next(_calls.setdefault(graph, itertools.count()))}"


class CompressedMeans:
    """Means over ranks of float32 vectors that travel compressed.

    Args:
        compression: how they travel.
        wire: counts the bytes.
    """

    def __init__(self, compression: Compression, wire: Wire) -> None:
        self.compression = compression
        self._wire = wire
        # What the compression keeps, by the id of a variable. TensorFlow's graphs need variables.
        self.kept: dict[int, dict[str, tf.Variable]] = {}
        self._shapes: dict[int, Shape] = {}

    def suits(self, dtype: tf.DType) -> bool:
        """Whether vectors of this dtype travel so.

        Raises:
            ValueError: they cannot, and must not travel otherwise.
        """
        suits = dtype == tf.float32 or not self.compression.float32_only
        if not suits and self.compression.exclusive:
            raise ValueError(
                f"{self.compression} is for weights of at most 32 bits, got {dtype.name}: build "
                "the model in float32, or use hvkit.Synchronous()"
            )
        return suits

    def mean(self, vector: tf.Tensor, variables: Sequence[Any], name: str) -> tf.Tensor:
        """The mean of a vector, which counts; a collective. Arguments are as for ``reduced``."""
        mean, states = self.reduced(vector, variables, name, self._wire.exchange)
        self.keep(variables, states)
        return mean

    def reduced(
        self,
        vector: tf.Tensor,
        variables: Sequence[Any],
        name: str,
        exchange: Callable[[Exchange, str], tf.Tensor],
    ) -> tuple[tf.Tensor, list[dict[str, tf.Tensor]]]:
        """The mean of a vector, and what to ``keep`` of each variable if it counts; a collective.

        Args:
            vector: of shape (n,), the same on all ranks: tensors, one after the other.
            variables: to which the tensors belong.
            name: the same on every rank, and no other collective's.
            exchange: makes a collective of some name.
        """
        shapes = [tuple(v.shape) for v in variables]
        held = [self.state_of(backend_variable(v)) for v in variables]
        state = {name: [each[name].value() for each in held] for name in held[0]}
        flow = self.compression.reduce(vector, shapes, state, ops, self._wire)
        result, number = None, 0
        while True:
            try:
                asked = flow.send(result)
            except StopIteration as end:
                mean, state = end.value
                return mean, [{k: v[at] for k, v in state.items()} for at in range(len(held))]
            result = exchange(asked, f"{name}.{number}")
            number += 1

    def keep(self, variables: Sequence[Any], states: Sequence[Mapping[str, tf.Tensor]]) -> None:
        """Keep what ``reduced`` returned."""
        for v, state in zip(variables, states, strict=True):
            for name, variable in self.state_of(backend_variable(v)).items():
                variable.assign(state[name])

    def arrays(
        self, names: Sequence[str], weights: Sequence[tf.Variable]
    ) -> dict[str, np.ndarray[Any, Any]]:
        """What is kept under these names, for a checkpoint: by name and weight."""
        return {
            f"{name}.{i}": np.array(self.kept[id(weight)][name].numpy())
            for i, weight in enumerate(weights)
            if id(weight) in self.kept
            for name in names
        }

    def load(
        self, arrays: Mapping[str, np.ndarray[Any, Any]], weights: Sequence[tf.Variable]
    ) -> None:
        """Set what ``arrays`` returned."""
        for key, array in arrays.items():
            name, _, number = key.partition(".")
            self.state_of(weights[int(number)])[name].assign(array)

    def begin_anew(self) -> None:
        """Forget what is kept."""
        for key, held in self.kept.items():
            for name, array in self.compression.begin(self._shapes[key]).items():
                held[name].assign(array)

    def state_of(self, variable: tf.Variable) -> dict[str, tf.Variable]:
        """The variables with what the compression keeps of one weight."""
        if id(variable) not in self.kept:
            with tf.init_scope():
                self._shapes[id(variable)] = tuple(variable.shape)
                begun = self.compression.begin(self._shapes[id(variable)])
                self.kept[id(variable)] = {
                    name: tf.Variable(array, trainable=False) for name, array in begun.items()
                }
        return self.kept[id(variable)]


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits.

    Horovod has no bfloat16, and a sum in float16 may overflow although the mean fits.
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def nothing() -> tf.Tensor:
    """The branch of a ``tf.cond`` in which nothing is done."""
    return tf.constant(True)
