"""Code around each update of the optimizers of a model whose ranks exchange weights.

An update is ``optimizer.apply``, which ``fit``, ``apply_gradients`` and custom loops call, eagerly
and inside graphs.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import keras
import tensorflow as tf

from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.wire import graph_counter, refuse_tf_distribute, refuse_xla
from hvkit.frameworks.keras.optimizers import calls_of_apply, inner_optimizer, variables_of
from hvkit.frameworks.keras.weights.updated_variables import UpdatedVariables
from hvkit.frameworks.keras.weights.variables import Variables
from hvkit.sync.local_weights import LocalWeightsKeeper

# By the id of an optimizer that does not scale the loss; its ``apply`` keeps the object.
_around: WeakValueDictionary[int, Updates] = WeakValueDictionary()


class UpdatesKeeper(LocalWeightsKeeper):
    """Exchanges the weights of a model, by variables that are updated together, as ``updated``."""

    weights: Variables

    def __init__(self, *args: Any) -> None:  # of the keeper of a strategy
        super().__init__(*args)
        self.updated: list[UpdatedVariables] = []
        # Weak: the optimizers keep them. Their variables count also when they are gone.
        self._updates: list[ref[Updates]] = []

    def count_updates(self, updates: Updates) -> int:
        self._updates.append(ref(updates))
        return len(self._updates) - 1

    def updated_together(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables:
        """The object for variables that an optimizer updates together; perhaps a new one."""
        return self._known(updates, variables) or self._new(updates, variables)

    def _known(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables | None:
        ids = {id(v) for v in variables}
        known = self._of_optimizer(updates.number)
        return next((each for each in known if ids == {id(v) for v in each.variables}), None)

    def _of_optimizer(self, number: int) -> list[UpdatedVariables]:
        return [each for each in self.updated if each.optimizer_number == number]

    def _new(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables:
        self.weights.add(variables)
        new = UpdatedVariables(variables, self.weights, updates, len(self.updated))
        self.updated.append(new)
        self._add_optimizer(new)
        return new

    @abstractmethod
    def before_update(
        self, updated: UpdatedVariables, compare: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        """Begin, and ``compare`` the ranks; return the operations that this takes."""

    @abstractmethod
    def after_update(self, updates: Updates, updated: UpdatedVariables) -> None:
        """Exchange weights at the end of a step or round."""


class Updates:
    """Code around the updates of one optimizer, whose ``apply`` keeps this object.

    A ``LossScaleOptimizer`` around it skips an update if the gradients overflow; this runs around
    skipped updates, too. ``calls`` are those of ``apply`` so far, which keepers count, for graphs;
    a step has ``per_step``, as the optimizer may accumulate gradients.
    """

    def __init__(
        self,
        keeper: UpdatesKeeper,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self.checks = checks
        self._keeper = keeper
        self.optimizer = ref(optimizer)
        self.per_step: int = optimizer.gradient_accumulation_steps or 1
        self._before_update = before_update
        self._updating = False
        self.calls = graph_counter(dtype=tf.int64)
        self.number = keeper.count_updates(self)
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply_within(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads, variables = list(grads), variables_of(optimizer, trainable_variables)
            given = None if trainable_variables is None else variables  # Keras checks the number
            self.around(optimizer, lambda: apply(grads, given), grads, variables)

        optimizer.apply = apply_within
        _around[id(optimizer)] = self
        _include_skipped_updates()

    def count_from_optimizer(self) -> None:
        """Go on where the optimizer is, between two steps or while it accumulates gradients."""
        if (optimizer := self.optimizer()) is not None:
            self.calls.assign(calls_of_apply(optimizer))

    def around(
        self, optimizer: Any, update: Callable[[], None], grads: Sequence[Any], variables: Any
    ) -> None:
        """Surround an update; the variables are None if the optimizer does not know them yet."""
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
        updated = self._keeper.updated_together(self, [backend_variable(v) for v in variables])
        begun = self._keeper.before_update(updated, lambda: self.checks(grads, variables))
        with tf.control_dependencies(begun):
            self._updating = True
            try:
                update()
            finally:
                self._updating = False
        self._keeper.after_update(self, updated)


@functools.cache
def _include_skipped_updates() -> None:
    """Surround updates of ``LossScaleOptimizer``, whose instance ``compile`` makes later."""
    scaler = keras.optimizers.LossScaleOptimizer
    apply = scaler.apply

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_within(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = inner_optimizer(self)
        if (updates := _around.get(id(inner))) is None:
            apply(self, grads, trainable_variables)
            return
        grads, variables = list(grads), variables_of(inner, trainable_variables)
        given = None if trainable_variables is None else variables
        updates.around(self, lambda: apply(self, grads, given), grads, variables)

    scaler.apply = apply_within
