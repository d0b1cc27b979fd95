"""Code around each update of the optimizers of a model whose ranks exchange weights.

An update is ``optimizer.apply``, which ``fit``, ``apply_gradients`` and custom loops call, eagerly
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

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.wire import refuse_tf_distribute, refuse_xla
from hvkit.frameworks.keras.optimizers import inner_optimizer
from hvkit.frameworks.keras.weights.updated_variables import UpdatedVariables
from hvkit.frameworks.keras.weights.variables import Variables
from hvkit.sync.local_weights import LocalWeightsKeeper

# By optimizer, not one that scales the loss.
_around: WeakKeyDictionary[Any, ref[Updates]] = WeakKeyDictionary()


class UpdatesKeeper(LocalWeightsKeeper):
    """Exchanges the weights of a model, by variables that are updated together."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.updated: list[UpdatedVariables] = []
        # Weak: the optimizers keep them. Their variables count also when they are gone.
        self._updates: list[ref[Any]] = []

    def count_updates(self, updates: Updates) -> int:
        """Add the ``Updates`` of another optimizer; return its number."""
        self._updates.append(ref(updates))
        return len(self._updates) - 1

    def new(self, variables: list[tf.Variable], updates: Updates) -> UpdatedVariables:
        """Add variables that an optimizer updates together."""
        self.variables.add(variables)
        updated = UpdatedVariables(variables, self.variables, updates, len(self.updated))
        self.updated.append(updated)
        self._add_optimizer(updated)
        return updated


class Updates(ABC):
    """Code around the updates of one optimizer, whose ``apply`` keeps this object.

    A ``LossScaleOptimizer`` around it skips an update if the gradients overflow; this runs around
    skipped updates, too.
    """

    def __init__(
        self,
        keeper: Any,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self.checks = checks
        self._keeper = keeper
        self.number = keeper.count_updates(self)
        self.optimizer = ref(optimizer)
        self.per_step: int = optimizer.gradient_accumulation_steps or 1
        self._before_update = before_update
        self._updating = False
        with tf.init_scope(), tf.device("CPU:0"):
            self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply_within(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is None and optimizer.built:
                variables, given = optimizer._trainable_variables, None
            else:
                variables = given = trainable_variables
            self.around(optimizer, lambda: apply(grads, given), grads, variables)

        optimizer.apply = apply_within
        _around[optimizer] = ref(self)
        _include_skipped_updates()

    def around(
        self, optimizer: Any, update: Callable[[], None], grads: Sequence[Any], variables: Any
    ) -> None:
        """Call ``update``, and the code around it."""
        if self._updating or not grads or variables is None:
            update()
            return
        refuse_xla("optimizer.apply")
        refuse_tf_distribute()
        self._keeper.refuse_step()
        self._before_update(variables)
        if not optimizer.built:
            # Not after the comparison: TensorFlow could not initialise the new variables before it
            # runs the graph, and would run the graph in which no weights were synchronised.
            with keras.name_scope(optimizer.name):
                optimizer.build(variables)
        weights = [backend_variable(v) for v in variables]
        with tf.control_dependencies(self._before(grads, variables, weights)):
            self._updating = True
            try:
                update()
            finally:
                self._updating = False
        self._after(weights)

    def _updated_together(self, variables: list[tf.Variable]) -> UpdatedVariables:
        """The object for these variables; perhaps a new one."""
        return self._known(variables) or self._keeper.new(variables, self)

    def _of_optimizer(self) -> list[UpdatedVariables]:
        """The objects for variables that the optimizer has updated."""
        return [each for each in self._keeper.updated if each.optimizer_number == self.number]

    def _known(self, variables: list[tf.Variable]) -> UpdatedVariables | None:
        """The object for these variables, if the optimizer has updated them together before."""
        ids = {id(v) for v in variables}
        known = self._of_optimizer()
        return next((each for each in known if ids == {id(v) for v in each.variables}), None)

    @abstractmethod
    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        """Compare the ranks before their first update; return the operations that this takes."""

    @abstractmethod
    def _after(self, weights: list[tf.Variable]) -> None:
        """Exchange weights at the end of a step or round."""


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
        updates.around(self, lambda: apply(self, grads, trainable_variables), grads, variables)

    scaler.apply = apply_within
