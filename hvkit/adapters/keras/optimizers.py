"""Averaging, attached to the ``apply`` of one Keras optimizer instance.

The learning rate of a Keras optimizer, multiplied where an update reads it.

``optimizer.learning_rate`` is the user's: callbacks, loggers and saved files read and write it at
any time, and it may be a number, a ``LearningRateSchedule`` or a function.

Keras's ``LossScaleOptimizer``: an overflow on one rank skips the step on all.

It wraps the optimizer that does the update, either by the user's hand or in ``compile`` under the
``mixed_float16`` policy, before or after ``distribute``. It looks for overflows in the local
gradients, and calls the inner optimizer only if there are none. Were each rank to decide that
alone, some would wait in the inner optimizer for others that never come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import keras
import tensorflow as tf

from hvkit import runtime
from hvkit.adapters.keras.collectives import GraphWait
from hvkit.adapters.keras.refusals import refuse_xla
from hvkit.learning_rate import Multiplier


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


class RateInUpdate:
    """Multiplies the rate of one optimizer inside its ``apply``.

    Args:
        optimizer: one that updates variables.
        multiplier: by what.
    """

    def __init__(self, optimizer: Any, multiplier: Multiplier) -> None:
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._updating = False
        read, apply = optimizer._get_current_learning_rate, optimizer.apply

        def rate() -> Any:
            return read() * self._by() if self._updating else read()

        def apply_at_multiplied_rate(*args: Any, **kwargs: Any) -> None:
            self._updating = True
            try:
                apply(*args, **kwargs)
            finally:
                self._updating = False

        optimizer._get_current_learning_rate = rate
        optimizer.apply = apply_at_multiplied_rate

    def _by(self) -> Any:
        """:meth:`hvkit.learning_rate.Multiplier.at`, as a tensor during a warm-up."""
        full, first, steps = (
            self._multiplier.full,
            self._multiplier.first,
            self._multiplier.warmup_steps,
        )
        if not steps:
            return full
        step = tf.cast(tf.convert_to_tensor(self._optimizer.iterations), tf.float32)
        return tf.where(step >= steps, full, first + (full - first) * step / steps)


_averaged: WeakSet[Any] = WeakSet()


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the update, from inside any loss-scaling ones."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def skip_together(optimizer: Any) -> None:
    """From now on, loss-scaling optimizers around this one skip steps on all ranks together."""
    _averaged.add(optimizer)
    _share_check_for_overflows()


@functools.cache
def _share_check_for_overflows() -> None:
    """Make the check for overflows a common one where the inner optimizer is averaged.

    The class is changed rather than an instance, since ``compile`` makes the instance later.
    Optimizers that were not passed to ``distribute`` are checked as ever.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    check_finite_locally = scaler.check_finite
    hvd, wait = runtime.engine("tensorflow").hvd, GraphWait("hvkit.finite")

    def lowest(number: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(number, op=hvd.Min, name=wait.key, ignore_name_scope=True)

    def check_finite(self: Any, grads: Any) -> Any:
        finite = check_finite_locally(self, grads)
        if inner_optimizer(self) not in _averaged:
            return finite
        refuse_xla("the check for overflows in the optimizer")
        with tf.device("CPU:0"):
            everywhere = wait.around(tf.cast(finite, tf.int32), lowest)
        return tf.cast(everywhere, tf.bool)

    scaler.check_finite = check_finite
