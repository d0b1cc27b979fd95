"""Counts the updates of an optimizer, by the variables that it updates together, to end rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.weights.around_updates import Updates
from hvkit.frameworks.keras.weights.groups import Group

if TYPE_CHECKING:
    from hvkit.frameworks.keras.weights.rounds import RoundKeeper


class OptimizerRounds(Updates):
    """Counts the updates of one optimizer, and lets its keeper end rounds.

    The optimizer's ``apply`` keeps this object.
    """

    def __init__(
        self,
        keeper: RoundKeeper,
        number: int,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self._rounds = keeper
        per_step = optimizer.gradient_accumulation_steps or 1
        self._updates = keeper.strategy.every * per_step
        self._overlap = keeper.strategy.overlap * per_step
        super().__init__(keeper, number, optimizer, checks, before_update)

    def go_on(self, variables: list[tf.Variable], steps: int) -> None:
        """Resume in a round; in the middle of one, the ranks' weights need not be equal."""
        # No agreement here, though groups share variables: the rest is not loaded yet.
        group = super()._group_of(variables)
        group.steps = steps
        self.checks.skip_weights()

    def _group_of(self, variables: list[tf.Variable]) -> Group:
        """The group of these variables; perhaps a new one.

        A new one ends the rounds of others that it shares variables with: a script that freezes
        some layers in the middle of a round would otherwise leave them different on each rank.
        """
        if known := self._known(variables):
            return known
        ids = {id(v) for v in variables}
        with tf.init_scope():
            for group in self._groups():
                if not ids.isdisjoint(map(id, group.variables)):
                    self._rounds.end_early(group)
        self._rounds.variables.require_same_list(variables)
        return self._new_group(variables)

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        group = self._group_of(weights)
        with tf.control_dependencies(self.checks(grads, variables)):
            return [self._rounds.begin(group)]

    def _after(self, weights: list[tf.Variable]) -> None:
        """End the round if it is time, and let one that has overlapped with it count."""
        group = self._group_of(weights)
        steps = group.counted.assign_add(1)
        if self._overlap:
            tf.cond(steps == self._overlap, lambda: self._rounds.end_overlap(group), nothing)
        tf.cond(steps >= self._updates, lambda: self._end_round(group), nothing)

    def _end_round(self, group: Group) -> tf.Tensor:
        with tf.control_dependencies([group.counted.assign(0)]):
            return self._rounds.end_round(group)
