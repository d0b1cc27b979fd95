"""Helpers for collectives in graphs of TensorFlow: counted waits, names, and refusals.

No Python code runs while a graph does, so no ``with`` statement can mark a wait inside one. Two
counters in the graph take its place: one goes up before the collectives, one after them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from hvkit.communication.group import Group
from hvkit.frameworks.keras.backends import quickly_read
from hvkit.host.run_reports import timeline_wanted
from hvkit.watch import calls
from hvkit.watch.calls import waiting_for_all_ranks
from hvkit.watch.spans import WAITING, mark


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


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits.

    Horovod has no bfloat16, and a sum in float16 may overflow although the mean fits.
    """
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def nothing() -> tf.Tensor:
    """The branch of a ``tf.cond`` in which nothing is done."""
    return tf.constant(True)


def refuse_xla(call: str) -> None:
    """Raise if XLA will compile the code that TensorFlow is tracing, or a function around it.

    Args:
        call: the call that needs the other ranks.

    Raises:
        ValueError: XLA will compile it.
    """
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"{call} is inside a tf.function with jit_compile=True, but XLA cannot compile the "
            "communication between ranks: remove jit_compile=True from the tf.function that "
            f"contains {call}. A separate tf.function with the forward and backward pass may keep "
            "it"
        )


def refuse_tf_distribute(model: Any = None) -> None:
    """Raise where a strategy of ``tf.distribute`` would divide the work, too.

    Args:
        model: one that may have been made in such a strategy's scope; None for the update of one.

    Raises:
        ValueError: names the strategy.
    """
    made_in = getattr(model, "_distribute_strategy", None)
    if made_in is None and not tf.distribute.has_strategy():
        return
    found = type(made_in or tf.distribute.get_strategy()).__name__
    raise ValueError(
        f"{'an update' if model is None else f'model {model.name!r}'} is in the scope of "
        f"tf.distribute.{found}, which would divide the work and average gradients, too: remove "
        f"the strategy and `with strategy.scope():`, as hvkit starts one process for each device"
    )


def marks() -> list[keras.callbacks.Callback]:
    """The callback that marks steps, in runs with a timeline."""
    return [Marked()] if timeline_wanted() else []


class Marked(keras.callbacks.Callback):  # type: ignore[misc]
    """Marks steps, and the waits inside their graph, in the timeline of the run."""

    never_stops = True

    def __init__(self) -> None:
        super().__init__()
        blocked_in_graphs.measure()
        self._begun = 0.0
        self._blocked = blocked_in_graphs.seconds()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remember when the step begins."""
        self._begun = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Mark the step, and its waits as one at the end of the last of them."""
        now, blocked = time.monotonic(), blocked_in_graphs.seconds()
        step = int(self.model.optimizer.iterations.numpy()) if self.model.optimizer else None
        if waited := blocked - self._blocked:
            ended = blocked_in_graphs.ended() - time.time() + now
            mark(WAITING, ended - waited, ended, step)
        mark("step", self._begun, now, step)
        self._blocked = blocked
