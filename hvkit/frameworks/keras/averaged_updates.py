"""Averaging inside ``optimizer.apply``, and Keras's optimizers that hold others.

Gradient accumulation averages once in several steps. Loss-scaling optimizers around a distributed
one skip a step on all ranks together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import keras
import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.gradients.nonfinite import NonFinite
from hvkit.frameworks.keras.graph_refusals import refuse_tf_distribute, refuse_xla
from hvkit.frameworks.keras.optimizers import (
    inner_optimizer,
    is_overwritten,
    let_leave_out_updates,
)


class Average(Protocol):
    """As ``hvkit.frameworks.keras.gradients.averager.GradientAverager.__call__``."""

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any] | None = ...
    ) -> list[Any]: ...


def average_in_apply(
    optimizer: Any,
    average: Average,
    before_update: Callable[[Sequence[Any]], None],
    nonfinite: NonFinite | None = None,
) -> None:
    """Make ``optimizer.apply`` average the gradients before it uses them.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
        average: the collective that returns the means of the gradients of some variables.
        before_update: called with the variables at the start of each update.
        nonfinite: leaves out an update, or ends training, if a rank's gradients are not finite.
    """
    apply = optimizer.apply
    if nonfinite:
        let_leave_out_updates(optimizer)

    # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        refuse_xla("optimizer.apply")
        refuse_tf_distribute()
        grads = list(grads)
        known = trainable_variables is None and optimizer.built
        variables = optimizer._trainable_variables if known else trainable_variables
        if grads and variables is not None:
            variables = list(variables)
            before_update(variables)
            if nonfinite:
                if not optimizer.built:
                    optimizer.build(variables)
                own = None if known else variables
                nonfinite.guard(grads, variables, lambda: apply(average(grads, variables), own))
                return
            if optimizer.gradient_accumulation_steps:
                grads = _average_when_due(optimizer, average, grads, variables)
            else:
                grads = average(grads, variables)
        apply(grads, None if known else variables)

    optimizer.apply = averaged_apply


def _average_when_due(
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
    due = tf.equal((optimizer._iterations.value + 1) % steps, 0)
    if tf.executing_eagerly():
        if due:
            return _average_accumulated(average, local, variables, accumulators)
        # Keras refuses a step without any gradient, even if other ranks have some.
        return local if any(g is not None for g in local) else _zeros(accumulators)
    present = [i for i, g in enumerate(local) if g is not None]

    def reduce() -> list[tf.Tensor]:
        means = _average_accumulated(average, local, variables, accumulators)
        return [means[i] for i in present]

    means = tf.cond(due, reduce, lambda: [local[i] for i in present])
    result: list[Any] = [None] * len(grads)
    for i, mean in zip(present, means, strict=True):
        result[i] = mean
    return result


def _average_accumulated(
    average: Average, local: list[Any], variables: list[Any], accumulators: list[Any]
) -> list[Any]:
    held = [acc.value + 0 for acc in accumulators]
    sums = [
        None if g is None else tf.maximum(g, acc) if is_overwritten(v) else g + acc
        for g, acc, v in zip(local, held, variables, strict=True)
    ]
    with tf.control_dependencies([each for each in sums if each is not None] + held):
        for acc, zeros in zip(accumulators, _zeros(accumulators), strict=True):
            acc.assign(zeros)
    return average(sums, variables, held)


def _zeros(accumulators: list[Any]) -> list[tf.Tensor]:
    return [tf.zeros_like(acc.value) for acc in accumulators]


Everywhere = Callable[[tf.Tensor], tf.Tensor]
"""From whether something holds on this rank: whether it holds on all; a collective."""

_skipping_together: WeakKeyDictionary[Any, Everywhere] = WeakKeyDictionary()


def skip_together(optimizer: Any, everywhere: Everywhere) -> None:
    """Make each ``LossScaleOptimizer`` around this one skip a step on all ranks or on none.

    It wraps the optimizer that does the update: either the user makes it, or ``compile`` does under
    the ``mixed_float16`` policy, before or after ``distribute``. It looks for overflows in the
    local gradients, and calls the inner optimizer only if there are none. If each rank decided
    alone, some would wait in the inner optimizer for ranks that never come.

    Args:
        optimizer: one that updates variables.
        everywhere: joins the decisions of the ranks that update together.
    """
    _skipping_together[optimizer] = everywhere
    _share_check_for_overflows()


@functools.cache
def _share_check_for_overflows() -> None:
    """Make the check for overflows a collective if the inner optimizer is distributed.

    This changes the class, because ``compile`` makes the instance later. The check of optimizers
    that were not passed to ``distribute`` stays local.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    check_finite_locally = scaler.check_finite

    def check_finite(self: Any, grads: Any) -> Any:
        finite = check_finite_locally(self, grads)
        if (everywhere := _skipping_together.get(inner_optimizer(self))) is None:
            return finite
        refuse_xla("the check for overflows in the optimizer")
        return everywhere(finite)

    scaler.check_finite = check_finite


@functools.cache
def finite_in(group: Group) -> Everywhere:
    """What ``skip_together`` needs for the ranks of a group."""
    wire, wait = Wire("checks", group), GraphWait("hvkit.finite", group=group)

    def everywhere(finite: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:0"):
            lowest = wait.around(
                tf.cast(finite, tf.int32), lambda number: wire.lowest(number, wait.key)
            )
        return tf.cast(lowest, tf.bool)

    return everywhere
