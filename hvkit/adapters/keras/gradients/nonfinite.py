"""Finds gradients that are NaN or infinite before they become means, and skips or stops then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import runtime
from hvkit.adapters.keras.collectives.graph_collectives import GraphWait
from hvkit.adapters.keras.collectives.wire import Wire
from hvkit.adapters.nonfinite import describe
from hvkit.log import logger
from hvkit.watch.rank_errors import mark_as_shown_by


class NonFinite:
    """Compares what all ranks find in the gradients of an update.

    Args:
        action: ``"skip"`` or ``"stop"``.
        name: the same on every rank, and no other optimizer's.
    """

    def __init__(self, action: str, name: str) -> None:
        self._action = action
        self._wire = Wire("checks")
        self._wait = GraphWait(name)

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
            tf.errors.InvalidArgumentError: the same in a graph.
        """
        with tf.device("CPU:0"):
            mine = tf.stack([_is_bad(each) for each in gradients])[None]
            everyone = self._wait.around(
                tf.cast(mine, tf.int32), lambda rows: self._wire.gather(rows, self._wait.key)
            )
            bad = tf.reduce_any(everyone > 0)
        names = [getattr(v, "path", v.name) for v in variables]

        def text(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            found = [[names[i] for i in np.flatnonzero(row)] for row in rows]
            return np.array(describe(found).encode(), object)

        def log(rows: np.ndarray[Any, Any]) -> np.int32:
            if runtime.rank() == 0:
                logger.warning("skipped a step: %s", text(rows).item().decode())
            return np.int32(0)

        if tf.executing_eagerly():
            if not bool(bad):
                update()
            elif self._action == "stop":
                reason = text(everyone.numpy()).item().decode()
                raise mark_as_shown_by(FloatingPointError(reason), 0)
            else:
                log(everyone.numpy())
            return
        if self._action == "stop":
            reason = tf.cond(
                bad, lambda: tf.numpy_function(text, [everyone], tf.string), lambda: tf.constant("")
            )
            with tf.control_dependencies([tf.debugging.Assert(tf.logical_not(bad), [reason])]):
                update()
            return

        def updated() -> tf.Tensor:
            update()
            return tf.constant(0)

        tf.cond(bad, lambda: tf.numpy_function(log, [everyone], tf.int32), updated)


def _is_bad(gradient: Any) -> tf.Tensor:
    if gradient is None:
        return tf.constant(False)
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values)))
