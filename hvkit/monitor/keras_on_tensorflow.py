"""Keras on TensorFlow, where a step's data, work and collectives are inside a graph.

Calling Python from a graph takes time. So the graph itself stores what is measured, and Python
reads it after the step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvkit.frameworks.keras.backends import quickly_read
from hvkit.frameworks.keras.tensorflow.wire import blocked_in_graphs
from hvkit.monitor.measurements import StepClock


class CallsOfGraphs:
    """Calls the function that ``fit`` makes of the model's step, and measures it.

    The graph stores when a batch was loaded, and how long it was blocked in collectives. With
    several ``steps_per_execution`` these are read only after the last one, so loading counts as
    compute.
    """

    def __init__(self, clock: StepClock, model: keras.Model) -> None:
        blocked_in_graphs.measured = True
        clock.blocked_in_graphs = blocked_in_graphs.seconds
        clock.begin()
        with tf.init_scope(), tf.device("CPU:0"):
            # When the last batch was loaded, in seconds since 1970, and its samples.
            self._loaded = tf.Variable([0.0, 0.0], trainable=False, dtype=tf.float64)
            self._batches = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._clock, self._model = clock, model
        self._take_times(model)

    def __call__(
        self, run: Callable[..., Any], iterator: Any, asked: float
    ) -> tuple[Any, int, float]:
        """The result of ``run(iterator)``, how many steps that took, and their samples.

        ``asked``: when the first batch was asked for; seconds since 1970.
        """
        several = self._model.steps_per_execution > 1
        done = int(self._batches.numpy()) if several else 0
        logs = run(iterator)
        steps = int(self._batches.numpy()) - done if several else 1
        loaded, samples = quickly_read(self._loaded).tolist()
        if steps == 1:
            self._clock.loaded(max(loaded - asked, 0.0))
        return logs, steps, samples * steps

    def _take_times(self, model: keras.Model) -> None:
        """Make the model's step store when its batch is loaded."""
        train_step, loaded = model.train_step, self._loaded

        @functools.wraps(train_step)
        def timed_step(data: Any) -> Any:
            parts = tf.nest.flatten(data, expand_composites=True)  # of sparse and ragged tensors
            with tf.control_dependencies(list(filter(tf.is_tensor, parts))), tf.device("CPU:0"):
                values = [tf.timestamp(), tf.cast(_rows_of(data), tf.float64)]
                noted = [loaded.assign(tf.stack(values), read_value=False)]
                if model.steps_per_execution > 1:
                    noted.append(self._batches.assign_add(1, read_value=False))
            if not tf.executing_eagerly():
                # Else busy threads might store the time only after much of the step's work.
                with tf.control_dependencies(noted):
                    parts = [tf.identity(part) if tf.is_tensor(part) else part for part in parts]
                data = tf.nest.pack_sequence_as(data, parts, expand_composites=True)
            return train_step(data)

        model.train_step = timed_step
        model.train_function = None  # the next fit makes it again


class NormsInGraphs:
    """The same as ``NormsOnPyTorch``, for this number of optimizers, also in graphs."""

    def __init__(self, optimizers: int) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._norms = [tf.Variable(0.0, trainable=False) for _ in range(optimizers)]
            self._wanted = tf.Variable(False, trainable=False)
        self._pending = False

    def expect(self, pending: bool) -> None:
        if pending != self._pending:
            self._pending = pending
            self._wanted.assign(pending)

    def measure(self, number: int, gradients: list[Any]) -> None:
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if not tf.executing_eagerly():
            norm = _if(self._wanted, _norm, _none, values)
            self._norms[number].assign(norm, read_value=False)
        elif self._pending:
            self._norms[number].assign(_norm(*values))

    def read(self) -> list[float]:
        return [float(each.numpy()) for each in self._norms] if self._pending else []


def _rows_of(data: Any) -> Any:
    """Samples in a batch: the rows of its first tensor; 0 if it has none."""
    first: Any = next(iter(tf.nest.flatten(data)), None)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return tf.shape(first)[0] if tf.is_tensor(first) and first.shape.rank else 0


def _norm(*tensors: Any) -> Any:
    return tf.linalg.global_norm([tf.cast(each, tf.float32) for each in tensors])


def _none(*tensors: Any) -> Any:
    return tf.constant(0.0)


def _if(wanted: Any, yes: Callable[..., Any], no: Callable[..., Any], inputs: list[Any]) -> Any:
    """``yes(*inputs)`` or ``no(*inputs)``, in one operation.

    ``tf.cond`` makes an operation for each input, which would take time in every step.
    """
    specs = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    branches = [
        tf.function(each, autograph=False).get_concrete_function(*specs) for each in (yes, no)
    ]
    (result,) = tf.raw_ops.StatelessIf(
        cond=wanted.read_value(),
        input=inputs,
        Tout=[tf.float32],
        then_branch=branches[0],
        else_branch=branches[1],
    )
    return result
