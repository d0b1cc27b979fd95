"""Averaging inside ``optimizer.apply``, and updates that all ranks leave out together.

Gradient accumulation averages once in several steps. Loss-scaling optimizers around a distributed
one (``optimizers``) skip a step on all ranks or on none. ``NonFinite`` finds gradients that are NaN
or infinite before they become means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit.frameworks.keras.backends import not_converted
from hvkit.frameworks.keras.buffers import LastStatistics
from hvkit.frameworks.keras.optimizers import (
    Agree,
    fit_half,
    is_overwritten,
    let_leave_out_updates,
    variables_of,
)
from hvkit.frameworks.keras.tensorflow.wire import (
    GraphWait,
    Wire,
    graph_counter,
    nothing,
    raise_unless_empty,
    refuse_tf_distribute,
    refuse_xla,
    run_python,
    values_of,
)
from hvkit.log import logger
from hvkit.runtime import Group
from hvkit.sync.port import describe_nonfinite, skipped_steps
from hvkit.watch.calls import of_run

Average = Callable[..., list[Any]]
"""As ``hvkit.frameworks.keras.tensorflow.averager.GradientAverager.__call__``."""


def average_in_apply(
    optimizer: Any,
    average: Average,
    before_update: Callable[[Sequence[Any]], None],
    nonfinite: NonFinite | None = None,
) -> None:
    apply = optimizer.apply
    if nonfinite:
        let_leave_out_updates(optimizer)

    # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
    @not_converted
    def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        refuse_xla("optimizer.apply")
        refuse_tf_distribute()
        grads, variables = list(grads), variables_of(optimizer, trainable_variables)
        given = None if trainable_variables is None else variables  # Keras checks the number
        if grads and variables is not None:
            before_update(variables)
            if nonfinite:
                if not optimizer.built:
                    optimizer.build(variables)
                nonfinite.guard(grads, variables, lambda: apply(average(grads, variables), given))
                return
            if optimizer.gradient_accumulation_steps:
                grads = _average_at_last_step(optimizer, average, grads, variables)
            else:
                grads = average(grads, variables)
        apply(grads, given)

    optimizer.apply = averaged_apply


def _average_at_last_step(
    optimizer: Any, average: Average, grads: list[Any], variables: list[Any]
) -> list[Any]:
    """Average the accumulated gradients, once in ``gradient_accumulation_steps``.

    Keras itself adds the accumulators to the last gradients. In a step that updates, this function
    therefore moves them into the gradients that it averages.
    """
    if not optimizer.built:
        optimizer.build(variables)
    accumulators = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables
    ]
    local = [None if g is None else tf.convert_to_tensor(g) for g in grads]
    steps = optimizer.gradient_accumulation_steps
    is_last = tf.equal((optimizer._iterations.value + 1) % steps, 0)
    if tf.executing_eagerly():
        if is_last:
            return _average_accumulated(average, local, variables, accumulators)
        # Keras refuses a step without any gradient, even if other ranks have some.
        return local if any(g is not None for g in local) else _zeros(accumulators)
    present = [i for i, g in enumerate(local) if g is not None]

    def reduce() -> list[tf.Tensor]:
        means = _average_accumulated(average, local, variables, accumulators)
        return [means[i] for i in present]

    means = tf.cond(is_last, reduce, lambda: [local[i] for i in present])
    result: list[Any] = [None] * len(grads)
    for i, mean in zip(present, means, strict=True):
        result[i] = mean
    return result


def _average_accumulated(
    average: Average, local: list[Any], variables: list[Any], accumulators: list[Any]
) -> list[Any]:
    accumulated = [acc.value + 0 for acc in accumulators]
    sums = [
        None if g is None else tf.maximum(g, acc) if is_overwritten(v) else g + acc
        for g, acc, v in zip(local, accumulated, variables, strict=True)
    ]
    with tf.control_dependencies([each for each in sums if each is not None] + accumulated):
        for acc, zeros in zip(accumulators, _zeros(accumulators), strict=True):
            acc.assign(zeros)
    return average(sums, variables, accumulated)


def _zeros(accumulators: list[Any]) -> list[tf.Tensor]:
    return [tf.zeros_like(acc.value) for acc in accumulators]


def finite_on_all(name: str, group: Group) -> Agree:
    """Skips on all ranks or none, which else wait in inner optimizers; as ``SharedScale.agree``.

    A graph with two optimizers may check both at the same time, so ``name`` is of one.
    """
    wire = Wire("checks", group)

    @functools.cache
    def wait_for(what: str) -> GraphWait:
        """Made for an optimizer with a loss scale: each costs the watcher time."""
        return GraphWait(f"{name}.{what}", group=group)

    def agree(finite: tf.Tensor, halves: Sequence[tuple[Any, Any]]) -> tf.Tensor:
        refuse_xla("the check for overflows in the optimizer")
        wait, added = wait_for("overflows"), wait_for("sums")
        small = fit_half([g for g, _ in halves if g is not None], group.size)
        # 0: one of them is not finite. 1: their sums may be too large. 2: neither.
        found = tf.cast(finite, tf.int32) * (1 + tf.cast(small, tf.int32))
        with tf.device("CPU:0"):
            lowest = wait.around(found, lambda number: wire.lowest(number, wait.key))

        def sums_fit() -> tf.Tensor:
            # In eager code another rank may have gradients that this one has not.
            own = [
                tf.zeros(v.shape) if g is None else tf.cast(g, tf.float32)
                for g, v in halves
                if g is not None or tf.executing_eagerly()
            ]
            flat = tf.concat([tf.reshape(g, [-1]) for g in own], axis=0)
            return fit_half([added.around(flat, lambda sent: wire.sum(sent, added.key))])

        if not halves:
            return lowest > 0
        return tf.cond(tf.equal(lowest, 1), sums_fit, lambda: lowest > 1)

    return agree


class NonFinite:
    """Finds gradients of any rank that are NaN or infinite, and skips the update or stops."""

    def __init__(
        self, action: str, name: str, statistics: LastStatistics | None, group: Group
    ) -> None:
        self._action = action
        self._group = group
        self._statistics = statistics
        self._wire = Wire("checks", group)
        self._wait = GraphWait(name, group=group)
        # Updates that this process has tried, in graphs and in eager code, skipped ones among them.
        self._tried = graph_counter(dtype=tf.int64)

    def guard(
        self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[], None]
    ) -> None:
        """Update, without new variables, unless a rank has a gradient that is not finite."""
        if self._statistics is not None:
            self._statistics.prepare()
        with tf.device("CPU:0"):
            local_bad = tf.stack([_is_bad(each) for each in gradients])[None]
            gathered = self._wait.around(
                tf.cast(local_bad, tf.int32), lambda rows: self._wire.gather(rows, self._wait.key)
            )
            bad = tf.reduce_any(gathered > 0)
            step = self._tried.assign_add(1)
        names = [getattr(v, "path", v.name) for v in variables]
        group = self._group  # TensorFlow keeps the functions below, which must not keep this object

        def text(rows: np.ndarray[Any, Any], step: np.ndarray[Any, Any]) -> str:
            found = [[names[i] for i in np.flatnonzero(row)] for row in rows]
            return f"step {of_run(int(step))}: {describe_nonfinite(found, group.members)}"

        def reason(*found: np.ndarray[Any, Any]) -> bytes:
            return f"in {text(*found)}".encode()

        def skip(*found: np.ndarray[Any, Any]) -> None:
            if group.rank == 0:
                logger.warning("skipped %s", text(*found))
            skipped_steps.number += 1

        found = [gathered, tf.convert_to_tensor(step)]
        if statistics := self._statistics:

            def updated() -> tf.Tensor:
                update()
                statistics.keep()
                return nothing()

            def skipped() -> tf.Tensor:
                statistics.put_back()
                return run_python(skip, found)

            tf.cond(bad, skipped, updated)
            return
        said = tf.cond(
            bad, lambda: tf.numpy_function(reason, found, tf.string), lambda: tf.constant("")
        )
        with tf.control_dependencies([raise_unless_empty(said, FloatingPointError, group)]):
            update()


def _is_bad(gradient: Any) -> tf.Tensor:
    if gradient is None:
        return tf.constant(False)
    return tf.logical_not(tf.reduce_all(tf.math.is_finite(values_of(gradient))))
