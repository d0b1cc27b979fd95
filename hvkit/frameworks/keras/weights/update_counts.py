"""Counts the updates of an optimizer, by the variables that it updates together, to end rounds."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import tensorflow as tf

from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.around_updates import Updates
from hvkit.frameworks.keras.weights.variables import STEP
from hvkit.watch.rank_errors import mark_as_shown_by

if TYPE_CHECKING:
    from hvkit.frameworks.keras.weights.rounds import RoundKeeper


class Group:
    """Variables that an optimizer updates together, and its steps since they agreed.

    For ``hvkit.sync.rounds`` it is an optimizer.

    Args:
        variables: the same ones, in the same order, on every rank.
        numbers: of the variables in the model's ``Variables``.
        optimizer: theirs, weakly.
        optimizer_number: its number.
        number: of this group in its model.

    Attributes:
        counted: the steps, for graphs.
        begun: whether the variables' state has begun, for graphs.
        rate: the optimizer's learning rate at the end of the round.
    """

    call = STEP

    def __init__(
        self,
        variables: list[tf.Variable],
        numbers: list[int],
        optimizer: ref[Any],
        optimizer_number: int,
        number: int,
    ) -> None:
        self.variables = variables
        self.numbers = numbers
        self.optimizer_number = optimizer_number
        self.number = number
        self.rate = 0.0
        self._optimizer = optimizer
        with tf.init_scope(), tf.device("CPU:0"):
            self.counted = tf.Variable(0, dtype=tf.int64, trainable=False)
            self.begun = tf.Variable(False, trainable=False)

    @functools.cached_property
    def queue(self) -> Any:
        """What graphs wait in for agreements on the variables."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.queue.FIFOQueue(10, [tf.bool], [()])

    @property
    def steps(self) -> int:
        return int(self.counted.numpy())

    @steps.setter
    def steps(self, number: int) -> None:
        self.counted.assign(number)

    @property
    def taken(self) -> int:
        optimizer = self._optimizer()
        return 0 if optimizer is None else calls_of_apply(optimizer)

    def held(self) -> set[int]:
        return set(self.numbers)

    def trained(self) -> set[int]:
        return set(self.numbers)

    def checksum_of_rates(self) -> int:
        return zlib.crc32(repr(self.rate).encode())

    def refuse_differences(self, call: str) -> None:
        everyone = collectives.gather(call, self.rate)
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                error = RanksDisagreeError(
                    f"the learning rate of an optimizer is {everyone[0]!r} on rank 0 but "
                    f"{theirs!r} on rank {rank}: set the same rate on every rank"
                )
                raise mark_as_shown_by(error, 0)


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
        self._number = number
        self._optimizer = ref(optimizer)
        per_step = optimizer.gradient_accumulation_steps or 1
        self._updates = keeper.strategy.every * per_step
        self._overlap = keeper.strategy.overlap * per_step
        super().__init__(keeper, optimizer, checks, before_update)

    def go_on(self, variables: list[tf.Variable], steps: int) -> None:
        """Resume in a round; in the middle of one, the ranks' weights need not be alike."""
        # No agreement here, though groups share variables: the rest is not loaded yet.
        group = self._known(variables) or self._new_group(variables)
        group.steps = steps
        self.checks.skip_weights()

    def _group_of(self, variables: list[tf.Variable]) -> Group:
        """The group of these variables.

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

    def _groups(self) -> list[Group]:
        return [group for group in self._rounds.groups if group.optimizer_number == self._number]

    def _known(self, variables: list[tf.Variable]) -> Group | None:
        ids = {id(v) for v in variables}
        return next((g for g in self._groups() if ids == {id(v) for v in g.variables}), None)

    def _new_group(self, variables: list[tf.Variable]) -> Group:
        self._rounds.variables.add(variables)
        numbers = self._rounds.variables.numbers(variables)
        number = len(self._rounds.groups)
        group = Group(variables, numbers, self._optimizer, self._number, number)
        self._rounds.add_group(group)
        return group

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        group = self._group_of(weights)
        with tf.control_dependencies(self.checks(grads, variables)):
            self._rounds.begin(group)
        return []

    def _after(self, weights: list[tf.Variable]) -> None:
        """End the round if it is time, and let one that has overlapped with it count."""
        group = self._group_of(weights)
        steps = group.counted.assign_add(1)
        if self._overlap:
            tf.cond(steps == self._overlap, lambda: self._rounds.end_overlap(group), nothing)
        tf.cond(steps >= self._updates, lambda: self._end_round(group), nothing)

    def _end_round(self, group: Group) -> tf.Tensor:
        group.counted.assign(0)
        optimizer = self._optimizer()
        assert optimizer is not None  # it updates just now
        return self._rounds.end_round(group, tf.cast(optimizer.learning_rate, tf.float64))
