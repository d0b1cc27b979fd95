"""Helpers for collectives in eager code and in graphs: counted waits, and compressed means.

No Python code runs while a graph does, so no ``with`` statement can mark a wait inside one. Two
counters in the graph take its place: one goes up before the collectives, one after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import tensorflow as tf

from hvkit.communication.exchanges import RunningExchanges
from hvkit.communication.group import Group
from hvkit.compression import Compression
from hvkit.compression.compression import Shape
from hvkit.frameworks.keras.backends import backend_variable, quickly_read
from hvkit.frameworks.keras.collectives import ops
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.host.run_reports import timeline_wanted
from hvkit.sync.compression_state import Arrays, CompressionState
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


class CompressedMeans(CompressionState):
    """Means over ranks of float32 vectors that travel compressed, in eager code and in graphs.

    What the compression keeps is in variables, since graphs hold it; the keys are ids of weights.

    Args:
        compression: how they travel.
        wire: counts the bytes.
    """

    def __init__(self, compression: Compression, wire: Wire) -> None:
        super().__init__(compression, ops, wire)
        self._wire = wire
        self._shapes: dict[Hashable, Shape] = {}

    def mean(self, vector: tf.Tensor, variables: Sequence[Any], name: str) -> tf.Tensor:
        """The mean of a vector; a collective.

        Args:
            vector: of shape (n,), the same on all ranks: tensors, one after the other.
            variables: to which the tensors belong.
            name: the same on every rank, and no other collective's.
        """
        keys = [id(backend_variable(v)) for v in variables]
        flow = self.reduce(keys, [tuple(v.shape) for v in variables], vector)
        mean = RunningExchanges(self._wire.start, flow, name).result()
        for key in keys:
            self._assign(key, self.pending.pop(key))
        return mean

    def _begin(self, key: Hashable, shape: Shape, like: tf.Tensor) -> dict[str, tf.Variable]:
        self._shapes[key] = shape
        with tf.init_scope():
            begun = super()._begin(key, shape, like)
            return {name: tf.Variable(each, trainable=False) for name, each in begun.items()}

    def _now(self, key: Hashable) -> dict[str, tf.Tensor]:
        return {name: variable.value() for name, variable in self.kept[key].items()}

    def _assign(self, key: Hashable, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self.kept[key][name].assign(value)

    def start_over(self) -> None:
        self._loaded.clear()
        for key in self.kept:
            self._assign(key, self.compression.begin(self._shapes[key]))

    def load(self, arrays: Arrays, keys: Sequence[Hashable]) -> None:
        super().load(arrays, keys)
        for key in self._loaded.keys() & self.kept.keys():
            self._assign(key, self._loaded.pop(key))


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits.

    Horovod has no bfloat16, and a sum in float16 may overflow although the mean fits.
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def nothing() -> tf.Tensor:
    """The branch of a ``tf.cond`` in which nothing is done."""
    return tf.constant(True)
