"""Averaging, attached to the ``apply`` of one Keras optimizer instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

Average = Callable[[Sequence[Any], Sequence[Any]], list[Any]]


def average_in_apply(
    optimizer: Any, average: Average, before_update: Callable[[Sequence[Any]], None]
) -> None:
    """Have ``optimizer.apply`` average the gradients before it uses them.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
        average: the collective: means of gradients, for the variables they belong to.
        before_update: called with the variables at the start of each update.
    """
    apply = optimizer.apply

    def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        grads = list(grads)
        known = trainable_variables is None and optimizer.built
        variables = optimizer._trainable_variables if known else trainable_variables
        if grads and variables is not None:
            variables = list(variables)
            before_update(variables)
            if optimizer.gradient_accumulation_steps:
                grads = _average_when_due(optimizer, average, grads, variables)
            else:
                grads = average(grads, variables)
        apply(grads, None if known else variables)

    optimizer.apply = averaged_apply


def _average_when_due(
    optimizer: Any, average: Average, grads: list[Any], variables: list[Any]
) -> list[Any]:
    """Reduce once in ``gradient_accumulation_steps``, with all that was accumulated.

    Keras adds the accumulators to the last gradients by itself. In the step that updates, they
    are therefore emptied into the gradients that are averaged.
    """
    if not optimizer.built:
        optimizer.build(variables)
    present = [i for i, g in enumerate(grads) if g is not None]
    accumulators = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(variables[i])]
        for i in present
    ]
    local = [tf.convert_to_tensor(grads[i]) for i in present]

    def reduce() -> list[tf.Tensor]:
        sums = [g + acc.value for g, acc in zip(local, accumulators, strict=True)]
        with tf.control_dependencies(sums):
            for acc in accumulators:
                acc.assign(tf.zeros_like(acc.value))
        return average(sums, [variables[i] for i in present])

    steps = optimizer.gradient_accumulation_steps
    due = tf.equal((optimizer._iterations.value + 1) % steps, 0)
    means = tf.cond(due, reduce, lambda: local)
    result: list[Any] = [None] * len(grads)
    for i, mean in zip(present, means, strict=True):
        result[i] = mean
    return result
