"""Ends rounds of a strategy that agrees on weights, when ``update_counts`` says so.

In eager code ``hvkit.sync.rounds`` ends it. In a graph the end of a round is a branch that most
steps do not take, and the strategy's arithmetic and collectives are operations in it. With
``overlap`` the branch is a function of NumPy: it gets the variables' values, lets
``hvkit.sync.rounds`` start agreements in threads or add what they have changed, and returns the
values to go on with.

A ``LossScaleOptimizer`` skips an update if the gradients overflow. That update counts, too: an
overflow on one rank must not move the ends of its rounds against those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import keras
import numpy as np
import tensorflow as tf

from hvkit.compression import Compression
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.weights.agreements import Agreements
from hvkit.frameworks.keras.weights.groups import (
    Group,
    begin_once,
    in_numpy,
    in_turn,
    set_in_numpy,
)
from hvkit.frameworks.keras.weights.state_variables import StateVariables
from hvkit.frameworks.keras.weights.update_counts import OptimizerRounds
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.strategies.strategy import Rounds
from hvkit.sync import rounds
from hvkit.watch.calls import call

# What begins the names of groups of variables in a checkpoint.
_GROUP = "group-"

# Ranks compare how they end a round at least so many steps apart: with a small model that takes as
# long as the agreement.
_COMPARED_EVERY = 256


class RoundKeeper(rounds.RoundKeeper):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        model: a distributed one.
        name: the same on every rank, and no other keeper's.
        compression: how float32 vectors travel; None for as they are.
        with_statistics: whether each agreement averages the statistics of batch-norm layers.
    """

    def __init__(
        self,
        strategy: Rounds,
        model: keras.Model,
        name: str,
        compression: Compression | None,
        with_statistics: bool,
    ) -> None:
        self.variables = Variables(model, name, with_statistics)
        self.groups: list[Group] = []
        overlap = bool(strategy.overlap)
        agreements = Agreements(self.variables, name, compression, overlap=overlap)
        self._kept = StateVariables(strategy, self.variables)
        super().__init__(strategy, self.variables, name, agreements, compression, self._kept)
        self._agreements: Agreements = agreements
        # Weak: the optimizers keep them. Their groups count also when they are gone.
        self._updated_by: list[ref[OptimizerRounds]] = []

    def watch_updates(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """End a round after every so many updates of this optimizer.

        Args:
            optimizer: one that updates variables, not one that scales the loss.
            checks: what the ranks compare before their first update.
            before_update: called with the variables at the start of each update.
        """
        number = len(self._updated_by)
        updates = OptimizerRounds(self, number, optimizer, checks, before_update)
        self._updated_by.append(ref(updates))

    def add_group(self, group: Group) -> None:
        """Know another group of variables; the same one on every rank."""
        self.groups.append(group)
        self._add_optimizer(group)

    def begin(self, group: Group) -> tf.Tensor:
        """Have the strategy begin with the values of a group's variables, once."""
        return begin_once(group, self._begin_with)

    def _begin_with(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        group = self.groups[number]
        with self.variables.given(group.kinds, vectors):
            for i in group.numbers:
                self._state.begin(i)
        self._begun = True
        return [np.array(True)]

    def end_overlap(self, group: Group) -> tf.Tensor:
        """Let the agreement that began with this round count; a collective."""
        if tf.executing_eagerly():
            self._overlap_ends(group)
        else:
            with tf.control_dependencies(self._arrived(group)):
                set_in_numpy(group, self._overlap_ends_in_graph)
        return nothing()

    def _overlap_ends(self, group: Group) -> None:
        self._end_overlap(group.number, self._step(group))

    def _overlap_ends_in_graph(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        group = self.groups[number]
        with self.variables.given(group.kinds, vectors) as changed:
            self._overlap_ends(group)
            return changed()

    def end_round(self, group: Group) -> tf.Tensor:
        """End the round of a group; a collective."""
        if tf.executing_eagerly():
            self._round_ends(group)
        elif self.strategy.overlap:
            with tf.control_dependencies(self._arrived(group)):
                set_in_numpy(group, self._round_ends_in_graph)
        else:
            in_turn(lambda: self._agreed_in_graph(group))
            if self.strategy.alike:
                self.variables.average_statistics()
        return nothing()

    def _round_ends(self, group: Group) -> None:
        """End the round of a group, whose steps it no longer counts; a collective."""
        self._trained.update(group.numbers)
        self._end_round(group.number, self._step(group) + self.strategy.every)

    def _round_ends_in_graph(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        group = self.groups[number]
        with self.variables.given(group.kinds, vectors) as changed:
            self._round_ends(group)
            return changed()

    def _agreed_in_graph(self, group: Group) -> list[tf.Tensor]:
        """Set a group's variables to what the strategy makes of them; a collective.

        All in operations of the graph. A function of NumPy that waits for other ranks would take
        one of TensorFlow's threads, and there may be only one.
        """
        rounds = group.rounds_counted.assign_add(1)
        compared = tf.cond(
            self._is_compared(rounds),
            lambda: in_numpy(self._compare, group.number, [], [tf.TensorSpec([], tf.bool)])[0],
            nothing,
        )
        agreed = [compared]
        for numbers in group.pieces:
            with tf.control_dependencies(agreed):
                weights = self.variables.joined(numbers)
            with tf.control_dependencies([weights]):
                state = self._kept.joined(numbers)
            flow = self.strategy.agree(weights, state, self._agreements.place)
            values, state = self._agreements.carry_out(flow, numbers, group.wait)
            self.variables.assign_joined(numbers, values)
            self._kept.assign_joined(numbers, state)
            agreed = [values, *state.values()]
        return agreed

    def _compare(self, number: int, _: Sequence[Array]) -> list[Array]:
        """Compare how the ranks end a round in a graph; a collective."""
        group = self.groups[number]
        end = self._end_of_round(number, group.held(), sorted(group.numbers))
        with call(group.call, self._step(group), self._name):
            self._require_same_round(number, end)
        return [np.array(True)]

    def _is_compared(self, rounds: Any) -> Any:
        every = self.strategy.every
        return (rounds - 1) * every % _COMPARED_EVERY < every

    def _optimizer_label(self, number: int) -> str:
        group = self.groups[number]
        of_optimizer = [g for g in self.groups if g.optimizer_number == group.optimizer_number]
        at = of_optimizer.index(group)
        label = f"optimizer {group.optimizer_number}"
        return f"{label} for its variables number {at}" if at else label

    def _step(self, group: Group) -> int:
        """How many steps the group's optimizer has taken since the script began, as counted."""
        every = self.strategy.every
        return sum(
            each.rounds * every + each.steps // each.calls_per_step + each.further_steps
            for each in self.groups
            if each.optimizer_number == group.optimizer_number
        )

    def _arrived(self, group: Group) -> list[tf.Tensor]:
        """What waits in a graph for agreements on these variables that run while it trains.

        A queue takes none of TensorFlow's threads while it waits, as Python code would. There are
        as many as a rank may use cores, and the agreement needs one.
        """

        def dequeue(begun: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([begun]), tf.device("CPU:0"):
                return group.queue.dequeue()

        def wait() -> list[tf.Tensor]:
            done = tf.TensorSpec([], tf.bool)
            (begun,) = in_numpy(self._enqueue_later, group.number, [], [done])
            return [group.wait.around(begun, dequeue)]

        return in_turn(wait)

    def _enqueue_later(self, number: int, _: Sequence[Array]) -> list[Array]:
        """Let one graph that waits for these variables go on, now or when it may."""
        group = self.groups[number]
        on = [each for each in self._running if each.is_on(group.numbers)]
        awaited: list[Any] = [agreement for each in on for agreement in each.agreements]

        def after_next() -> None:
            if awaited:
                awaited.pop().when_ended(after_next)
            else:
                group.queue.enqueue(True)

        after_next()
        return [np.array(True)]

    def rebase(self, point: str = "fit") -> None:
        """As in ``hvkit.sync.rounds``, which does not see what trains in graphs."""
        for group in self.groups:
            if group.steps or (not self.strategy.alike and group.rounds > group.rounds_seen):
                self._trained.update(group.numbers)
            group.rounds_seen = group.rounds
        super().rebase(point)

    def end_early(self, group: Group) -> None:
        """End the round of a group in the middle, if it has begun; a collective."""
        if group.steps:
            steps, group.steps = group.steps // group.calls_per_step, 0
            group.further_steps += steps - self.strategy.every
            self._round_ends(group)
        self._add_pending(group.numbers)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for group in self.groups:  # graphs hold them
            group.begun.assign(False)
            group.further_steps += group.steps // group.calls_per_step
        super().begin_anew()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and weight, and counts."""
        place = {id(weight): i for i, weight in enumerate(self.variables.of_model())}
        arrays = self.variables.by_place(super().state())
        for group in self.groups:
            weights = [place[id(v)] for v in group.variables if id(v) in place]
            # The steps, and which weights the optimizer updates.
            key = f"{_GROUP}{group.optimizer_number}-{group.number}"
            arrays[key] = np.array([group.steps, *weights], np.int64)
        return {**arrays, "optimizers": np.array(len(self._updated_by))}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank will hold its own weights again. If not, a new round begins,
                with the weights that all hold now.
        """
        self.begin_anew()
        optimizers = [reference() for reference in self._updated_by]
        if (saved := int(arrays["optimizers"])) != len(optimizers):
            raise ValueError(f"it has {saved} optimizers, here are {len(optimizers)}")
        groups = {key: arrays[key] for key in sorted(arrays) if key.startswith(_GROUP)}
        others = groups.keys() | {"optimizers"}
        self._load(self.variables.by_number({k: a for k, a in arrays.items() if k not in others}))
        if not in_round:
            self._state.rebase_all()
            return
        weights = self.variables.of_model()
        for key, array in groups.items():
            steps, *updated = array.tolist()
            optimizer = optimizers[int(key.removeprefix(_GROUP).partition("-")[0])]
            if optimizer is not None:
                optimizer.go_on([weights[i] for i in updated], steps)
        for group in self.groups:
            group.further_steps -= group.steps // group.calls_per_step
            for i in group.numbers:
                self._state.begin(i)
        self._begun = True
        if not self.strategy.alike:  # the ranks' weights differ also between two rounds
            self._trained.update(i for group in self.groups for i in group.numbers)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is pending for its weights."""
        return self.variables.by_place(super().own_state())

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        super().load_own_state(self.variables.by_number(arrays))
