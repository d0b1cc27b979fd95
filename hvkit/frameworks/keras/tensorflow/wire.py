"""The one place that calls Horovod's collectives on tensors of TensorFlow; counts bytes and waits.

No Python code runs while a graph does, so a graph adds to counters of its own. ``GraphWait`` has
two: one goes up before the collectives, one after them.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from hvkit import runtime
from hvkit.communication.exchanges import AllToAll, Exchange, Gather, Mean, Messages
from hvkit.frameworks.keras.backends import not_converted, quickly_read
from hvkit.host.run_reports import timeline_wanted
from hvkit.runtime import Group, all_ranks
from hvkit.transport import traffic
from hvkit.watch import calls
from hvkit.watch.calls import waiting_for_all_ranks
from hvkit.watch.rank_errors import for_graph, mark_as_shown_by


def graph_counter(value: Any = 0, dtype: Any = None) -> tf.Variable:
    """A variable in the host's memory, for numbers that graphs keep."""
    with tf.init_scope(), tf.device("CPU:0"):
        return tf.Variable(value, trainable=False, dtype=dtype)


class BlockedInGraphs:
    """The seconds that this rank has been blocked in collectives of graphs, for a monitor."""

    # Whether graphs that are traced from now on measure it.
    measured = False

    @functools.cached_property
    def _seconds(self) -> tf.Variable:
        return graph_counter(0.0, tf.float64)

    @functools.cached_property
    def _ended(self) -> tf.Variable:
        return graph_counter(0.0, tf.float64)

    def add_since(self, begun: tf.Tensor) -> None:
        now = tf.timestamp()
        if timeline_wanted():
            self._ended.assign(now, read_value=False)
        self._seconds.assign_add(now - begun, read_value=False)

    def seconds(self) -> float:
        return float(quickly_read(self._seconds))

    def ended(self) -> float:
        """When the last of them ended: seconds since 1970; only in runs with a timeline."""
        return float(quickly_read(self._ended))


blocked_in_graphs = BlockedInGraphs()


class GraphWait:
    """Counts how often a rank enters and leaves some collectives that graphs contain.

    The watcher reads the counters when it looks for the reason of a long wait. ``name`` is that of
    the wait in its messages, if the script is in no call of hvkit.
    """

    def __init__(
        self, key: str, name: str = "optimizer.apply()", group: Group | None = None
    ) -> None:
        self.key = key
        self.name = name
        self._within = group.process_set if group else None
        self.ranks = self._within.ranks if self._within else ()
        self._entered = graph_counter(dtype=tf.int64)
        self._left = graph_counter(dtype=tf.int64)
        self._since = graph_counter(0.0, tf.float64)
        calls.watch_graph(self)

    def enter(self, ready: Sequence[Any], last: Sequence[Any] | None = None) -> tf.Operation:
        """Count the entry, after ``ready``; this rank is blocked once it has computed ``last``."""
        with tf.control_dependencies(list(ready)), tf.device("CPU:0"):
            entered = self._entered.assign_add(1, read_value=False)
        if blocked_in_graphs.measured:
            with tf.control_dependencies(list(ready if last is None else last)), tf.device("CPU:0"):
                self._since.assign(tf.timestamp(), read_value=False)
        return entered

    def leave(self, results: Sequence[Any]) -> None:
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
        left = int(self._left.numpy())
        return int(self._entered.numpy()), left


# Numbers each call in each function's graph, which one rank may trace when others do not.
_calls: WeakKeyDictionary[Any, defaultdict[str, itertools.count[int]]] = WeakKeyDictionary()


def name_in_graph(call: str) -> str:
    """A name for a collective that a call makes in the graph being traced: no other has it there.

    Calls in two functions may have one name: a graph runs these one after another, since both use
    the variables of a ``GraphWait``.
    """
    graph = tf.compat.v1.get_default_graph()
    while isinstance(graph, ControlFlowFuncGraph):  # a branch of tf.cond
        graph = graph.outer_graph
    return f"{call}.graph.{next(_calls.setdefault(graph, defaultdict(itertools.count))[call])}"


def widened(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, in float32 if it has 16 bits: Horovod has no bfloat16, and sums may overflow."""
    return tf.cast(tensor, tf.float32) if tensor.dtype in (tf.float16, tf.bfloat16) else tensor


def values_of(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def of_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """A gradient whose values a function has changed; None where there is none."""
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return None if gradient is None else function(gradient)


def as_one(
    tensors: Sequence[tf.Tensor], function: Callable[[tf.Tensor], tf.Tensor]
) -> list[tf.Tensor]:
    """Apply a function to tensors of one dtype as one vector; return its pieces in their shapes."""
    result = function(tf.concat([tf.reshape(each, [-1]) for each in tensors], axis=0))
    pieces = tf.split(result, [each.shape.num_elements() for each in tensors])
    return [tf.reshape(p, each.shape) for p, each in zip(pieces, tensors, strict=True)]


def nothing() -> tf.Tensor:
    """The empty branch of a ``tf.cond``."""
    return tf.constant(True)


def run_python(function: Callable[..., None], inputs: Sequence[Any] = ()) -> tf.Tensor:
    """Call a function of NumPy arrays for what it does; a branch of ``tf.cond``."""

    def call(*arrays: Any) -> np.bool_:
        function(*arrays)
        return np.True_

    return tf.numpy_function(call, inputs, tf.bool)


def raise_unless_empty(text: tf.Tensor, error: type[Exception], group: Group) -> tf.Operation:
    """Raise on every rank unless the text is empty; ``fit`` translates the error of a graph."""
    if tf.executing_eagerly():
        if said := text.numpy().decode():
            raise mark_as_shown_by(error(said), group.first)
        return tf.no_op()
    reason = tf.strings.join([for_graph(error(), on_every_rank=True), text])
    return tf.debugging.Assert(tf.equal(text, ""), [reason])


def refuse_xla(call: str) -> None:
    """Raise where XLA will compile this code; it has no kernels for Horovod's operations."""
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
    """Raise where a strategy of ``tf.distribute`` would divide the work, too."""
    made_in = getattr(model, "_distribute_strategy", None)
    if made_in is None and not tf.distribute.has_strategy():
        return
    found = type(made_in or tf.distribute.get_strategy()).__name__
    raise ValueError(
        f"{'an update' if model is None else f'model {model.name!r}'} is in the scope of "
        f"tf.distribute.{found}, which would divide the work and average gradients, too: remove "
        f"the strategy and `with strategy.scope():`, as hvkit starts one process for each device"
    )


# Graphs of single collectives that are kept: more than the pieces of most models times the
# collectives of a compression.
_MOST = 256


class Wire:
    """Collectives on tensors, for one purpose, in eager code and in graphs.

    A name is the same on every rank, and no other collective's. Callers wrap eager calls in
    ``waiting_for_all_ranks``, and graphs in a ``GraphWait``.
    """

    def __init__(self, purpose: str, group: Group | None = None) -> None:
        group = group or all_ranks()
        self._hvd = runtime.engine("tensorflow").hvd
        self._counted = _counters(purpose)
        self.within = group.process_set
        self._ranks = group.process_set or self._hvd.global_process_set
        self.rank, self.size = group.rank, group.size

    def _send(self, collective: Callable[..., Any], sent: Any, name: str, **options: Any) -> Any:
        return collective(
            sent, name=name, ignore_name_scope=True, process_set=self._ranks, **options
        )

    def _allreduce(self, op: str, tensor: tf.Tensor, name: str) -> tf.Tensor:
        self._counted(traffic.of_allreduce(nbytes(tensor), self.size))
        op = getattr(self._hvd, op)
        return self._send(self._hvd.allreduce, _not_constant(tensor), name, op=op)

    # Of a tensor, under a name; over ranks, of each element.
    mean = functools.partialmethod(_allreduce, "Average")
    sum = functools.partialmethod(_allreduce, "Sum")
    lowest = functools.partialmethod(_allreduce, "Min")
    highest = functools.partialmethod(_allreduce, "Max")

    def means(self, tensors: Sequence[tf.Tensor], name: str) -> list[tf.Tensor]:
        self._counted(traffic.of_allreduce(sum(map(nbytes, tensors)), self.size))
        sent = [_not_constant(tensor) for tensor in tensors]
        op = self._hvd.Average
        means: list[tf.Tensor] = self._send(self._hvd.grouped_allreduce, sent, name, op=op)
        return means

    def gather(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        """All ranks' rows below each other, in rank order; ranks may have other numbers of rows."""
        self._counted(traffic.of_allgather(nbytes(tensor), self.size))
        return self._send(self._hvd.allgather, _not_constant(tensor), name)

    def messages(self, messages: Messages, name: str) -> tf.Tensor:
        """The messages of other ranks to this one, in rank order."""
        rows, sent = messages.rows, messages.sent
        size = nbytes(rows) // max(rows.shape[0], 1)
        self._counted(*traffic.of_messages(size, sent, self.rank))
        splits = tf.constant(sent, tf.int32)
        received, counts = self._send(self._hvd.alltoall, _not_constant(rows), name, splits=splits)
        # Also keeps the operation in a graph on ranks that receive nothing.
        expected = tf.constant(messages.received, tf.int32)
        tf.debugging.Assert(tf.reduce_all(counts == expected), [name, counts, expected])
        return _with_rows(received, sum(messages.received))

    def exchange(self, exchange: Exchange, name: str) -> tf.Tensor:
        """The result of an exchange that a compression or a strategy needs."""
        match exchange:
            case Mean(vector):
                return self.mean(vector, name)
            case Gather(rows):
                return _with_rows(self.gather(rows, name), self.size * rows.shape[0])
            case AllToAll(rows):
                self._counted(traffic.of_alltoall(nbytes(rows), self.size))
                received = self._send(self._hvd.alltoall, _not_constant(rows), name)
                return _with_rows(received, rows.shape[0])
            case Messages():
                return self.messages(exchange, name)

    def start(self, exchange: Exchange, name: str) -> Callable[[], tf.Tensor]:
        return functools.partial(self.exchange, exchange, name)


class NamedCollectives:
    """Collectives outside of graphs, by name, each in a small graph of its own.

    In eager code Horovod ignores names, and matches operations by type: it would mix up operations
    of two threads, or of ranks that are at different points of the script.

    Not for functions that a graph calls: one may occupy the only thread that TensorFlow has.
    """

    def __init__(self, wire: Wire) -> None:
        self._function = functools.lru_cache(_MOST)(functools.partial(_function, wire))

    def exchange(self, exchange: Exchange, name: str) -> Any:
        """As ``Wire.exchange``; the result for an array of NumPy is one, too."""
        field = "vector" if isinstance(exchange, Mean) else "rows"
        sent = getattr(exchange, field)
        tensor = tf.convert_to_tensor(sent)
        left_out: Any = None
        form = replace(exchange, **{field: left_out})  # the graph must not keep the tensor
        function = self._function(name, form, field, tensor.dtype, tuple(tensor.shape))
        return function(tensor).numpy() if isinstance(sent, np.ndarray) else function(tensor)

    def start(self, exchange: Exchange, name: str) -> Callable[[], Any]:
        return functools.partial(self.exchange, exchange, name)


def _function(
    wire: Wire, name: str, form: Exchange, field: str, dtype: tf.DType, shape: tuple[int, ...]
) -> Any:
    """A graph that makes one collective, of a tensor that takes the place of a field."""

    @not_converted
    def function(tensor: tf.Tensor) -> tf.Tensor:
        return wire.exchange(replace(form, **{field: tensor}), name)

    # Concrete: else TensorFlow warns that one code is traced too often.
    return tf.function(function).get_concrete_function(tf.TensorSpec(shape, dtype))


def _not_constant(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor itself, of which TensorFlow believes in a graph that it may change.

    Horovod's operations do not say that they have effects. TensorFlow would run one on a constant
    while it builds or optimises the graph, on this rank alone, and never again.
    """
    if tf.executing_eagerly():
        return tensor
    same = tf.cond(_true(), lambda: tensor, lambda: tensor)  # without a copy
    same.set_shape(tensor.shape)
    return same


@functools.cache
def _true() -> tf.Variable:
    return graph_counter(True)


def _with_rows(tensor: tf.Tensor, rows: int) -> tf.Tensor:
    """The tensor with its number of rows, which a graph does not know of a collective's result."""
    return tf.ensure_shape(tensor, (rows, *tensor.shape[1:]))


def nbytes(tensor: tf.Tensor) -> Any:
    """The tensor's size; an int if the graph knows its shape."""
    elements = tensor.shape.num_elements()
    return (tf.size(tensor, tf.int64) if elements is None else elements) * tensor.dtype.size


@functools.cache
def _counters(purpose: str) -> Callable[..., None]:
    """A function that counts a collective of some bytes, in eager code and inside a graph."""
    counted = graph_counter([0, 0], tf.int64)
    traffic.count_in_graphs(purpose, lambda: traffic.Sent(*counted.numpy().tolist()))

    def add(size: Any, messages: int = 1) -> None:
        if tf.executing_eagerly():
            traffic.count(purpose, int(size), messages)
        else:
            with tf.device("CPU:0"):
                counted.assign_add(tf.stack([tf.cast(size, tf.int64), messages]), read_value=False)

    return add
