"""Keras's ``LossScaleOptimizer``: an overflow on one rank skips the step on all.

It wraps the optimizer that does the update, either by the user's hand or in ``compile`` under the
``mixed_float16`` policy, before or after ``distribute``. It looks for overflows in the local
gradients, and calls the inner optimizer only if there are none. Were each rank to decide that
alone, some would wait in the inner optimizer for others that never come.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf

from hvkit import runtime
from hvkit.adapters.keras.graph_wait import GraphWait
from hvkit.adapters.keras.guard import refuse_xla

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
