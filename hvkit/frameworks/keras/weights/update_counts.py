"""Counts the updates of an optimizer, by the variables that it updates together, to end rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import tensorflow as tf

from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.weight_keeper import Updates

if TYPE_CHECKING:
    from hvkit.frameworks.keras.weights.rounds import RoundKeeper


class UpdatedVariables:
    """Variables that an optimizer updates together, and its steps since they agreed."""

    def __init__(self, variables: list[tf.Variable]) -> None:
        self.variables = variables
        with tf.init_scope(), tf.device("CPU:0"):
            self.steps = tf.Variable(0, dtype=tf.int64, trainable=False)

    @property
    def steps_done(self) -> int:
        return int(self.steps.numpy())

    @steps_done.setter
    def steps_done(self, number: int) -> None:
        self.steps.assign(number)


class OptimizerRounds(Updates):
    """Counts the updates of one optimizer, and lets its keeper end rounds.

    The optimizer's ``apply`` keeps this object.
    """

    def __init__(
        self,
        keeper: RoundKeeper,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self._rounds = keeper
        self._optimizer = ref(optimizer)
        per_step = optimizer.gradient_accumulation_steps or 1
        self._updates = keeper.strategy.every * per_step
        self._beside = keeper.strategy.overlap * per_step
        self.groups: list[UpdatedVariables] = []
        super().__init__(keeper, optimizer, checks, before_update)

    def updates_done(self) -> int:
        optimizer = self._optimizer()
        return 0 if optimizer is None else calls_of_apply(optimizer)

    def go_on(self, variables: list[tf.Variable], steps: int) -> None:
        """Resume in a round; in the middle of one, the ranks' weights need not be alike."""
        # No agreement here, though groups share variables: the rest is not loaded yet.
        group = self._known(variables) or self._new_group(variables)
        group.steps_done = steps
        self.checks.skip_weights()

    def _group_of(self, variables: list[tf.Variable]) -> UpdatedVariables:
        """The group of these variables.

        A new one ends the rounds of others that it shares variables with: a script that freezes
        some layers in the middle of a round would otherwise leave them different on each rank.
        """
        if known := self._known(variables):
            return known
        ids = {id(v) for v in variables}
        with tf.init_scope():
            for group in self.groups:
                if not ids.isdisjoint(map(id, group.variables)):
                    self._rounds.add_due(group.variables)
                    if group.steps_done:
                        self._rounds.agree(group.variables)
                        group.steps_done = 0
        self._rounds.require_same_variables(variables)
        return self._new_group(variables)

    def _known(self, variables: list[tf.Variable]) -> UpdatedVariables | None:
        ids = {id(v) for v in variables}
        return next((g for g in self.groups if ids == {id(v) for v in g.variables}), None)

    def _new_group(self, variables: list[tf.Variable]) -> UpdatedVariables:
        self.groups.append(UpdatedVariables(variables))
        return self.groups[-1]

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        self._group_of(weights)
        with tf.control_dependencies(self.checks(grads, variables)):
            self._rounds.hold_state(weights)
        return []

    def _after(self, weights: list[tf.Variable]) -> None:
        """End the round if it is time, and let one that has ended beside training count."""
        group = self._group_of(weights)
        steps = group.steps.assign_add(1)
        if self._beside:
            tf.cond(steps == self._beside, lambda: self._rounds.add_due(group.variables), nothing)
        tf.cond(steps >= self._updates, lambda: self._end_round(group), nothing)

    def _end_round(self, group: UpdatedVariables) -> tf.Tensor:
        group.steps.assign(0)
        if self._beside:
            return self._rounds.end_beside(group.variables)
        return self._rounds.agree(group.variables)
