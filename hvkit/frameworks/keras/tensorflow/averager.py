"""The mean over ranks of a list of gradients, in eager code and in ``tf.function`` graphs.

``hvkit.frameworks.keras.tensorflow.averaged_updates`` calls it inside ``optimizer.apply``.

Before the gradients, the ranks exchange which of them they have: dense, row-sparse
(``IndexedSlices``) or none. Eager code then fills in the gradients that this rank lacks. A graph
cannot, because tracing has fixed which variables it updates; there, a difference between ranks is
an error. Either way no rank waits for a gradient that another does not send. A graph starts this
exchange when the first gradient is there, and it runs while backward computes the others.

Of variables that an update overwrites with their gradient, ranks use the largest, not the mean.

With that exchange ranks add up the rows of their batches. Where these differ, a rank's gradients
are weighted by its rows (``loss_means``). ``SampleCounts`` counts them, and adds up over ranks how
many samples, tokens or weights their losses are means over.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit.communication.exchanges import RunningExchanges, chunks
from hvkit.compression import Compression
from hvkit.compression.compression import Shape
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.optimizers import is_overwritten
from hvkit.frameworks.keras.tensorflow import ops
from hvkit.frameworks.keras.tensorflow.sparse import average_rows
from hvkit.frameworks.keras.tensorflow.wire import (
    GraphWait,
    Wire,
    as_one,
    graph_counter,
    nbytes,
    nothing,
    of_values,
    run_python,
    values_of,
    widened,
)
from hvkit.main_rank import warn_once
from hvkit.runtime import Group
from hvkit.strategies.strategy import Averaging
from hvkit.sync.compression_state import Arrays, CompressionState, CompressionSync
from hvkit.watch.calls import call, waiting_for_all_ranks
from hvkit.watch.rank_errors import for_graph

# A rank at the end of its epoch sends this instead of zeros and ones.
_AT_THE_END = 1 << 15
_UNEVEN = (
    "some ranks ran out of data while others go on: give every rank the same number of batches, "
    "as hvkit.shard(data) does"
)
_PARTIAL = "only some ranks have a gradient, or a gradient of this kind, for"


class GradientAverager:
    """Averages an optimizer's gradients; ``check`` returns what a graph runs before it averages."""

    def __init__(
        self,
        name: str,
        strategy: Averaging,
        compression: Compression | None = None,
        check: Callable[[Sequence[Any], Sequence[Any]], list[Any]] = lambda *_: [],
        group: Group | None = None,
        samples: SampleCounts | None = None,
    ) -> None:
        self._wire = Wire("gradients", group)
        self._flags = Wire("checks", group)
        self._name = name
        used = strategy.gradient_compression(compression)
        self.compressed = CompressedMeans(used, self._wire) if used else None
        self._compression = compression
        self._check = check
        self._samples = samples or SampleCounts(f"{name}.samples", group)
        # Added to constants that are sent: TensorFlow would compute the operation only once.
        self._zero = graph_counter()
        self._wait = GraphWait(name, group=group)
        self._exchange_in_graph: Any = None
        self._width: int | None = None
        self._eager = False

    def __call__(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        absent: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the means, with None where no rank has a gradient; a collective.

        In eager code ``absent`` are this rank's gradients of variables of which only other ranks
        have one; zeros by default. In a graph errors are InvalidArgumentErrors, which ``fit``
        translates.
        """
        gradients = list(gradients)
        if len(gradients) != len(variables):
            raise ValueError(
                f"optimizer.apply() got {len(gradients)} gradients for {len(variables)} variables: "
                "pass one for each variable"
            )
        if self.compressed and self.compressed.compression.exclusive:
            gradients = [tf.convert_to_tensor(g) if _is_sparse(g) else g for g in gradients]
        dense = [g is not None and not _is_sparse(g) for g in gradients]
        sparse = [_is_sparse(g) for g in gradients]
        self._width, self._eager = len(gradients) + 1, tf.executing_eagerly()
        # Only the sums of several steps come with what this rank has accumulated.
        rows = self._samples.rows if absent is None else self._samples.take_accumulated()
        present = tf.constant(np.array([dense, sparse], np.int32))
        present = tf.concat([present, [[rows], [0]]], axis=1)
        if tf.executing_eagerly():
            with call("optimizer.apply()"), waiting_for_all_ranks(self._wire.within):
                had = self._exchange(present)
                gradients = self._filled_in(gradients, variables, absent, had[:, :-1].numpy())
                gradients = self._weighted(gradients, variables, rows, had, absent)
                return self._mean(gradients, variables)
        # Wait for the gradient that backward computes first: a step that runs out of data must not
        # start this collective.
        own = [values_of(g) for g in gradients if g is not None]
        with tf.control_dependencies([self._wait.enter(own[-1:], last=own)]):
            had = self._exchange(present)
        with tf.control_dependencies([self._assert_alike(had, variables)]):
            checked = self._check(gradients, variables)
        with tf.control_dependencies(checked):
            own = list(map(_of_known_shape, gradients, variables))
            means = self._mean(self._weighted(own, variables, rows, had, absent), variables)
        self._wait.leave([values_of(mean) for mean in means if mean is not None])
        return means

    def _filled_in(
        self,
        gradients: list[Any],
        variables: Sequence[Any],
        absent: Sequence[Any] | None,
        had: np.ndarray[Any, Any],
    ) -> list[Any]:
        if np.any(had >= _AT_THE_END):
            raise RanksDisagreeError(_UNEVEN)
        self._check(gradients, variables)
        absent = absent or [None] * len(gradients)
        return list(map(_filled_in, gradients, variables, absent, *had.astype(bool)))

    def _weighted(
        self,
        gradients: list[Any],
        variables: Sequence[Any],
        rows: tf.Tensor,
        had: tf.Tensor,
        accumulated: Sequence[Any] | None,
    ) -> list[Any]:
        """Gradients weighted by this rank's rows, if ranks have different numbers of rows."""
        uneven = tf.not_equal(rows * self._wire.size, had[0, -1])
        if accumulated is not None:
            self._samples.warn_if(uneven)
            return gradients
        weight = tf.cast(rows * self._wire.size, tf.float64) / tf.cast(had[0, -1], tf.float64)

        def weighted(values: tf.Tensor) -> tf.Tensor:
            """The values themselves, without a copy, unless ranks have other numbers of rows."""
            found = tf.cond(uneven, lambda: values * tf.cast(weight, values.dtype), lambda: values)
            found.set_shape(values.shape)
            return found

        return [
            g if is_overwritten(v) else of_values(weighted, g)
            for g, v in zip(gradients, variables, strict=True)
        ]

    def end_of_epoch(self) -> None:
        """Make sure that every rank is at the end of its epoch; a collective.

        It is the same collective as the first one of an update, with other numbers. A rank that
        begins another step receives these numbers and raises as well.
        """
        if self._width is not None:
            # Horovod identifies an eager operation by its type, one in a graph by its name.
            if not self._eager and self._exchange_in_graph is None:
                # Trace once for all widths: TensorFlow would warn of repeated tracing if each
                # averager called a tf.function of its own.
                self._exchange_in_graph = tf.function(
                    self._exchange, autograph=False
                ).get_concrete_function(tf.TensorSpec((2, None), tf.int32))
            exchange = self._exchange if self._eager else self._exchange_in_graph
            with waiting_for_all_ranks(self._wire.within):
                had = exchange(tf.fill((2, self._width), _AT_THE_END))
            if np.any(had.numpy() != _AT_THE_END * self._wire.size):
                raise RanksDisagreeError(_UNEVEN)

    def _exchange(self, rows: tf.Tensor) -> tf.Tensor:
        """The sum over ranks of two rows, with a number for each gradient."""
        with tf.device("CPU:0"):
            return self._flags.sum(rows + self._zero, f"{self._name}.present")

    def _assert_alike(self, had: tf.Tensor, variables: Sequence[Any]) -> tf.Operation:
        goes_on = tf.reduce_all(had[:, :-1] < _AT_THE_END)
        # A rank at the end of its epoch has left the graph, and raises at another line.
        ended = for_graph(RanksDisagreeError(_UNEVEN), on_every_rank=False)
        uneven = tf.debugging.Assert(goes_on, [ended])
        with tf.control_dependencies([uneven]):
            had = tf.identity(had)
        had = had[:, :-1]
        paths = tf.constant([getattr(v, "path", v.name) for v in variables])
        partial = tf.reduce_any((had > 0) & (had < self._wire.size), axis=0)
        return tf.debugging.Assert(
            tf.logical_not(tf.reduce_any(partial)),
            [
                for_graph(RanksDisagreeError(_PARTIAL), on_every_rank=True),
                tf.boolean_mask(paths, partial),
                "inside a tf.function: use the variable in the loss on every rank, or run eagerly",
            ],
            summarize=8,
        )

    def _mean(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        """Average gradients that every rank has; positions stay, None stays None."""
        means: list[Any] = [None] * len(gradients)
        by_dtype: dict[Any, list[int]] = {}
        overwriting: dict[Any, list[int]] = {}
        # Backward computes the last variables' gradients first.
        for i in reversed(range(len(gradients))):
            if is_overwritten(variables[i]) and gradients[i] is not None:
                overwriting.setdefault(gradients[i].dtype, []).append(i)
            elif _is_sparse(gradients[i]):
                name = f"{self._name}.{i}"
                means[i] = average_rows(gradients[i], name, self._wire, self._compression)
            elif gradients[i] is not None:
                by_dtype.setdefault(gradients[i].dtype, []).append(i)
        for dtype, positions in by_dtype.items():
            sizes = [nbytes(gradients[i]) for i in positions]
            for run in chunks(sizes):
                joint = [positions[p] for p in run]
                sent = [widened(gradients[i]) for i in joint]
                name = f"{self._name}.{dtype.name}.{joint[0]}"
                found = self._dense_means(sent, [variables[i] for i in joint], name)
                for i, mean in zip(joint, found, strict=True):
                    means[i] = tf.cast(mean, dtype)
        for dtype, positions in overwriting.items():
            highest = functools.partial(
                self._wire.highest, name=f"{self._name}.{dtype.name}.largest"
            )
            largest = as_one([widened(gradients[i]) for i in positions], highest)
            for i, each in zip(positions, largest, strict=True):
                means[i] = tf.cast(each, dtype)
        return means

    def _dense_means(
        self, gradients: list[tf.Tensor], variables: list[Any], name: str
    ) -> list[tf.Tensor]:
        if (compressed := self.compressed) and compressed.suits(gradients[0].dtype):
            return as_one(gradients, lambda flat: compressed.mean(flat, variables, name))
        return self._wire.means(gradients, name)


class CompressedMeans(CompressionState):
    """Means of float32 vectors that travel compressed; graphs hold the state, by weight."""

    def __init__(self, compression: Compression, wire: Wire) -> None:
        super().__init__(compression, ops, wire)
        self._wire = wire
        self._shapes: dict[Hashable, Shape] = {}

    def mean(self, vector: tf.Tensor, variables: Sequence[Any], name: str) -> tf.Tensor:
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


def sync_of(
    model: Any,
    averagers: Sequence[GradientAverager],
    strategy: Averaging,
    compression: Compression | None,
) -> CompressionSync:
    """Shows checkpoints the residuals of a model's optimizers."""
    states = {f"{i}-": each.compressed for i, each in enumerate(averagers) if each.compressed}
    reference = weakref.ref(model)  # hvkit keeps this as long as the model

    def keys() -> list[int]:
        model = reference()
        return [] if model is None else [id(backend_variable(w)) for w in model.weights]

    return CompressionSync(strategy, compression, states, keys)


def _is_sparse(gradient: Any) -> bool:
    return isinstance(gradient, tf.IndexedSlices)


def _filled_in(gradient: Any, variable: Any, absent: Any, any_dense: bool, any_sparse: bool) -> Any:
    if any_dense:
        if gradient is None:
            return tf.zeros(variable.shape, variable.dtype) if absent is None else absent
        return tf.convert_to_tensor(gradient)
    if any_sparse and gradient is None:
        row = tf.zeros((0, *variable.shape[1:]), variable.dtype)
        return tf.IndexedSlices(row, tf.zeros(0, tf.int64), tf.constant(variable.shape))
    return gradient


def _of_known_shape(gradient: Any, variable: Any) -> Any:
    """A copy with its variable's shape; a graph for batches of any size may not know the shape."""
    if gradient is None or _is_sparse(gradient):
        return gradient if gradient is None else tf.identity(gradient)
    return tf.ensure_shape(gradient, variable.shape)


class SampleCounts:
    """The counts of a model's steps; it is a ``hvkit.frameworks.keras.loss_means.StepTotals``."""

    def __init__(self, name: str, group: Group | None = None, accumulates: bool = False) -> None:
        self.even: Callable[[], bool] = lambda: False  # rows travel with other numbers anyway
        self._name = name
        self._group = group
        self._wire = Wire("checks", group)
        self._accumulated = graph_counter() if accumulates else None
        # Functions of the script's may be traced in one step, and run in all.
        self._rows = graph_counter()
        # Which comparisons have been made.
        self._reported: dict[str, Any] = {}
        self._noted: list[np.ndarray[Any, Any]] = []

    @functools.cached_property
    def _wait(self) -> GraphWait:
        """Made for the first loss with a count of its own: each costs the watcher time."""
        return GraphWait(self._name, "fit", self._group)

    @property
    def rows(self) -> tf.Tensor:
        """The rows of the step under way, an int32 scalar; 0 outside of steps."""
        with tf.device("CPU:0"):
            return self._rows + 0

    def begin(self, rows_of: tf.Tensor, final: bool = True) -> None:
        with tf.control_dependencies([rows_of]), tf.device("CPU:0"):
            rows = tf.identity(tf.shape(rows_of)[0])  # not before the data are there
            if self._accumulated is not None:
                self._accumulated.assign_add(rows - self._rows)
            self._rows.assign(rows)

    def end(self) -> None:
        with tf.device("CPU:0"):
            self._rows.assign(0)

    def take_accumulated(self) -> tf.Tensor:
        if self._accumulated is None:
            return tf.constant(0)
        rows = self._accumulated + 0
        with tf.control_dependencies([rows]):
            self._accumulated.assign(0)
        return rows

    def of(self, count: tf.Tensor | None, number: int) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.device("CPU:0"):
            rows = tf.cast(self.rows, tf.float64)
            sent = tf.stack([rows, tf.zeros_like(rows) if count is None else count])
            name = f"{self._name}.{number}"
            total = self._wait.around(sent, lambda numbers: self._wire.sum(numbers, name))
        return tf.math.divide_no_nan(total[0], rows), total[1]

    def start(self, count: tf.Tensor, number: int) -> bool:
        """Not on TensorFlow, where counts travel while the model computes."""
        return False

    def once(self, key: str, values: Sequence[tf.Tensor], report: Callable[..., None]) -> None:
        if (done := self._reported.get(key)) is None:
            done = self._reported[key] = graph_counter(False)

        def compare() -> tf.Tensor:
            done.assign(True)
            return run_python(report, values)

        tf.cond(done, nothing, compare)

    def note(self, numbers: Sequence[Any]) -> None:
        row = tf.stack([tf.cast(each, tf.float64) for each in numbers])
        run_python(lambda row: self._noted.append(row), [row])  # ``noted`` replaces the list

    def noted(self) -> list[np.ndarray[Any, Any]]:
        noted, self._noted = self._noted, []
        return noted

    def warn_if(self, uneven: tf.Tensor) -> None:
        """Warn that ranks had other numbers of rows while they accumulated gradients."""

        def warn() -> None:
            warn_once(
                f"uneven {self._name}",
                "ranks had batches of different sizes in steps whose gradients Keras accumulates "
                "(gradient_accumulation_steps): the gradients of all ranks have equal weights, "
                "which is not the mean over samples; give every rank batches of one size",
                self._group,
            )

        tf.cond(uneven, lambda: run_python(warn), nothing)
