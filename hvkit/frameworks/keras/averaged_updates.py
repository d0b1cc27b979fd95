"""Averaging inside ``optimizer.apply``, and what optimizers around it agree on.

Gradient accumulation averages once in several steps. Loss-scaling optimizers around a distributed
one (``loss_scale``) skip a step on all ranks together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.gradients.nonfinite import NonFinite
from hvkit.frameworks.keras.graph_refusals import refuse_tf_distribute, refuse_xla
from hvkit.frameworks.keras.loss_scale import Agree, fit_half
from hvkit.frameworks.keras.optimizers import is_overwritten, let_leave_out_updates


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


@functools.cache
def finite_in(group: Group) -> Agree:
    """Whether an update counts: ``agree`` of ``SharedScale``, for the ranks of a group.

    If each rank decided alone, some would wait in the inner optimizer for ranks that never come.
    """
    wire, wait = Wire("checks", group), GraphWait("hvkit.finite", group=group)
    added = GraphWait("hvkit.finite.sums", group=group)

    def agree(finite: tf.Tensor, halves: Sequence[tuple[Any, Any]]) -> tf.Tensor:
        refuse_xla("the check for overflows in the optimizer")
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
