"""Code around each update of an optimizer, for strategies whose ranks train alone.

The update is ``optimizer.apply``, which ``fit``, ``apply_gradients`` and custom loops call, eagerly
and inside graphs.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import tensorflow as tf

from hvkit.adapters.keras.optimizers import inner_optimizer

# What surrounds the updates of an optimizer, not of one that scales the loss.
_around: WeakKeyDictionary[Any, ref[Updates]] = WeakKeyDictionary()


class Updates(ABC):
    """What runs around the updates of one optimizer, whose ``apply`` keeps this object.

    A ``LossScaleOptimizer`` around it skips an update if the gradients overflow; this runs around
    skipped updates, too.

    Args:
        optimizer: one that updates variables, not one that scales the loss.
    """

    def __init__(self, optimizer: Any) -> None:
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply_within(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is None and optimizer.built:
                variables, given = optimizer._trainable_variables, None
            else:
                variables = given = trainable_variables
            self.around(lambda: apply(grads, given), grads, variables)

        optimizer.apply = apply_within
        _around[optimizer] = ref(self)
        _include_skipped_updates()

    @abstractmethod
    def around(self, update: Callable[[], None], grads: Sequence[Any], variables: Any) -> None:
        """Call ``update``, and what belongs around it.

        Args:
            update: applies the gradients.
            grads: ``tf.Tensor``, ``tf.IndexedSlices`` or None.
            variables: that the update will change; None if the optimizer does not know them yet.
        """


@functools.cache
def _include_skipped_updates() -> None:
    """Surround the whole update of each ``LossScaleOptimizer``, which may skip that inside.

    This changes the class, because ``compile`` makes the instance later.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    apply = scaler.apply

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_within(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = inner_optimizer(self)
        reference = _around.get(inner)
        updates = reference() if reference else None
        if updates is None:
            apply(self, grads, trainable_variables)
            return
        grads = list(grads)
        variables = trainable_variables
        if variables is None and inner.built:
            variables = inner._trainable_variables
        updates.around(lambda: apply(self, grads, trainable_variables), grads, variables)

    scaler.apply = apply_within
