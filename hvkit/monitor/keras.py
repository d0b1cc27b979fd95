"""Keras: steps of ``fit``, whose data, work and collectives are inside a graph of TensorFlow."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from hvkit.adapters.keras.collectives.graph_collectives import blocked_in_graphs
from hvkit.adapters.keras.fit import with_names
from hvkit.adapters.keras.optimizers import inner_optimizer, parts_of
from hvkit.monitor.step_clock import Step

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor

_DATA, _SAMPLES, _MARK = range(3)


class FitCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Records each step of ``fit``.

    A graph cannot call Python at no cost, so it takes the time itself: when a batch is there, and
    when an update has been made. Python reads both after the step, or after all
    ``steps_per_execution`` of them.

    Args:
        monitor: gets the steps.
        model: whose ``fit`` this is for.
    """

    # hvkit need not look after each step whether this callback has stopped training.
    never_stops = True

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__()
        self._monitor = monitor
        blocked_in_graphs.measure()
        with tf.init_scope(), tf.device("CPU:0"):
            self._counted = tf.Variable([0.0, 0.0, time.time()], trainable=False, dtype=tf.float64)
        self._before = self._counted.numpy()
        self._blocked = 0.0
        self._first = 0
        self._began = time.time()
        self._traced = False
        self._take_times(model)

    def _take_times(self, model: keras.Model) -> None:
        """Make the model's step note when its batch is there, and when it has ended."""
        train_step, counted = model.train_step, self._counted

        @functools.wraps(train_step)
        def timed_step(data: Any) -> Any:
            tensors = [each for each in tf.nest.flatten(data) if tf.is_tensor(each)]
            with tf.control_dependencies(tensors), tf.device("CPU:0"):
                loaded = tf.timestamp() - counted[_MARK]
                samples = tf.shape(tensors[0])[0] if tensors and tensors[0].shape.rank else 0
                counted.assign_add(tf.stack([loaded, tf.cast(samples, tf.float64), 0.0]))
            result = train_step(data)
            # The optimizer counts at the end of its update; a model may have others of its own.
            known = getattr(self.model, "optimizer", None)
            ends = [inner_optimizer(known).iterations.value + 0] if known else []
            with tf.control_dependencies(ends), tf.device("CPU:0"):
                counted[_MARK].assign(tf.timestamp())
            return result

        model.train_step = timed_step
        model.train_function = None  # the next fit makes it again

    def on_train_begin(self, logs: Any = None) -> None:
        """Expect that the first step makes the graph."""
        self._traced = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a pass over the training data."""
        self._monitor.begin_epoch(epoch)
        self._ended = time.monotonic()
        self._blocked = blocked_in_graphs.seconds()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Remember when the step begins."""
        self._first = batch
        self._began = time.time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Count the step; a collective at a record."""
        now, blocked = time.monotonic(), blocked_in_graphs.seconds()
        counted = self._counted.numpy()
        new = counted - self._before
        # What has passed outside of the graph, since the last step's end, is no wait for data.
        data = max(new[_DATA] - (self._began - self._before[_MARK]), 0.0)
        if not self._traced:  # TensorFlow made the graph, before it took a batch
            self._traced, data = True, 0.0
        self._monitor.stride = steps = batch - self._first + 1
        spent = np.array([now - self._ended, data, blocked - self._blocked, new[_SAMPLES]]) / steps
        self._before, self._blocked, self._ended = counted, blocked, now
        for _ in range(steps):
            metrics = _numbers(logs) if self._monitor.due else {}
            if self._monitor.add_step(Step(*spent.tolist()), metrics):
                self._ended = time.monotonic()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record what Keras reports of all ranks: its metrics, and those of the validation."""
        self._monitor.log(**{f"epoch_{name}": value for name, value in _numbers(logs).items()})

    def on_train_end(self, logs: Any = None) -> None:
        """Record the rest; a collective."""
        self._monitor.flush()


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
            self._norms = tf.Variable([0.0] * len(self._optimizers), trainable=False)
            self._wanted = tf.Variable(True, trainable=False)
        self._due = True
        blocked_in_graphs.measure()
        for number, each in enumerate(self._optimizers):
            self._measure_in_apply(number, each)

    def blocked(self) -> float:
        """Seconds that this rank was blocked in collectives of graphs since the last call."""
        before, self._blocked = self._blocked, blocked_in_graphs.seconds()
        return self._blocked - before

    def expect(self, due: bool) -> None:
        """Say whether the next step ends with a record."""
        if due != self._due:
            self._due = due
            self._wanted.assign(due)

    def read(self) -> dict[str, float]:
        """``learning_rate``, of the first optimizer, and ``gradient_norm`` over all of them."""
        rate = parts_of(self._optimizers[0])[0].learning_rate
        values = {"learning_rate": float(keras.ops.convert_to_numpy(rate))}
        if self._due:
            values["gradient_norm"] = float(np.linalg.norm(self._norms.numpy()))
        return values

    def _measure_in_apply(self, number: int, optimizer: Any) -> None:
        apply = optimizer.apply

        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def measured(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            held = [each for each in grads if each is not None]

            def add() -> tf.Tensor:
                norm = tf.linalg.global_norm([tf.cast(_values(g), tf.float32) for g in held])
                self._norms[number].assign(norm)
                return tf.constant(True)

            if held:
                tf.cond(self._wanted, add, lambda: tf.constant(True))
            apply(grads, trainable_variables)

        optimizer.apply = measured


def watch(monitor: Monitor, model: keras.Model, optimizers: Sequence[Any]) -> Gradients:
    """Record the steps of ``fit``, and the rate and norm of these optimizers."""
    callback = FitCallback(monitor, model)
    fit = model.fit

    @functools.wraps(fit)
    def monitored_fit(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = with_names(fit, args, kwargs)
        given = kwargs.get("callbacks")
        if isinstance(given, keras.callbacks.CallbackList):
            if callback not in given.callbacks:
                given.append(callback)
        else:
            several = given if isinstance(given, list | tuple) else [given] if given else []
            kwargs["callbacks"] = [*several, callback]
        return fit(*args, **kwargs)

    model.fit = monitored_fit
    return Gradients(monitor, optimizers)


def _values(gradient: Any) -> Any:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _numbers(logs: Any) -> dict[str, float]:
    """What Keras hands to callbacks, as far as it is numbers."""
    found = {}
    for name, value in (logs or {}).items():
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "fiub":
            found[name] = float(array.reshape(()))
    return found
