"""Finds gradients that are NaN or infinite before they become means, and skips or stops then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.batch_norm import LastStatistics
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.log import logger
from hvkit.sync.nonfinite import describe, skipped_steps
from hvkit.watch.calls import of_run
from hvkit.watch.rank_errors import for_graph, mark_as_shown_by


class NonFinite:
    """Compares what all ranks find in the gradients of an update.

    Args:
        action: ``"skip"`` or ``"stop"``.
        name: the same on every rank, and no other optimizer's.
        statistics: of the model, which must survive an update that is skipped; None for ``"stop"``.
        group: the ranks that train it.
    """

    def __init__(
        self, action: str, name: str, statistics: LastStatistics | None, group: Group
    ) -> None:
        self._action = action
        self._group = group
        self._statistics = statistics
        self._wire = Wire("checks", group)
        self._wait = GraphWait(name, group=group)
        # Updates that this process has tried, in graphs and in eager code, skipped ones among them.
        with tf.init_scope(), tf.device("CPU:0"):
            self._tried = tf.Variable(0, trainable=False, dtype=tf.int64)

    def guard(
        self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[], None]
    ) -> None:
        """Update, unless a rank has a gradient that is not finite; a collective.

        Args:
            gradients: this rank's own, before they become means.
            variables: their variables.
            update: averages and applies; creates no variables.

        Raises:
            FloatingPointError: with ``"stop"``, on every rank, in eager code.
            tf.errors.InvalidArgumentError: the same in a graph, which ``fit`` translates.
        """
        if self._statistics is not None:
            self._statistics.prepare()
        with tf.device("CPU:0"):
            mine = tf.stack([_is_bad(each) for each in gradients])[None]
            everyone = self._wait.around(
                tf.cast(mine, tf.int32), lambda rows: self._wire.gather(rows, self._wait.key)
            )
            bad = tf.reduce_any(everyone > 0)
            step = self._tried.assign_add(1)
        names = [getattr(v, "path", v.name) for v in variables]
        group = self._group  # TensorFlow keeps the functions below, which must not keep this object

        def text(rows: np.ndarray[Any, Any], step: np.ndarray[Any, Any]) -> str:
            found = [[names[i] for i in np.flatnonzero(row)] for row in rows]
            return f"step {of_run(int(step))}: {describe(found, group.members)}"

        def error(*found: np.ndarray[Any, Any]) -> FloatingPointError:
            return FloatingPointError(f"in {text(*found)}")

        def skip(*found: np.ndarray[Any, Any]) -> np.int32:
            if group.rank == 0:
                logger.warning("skipped %s", text(*found))
            skipped_steps.add()
            return np.int32(0)

        step = tf.convert_to_tensor(step)
        if tf.executing_eagerly():
            if not bool(bad):
                update()
                if self._statistics is not None:
                    self._statistics.keep()
            elif self._statistics is None:
                raise mark_as_shown_by(error(everyone.numpy(), step.numpy()), self._group.first)
            else:
                self._statistics.put_back()
                skip(everyone.numpy(), step.numpy())
            return
        if (statistics := self._statistics) is None:
            reason = tf.cond(
                bad,
                lambda: tf.numpy_function(
                    lambda *found: for_graph(error(*found), on_every_rank=True).encode(),
                    [everyone, step],
                    tf.string,
                ),
                lambda: tf.constant(""),
            )
            with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(bad), [reason])]):
                update()
            return

        def updated() -> tf.Tensor:
            update()
            statistics.keep()
            return tf.constant(0)

        def skipped() -> tf.Tensor:
            statistics.put_back()
            return tf.numpy_function(skip, [everyone, step], tf.int32)

        tf.cond(bad, skipped, updated)


def _is_bad(gradient: Any) -> tf.Tensor:
    if gradient is None:
        return tf.constant(False)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))
