"""Keras: steps of ``fit``, whose data, work and collectives are inside a graph of TensorFlow."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvkit.frameworks.keras.backends import quickly_read
from hvkit.frameworks.keras.collectives.graph_collectives import blocked_in_graphs
from hvkit.frameworks.keras.optimizers import inner_optimizer, is_overwritten, parts_of
from hvkit.monitor.keras import FitRecorder
from hvkit.monitor.step_times import Step

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor


class FitCallback(FitRecorder):
    """Records each step of ``fit``.

    Calling Python from a graph takes time. So the graph itself stores when a batch was loaded, and
    how long it was blocked in collectives. Python reads both after the step. With several
    ``steps_per_execution`` it reads them only after the last one, so loading counts as compute.

    Args:
        monitor: gets the steps.
        model: whose ``fit`` this is for.
    """

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__(monitor, model)
        blocked_in_graphs.measure()
        with tf.init_scope(), tf.device("CPU:0"):
            # When the last batch was loaded, in seconds since 1970, and its samples.
            self._loaded = tf.Variable([0.0, 0.0], trainable=False, dtype=tf.float64)
            self._batches = tf.Variable(0, trainable=False, dtype=tf.int64)
        self._blocked = 0.0
        self._ended = time.monotonic()
        # When the pipeline began to bring an epoch's first batch; None for other batches.
        self._asked: float | None = None
        self._traced = False
        self._take_times(model)
        self._count_steps(model)

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

    def _count_steps(self, model: keras.Model) -> None:
        """Count a step after each call of the function that ``fit`` makes of the model's step.

        With a callback for each batch, Keras would fetch all metrics in each step.
        """
        make = model.make_train_function

        @functools.wraps(make)
        def make_counted(force: bool = False) -> None:
            made = model.train_function
            make(force)
            run = model.train_function
            if run is made:
                return
            self._traced = False

            @functools.wraps(run)
            def counted(iterator: Any) -> Any:
                if self._monitor.closed:
                    return run(iterator)
                several = model.steps_per_execution > 1
                began, done = time.time(), int(self._batches.numpy()) if several else 0
                logs = run(iterator)
                if steps := int(self._batches.numpy()) - done if several else 1:
                    self._step(began, steps, logs)
                return logs

            model.train_function = counted

        model.make_train_function = make_counted

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a pass over the training data."""
        super().on_epoch_begin(epoch)
        if self._monitor.closed:
            return
        # Next Keras frees the last epoch's pipeline, which may take seconds, and makes another.
        self._asked = time.time()
        self._ended = time.monotonic()
        self._blocked = blocked_in_graphs.seconds()

    def _step(self, began: float, steps: int, logs: Any) -> None:
        """Count the steps of a call that began at this time; a collective at a record."""
        now, blocked = time.monotonic(), blocked_in_graphs.seconds()
        loaded, samples = quickly_read(self._loaded).tolist()
        asked, self._asked = self._asked or began, None
        data = max(loaded - asked, 0.0) if steps == 1 else 0.0
        took, waited = (now - self._ended) / steps, (blocked - self._blocked) / steps
        self._blocked, self._ended = blocked, now
        # In the first call TensorFlow made the graph, which took most of its time.
        step = Step(took, data, waited, samples) if self._traced else None
        self._traced = True
        if self.add_steps(steps, step, logs):
            self._ended = time.monotonic()


class Gradients:
    """Measures the norm of the gradients in updates that end with a record, also in graphs.

    Args:
        monitor: knows which steps those are.
        optimizers: those that update the model.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[Any]) -> None:
        self._optimizers = [inner_optimizer(each) for each in optimizers]
        self._blocked = 0.0
        with tf.init_scope(), tf.device("CPU:0"):
            self._norms = [tf.Variable(0.0, trainable=False) for _ in self._optimizers]
            self._wanted = tf.Variable(True, trainable=False)
        self._record_pending = True
        blocked_in_graphs.measure()
        for number, each in enumerate(self._optimizers):
            self._measure_in_apply(number, each)

    def blocked(self) -> float:
        """Seconds that this rank was blocked in collectives of graphs since the last call."""
        before, self._blocked = self._blocked, blocked_in_graphs.seconds()
        return self._blocked - before

    def expect(self, pending: bool) -> None:
        """Prepare for the next step; ``pending``: it ends with a record."""
        if pending != self._record_pending:
            self._record_pending = pending
            self._wanted.assign(pending)

    def read(self) -> dict[str, float]:
        """``learning_rate``, of the first optimizer, and ``gradient_norm`` of all updated here."""
        rate = parts_of(self._optimizers[0])[0].learning_rate
        values = {"learning_rate": float(keras.ops.convert_to_numpy(rate))}
        if self._record_pending:
            values["gradient_norm"] = float(np.linalg.norm([each.numpy() for each in self._norms]))
        return values

    def _measure_in_apply(self, number: int, optimizer: Any) -> None:
        apply = optimizer.apply

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def measured(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            held = _gradients(grads, trainable_variables or optimizer._trainable_variables)
            if held and tf.executing_eagerly():
                if self._record_pending:
                    self._norms[number].assign(_norm(*held))
            elif held:
                self._norms[number].assign(_if(self._wanted, _norm, _none, held), read_value=False)
            apply(grads, trainable_variables)

        optimizer.apply = measured


def _rows_of(data: Any) -> Any:
    """Samples in a batch: the rows of its first tensor; 0 if it has none."""
    first: Any = next(iter(tf.nest.flatten(data)), None)
    if isinstance(first, tf.SparseTensor):
        return first.dense_shape[0]
    if isinstance(first, tf.RaggedTensor):
        return first.nrows()
    return tf.shape(first)[0] if tf.is_tensor(first) and first.shape.rank else 0


def _gradients(grads: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """The values of gradients, without those of overwritten variables, which are new values."""
    pairs = zip(grads, variables, strict=False)  # Keras itself says if there are too few
    return [_values(g) for g, v in pairs if g is not None and not is_overwritten(v)]


def _norm(*tensors: Any) -> Any:
    return tf.linalg.global_norm([tf.cast(each, tf.float32) for each in tensors])


def _none(*tensors: Any) -> Any:
    return tf.constant(0.0)


def _if(wanted: Any, yes: Callable[..., Any], no: Callable[..., Any], inputs: list[Any]) -> Any:
    """``yes(*inputs)`` or ``no(*inputs)``, in one operation.

    ``tf.cond`` makes an operation for each input, which would take time in every step.
    """
    kinds = [tf.TensorSpec(each.shape, each.dtype) for each in inputs]
    branches = [
        tf.function(each, autograph=False).get_concrete_function(*kinds) for each in (yes, no)
    ]
    (result,) = tf.raw_ops.StatelessIf(
        cond=wanted.read_value(),
        input=inputs,
        Tout=[tf.float32],
        then_branch=branches[0],
        else_branch=branches[1],
    )
    return result


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
