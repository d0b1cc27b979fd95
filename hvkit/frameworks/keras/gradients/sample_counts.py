"""How many samples, tokens or weights the ranks' losses are means over, on TensorFlow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.collectives.wire import (
    GraphWait,
    Wire,
    graph_counter,
    nothing,
    run_python,
)
from hvkit.main_rank import warn_once


class SampleCounts:
    """The counts of a model's steps; it is a ``hvkit.frameworks.keras.loss_means.StepTotals``."""

    def __init__(self, name: str, group: Group | None = None, accumulates: bool = False) -> None:
        self.even: Callable[[], bool] = lambda: False  # rows travel with other numbers anyway
        self._name = name
        self._group = group
        self._wire = Wire("checks", group)
        self._accumulated: Any = None
        if accumulates:
            self._accumulated = graph_counter()
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
        if key not in self._reported:
            self._reported[key] = graph_counter(False)
        done = self._reported[key]

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
