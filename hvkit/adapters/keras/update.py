"""Averaging, attached to the ``apply`` of one Keras optimizer instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import tensorflow as tf

from hvkit.adapters.keras.guard import refuse_xla


class Average(Protocol):
    """Means over ranks; see :meth:`hvkit.adapters.keras.averager.GradientAverager.__call__`."""

    def __call__(
        self, gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any] | None = ...
    ) -> list[Any]: ...


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

    # AutoGraph would translate all of hvkit and Horovod that is called here, for seconds.
    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def averaged_apply(grads: Sequence[Any], trainable_variables: Any = None) -> None:
        refuse_xla("optimizer.apply")
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
    accumulators = [
        optimizer._accumulated_gradients[optimizer._get_variable_index(v)] for v in variables
    ]
    local = [None if g is None else tf.convert_to_tensor(g) for g in grads]
    steps = optimizer.gradient_accumulation_steps
    due = tf.equal((optimizer._iterations.value + 1) % steps, 0)
    if tf.executing_eagerly():
        if due:
            return _average_accumulated(average, local, variables, accumulators)
        # Keras refuses a step without any gradient, which other ranks may have.
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
    sums = [None if g is None else g + acc for g, acc in zip(local, held, strict=True)]
    with tf.control_dependencies([each for each in sums if each is not None] + held):
        for acc, zeros in zip(accumulators, _zeros(accumulators), strict=True):
            acc.assign(zeros)
    return average(sums, variables, held)


def _zeros(accumulators: list[Any]) -> list[tf.Tensor]:
    return [tf.zeros_like(acc.value) for acc in accumulators]
