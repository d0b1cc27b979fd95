"""Ends rounds of a strategy that agrees on weights, after so many updates of an optimizer.

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

from hvkit.communication.group import Group
from hvkit.compression import Compression
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.weights.agreements import Agreements
from hvkit.frameworks.keras.weights.around_updates import Updates
from hvkit.frameworks.keras.weights.state_variables import StateVariables
from hvkit.frameworks.keras.weights.updated_variables import (
    UpdatedVariables,
    begin_once,
    in_numpy,
    in_turn,
    set_in_numpy,
)
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.strategies.strategy import Rounds
from hvkit.sync.rounds import RoundKeeper
from hvkit.watch.calls import call

# What begins the names of variables that are updated together in a checkpoint.
_UPDATED = "group-"

# Ranks compare how they end a round at least so many steps apart: with a small model that takes as
# long as the agreement.
_COMPARED_EVERY = 256


class TensorFlowRoundKeeper(RoundKeeper):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        model: a distributed one.
        name: the same on every rank, and no other keeper's.
        compression: how float32 vectors travel; None for as they are.
        with_statistics: whether each agreement averages the statistics of batch-norm layers.
        group: the ranks that agree.
    """

    def __init__(
        self,
        strategy: Rounds,
        model: keras.Model,
        name: str,
        compression: Compression | None,
        with_statistics: bool,
        group: Group,
    ) -> None:
        self.variables = Variables(model, name, with_statistics, group)
        self.updated: list[UpdatedVariables] = []
        overlap = bool(strategy.overlap)
        agreements = Agreements(self.variables, compression, overlap=overlap)
        self._kept = StateVariables(strategy, self.variables)
        super().__init__(strategy, self.variables, name, agreements, compression, self._kept)
        self._agreements: Agreements = agreements
        # Weak: the optimizers keep them. Their variables count also when they are gone.
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

    def add_updated(self, updated: UpdatedVariables) -> None:
        """Know more variables that are updated together; the same ones on every rank."""
        self.updated.append(updated)
        self._add_optimizer(updated)

    def begin(self, updated: UpdatedVariables) -> tf.Tensor:
        """Have the strategy begin with the values of variables, once."""
        return begin_once(updated, self._begin_with)

    def _begin_with(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        updated = self.updated[number]
        with self.variables.given(updated.vectors, vectors):
            for i in updated.numbers:
                self._state.begin(i)
        self._begun = True
        return [np.array(True)]

    def end_overlap(self, updated: UpdatedVariables) -> tf.Tensor:
        """Let the agreement that began with this round count; a collective."""
        if tf.executing_eagerly():
            self._end_overlap_eager(updated)
        else:
            with tf.control_dependencies(self._arrived(updated)):
                set_in_numpy(updated, self._end_overlap_in_numpy)
        return nothing()

    def _end_overlap_eager(self, updated: UpdatedVariables) -> None:
        """Let it count in a call of Python; a collective."""
        self._end_overlap(updated.number, updated.step)

    def _end_overlap_in_numpy(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        """Let it count in a function of NumPy; the graph goes on with the values returned."""
        updated = self.updated[number]
        with self.variables.given(updated.vectors, vectors) as changed:
            self._end_overlap_eager(updated)
            return changed()

    def end_round(self, updated: UpdatedVariables) -> tf.Tensor:
        """End the round of variables; a collective."""
        if tf.executing_eagerly():
            self._end_round_eager(updated)
        elif self.strategy.overlap:
            with tf.control_dependencies(self._arrived(updated)):
                set_in_numpy(updated, self._end_round_in_numpy)
        else:
            in_turn(lambda: self._end_round_as_graph_ops(updated))
            if self.strategy.same_weights:
                self.variables.average_statistics()
        return nothing()

    def _end_round_eager(self, updated: UpdatedVariables) -> None:
        """End the round as a call of Python, after the steps were counted anew; a collective."""
        self._trained.update(updated.numbers)
        self._end_round(updated.number, updated.step)

    def _end_round_in_numpy(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        """End it in a function of NumPy; the graph goes on with the values returned."""
        updated = self.updated[number]
        with self.variables.given(updated.vectors, vectors) as changed:
            self._end_round_eager(updated)
            return changed()

    def _end_round_as_graph_ops(self, updated: UpdatedVariables) -> list[tf.Tensor]:
        """End the round in operations of a graph: set variables to what the strategy makes of them.

        A collective. A function of NumPy that waits for other ranks would take one of TensorFlow's
        threads, and there may be only one.
        """
        rounds = updated.rounds_counted.assign_add(1)
        compared = tf.cond(
            self._is_compared(rounds),
            lambda: in_numpy(self._compare, updated.number, [], [tf.TensorSpec([], tf.bool)])[0],
            nothing,
        )
        agreed = [compared]
        for numbers in updated.pieces:
            with tf.control_dependencies(agreed):
                weights = self.variables.joined(numbers)
            with tf.control_dependencies([weights]):
                state = self._kept.joined(numbers)
            name = self._name_of(updated.number, numbers)
            flow = self.strategy.agree(weights, state, self._agreements.place)
            values, state = self._agreements.carry_out(flow, numbers, name, updated.wait)
            self.variables.assign_joined(numbers, values)
            self._kept.assign_joined(numbers, state)
            agreed = [values, *state.values()]
        return agreed

    def _compare(self, number: int, _: Sequence[Array]) -> list[Array]:
        """Compare how the ranks end a round in a graph; a collective."""
        updated = self.updated[number]
        self._trained.update(updated.numbers)
        summary = self._summary_of_round(number, updated.held(), sorted(updated.numbers))
        with call(updated.call, updated.step, self._name), self.variables.given([], []):
            self._require_same_round(number, summary)
        self._are_agreed(updated.numbers)
        return [np.array(True)]

    def _is_compared(self, rounds: Any) -> Any:
        every = self.strategy.every
        # Ranks that end other rounds that do not overlap wait for each other, which is noticed.
        return bool(self.strategy.overlap) or (rounds - 1) * every % _COMPARED_EVERY < every

    def _optimizer_label(self, number: int) -> str:
        updated = self.updated[number]
        of_optimizer = [u for u in self.updated if u.optimizer_number == updated.optimizer_number]
        at = of_optimizer.index(updated)
        label = f"optimizer {updated.optimizer_number}"
        return f"{label} for its variables number {at}" if at else label

    def _arrived(self, updated: UpdatedVariables) -> list[tf.Tensor]:
        """What waits in a graph for agreements on these variables that run while it trains.

        A queue takes none of TensorFlow's threads while it waits, as Python code would. There are
        as many as a rank may use cores, and the agreement needs one.
        """

        def dequeue(begun: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([begun]), tf.device("CPU:0"):
                return updated.queue.dequeue()

        def wait() -> list[tf.Tensor]:
            done = tf.TensorSpec([], tf.bool)
            (begun,) = in_numpy(self._enqueue_later, updated.number, [], [done])
            return [updated.wait.around(begun, dequeue)]

        return in_turn(wait)

    def _enqueue_later(self, number: int, _: Sequence[Array]) -> list[Array]:
        """Let one graph that waits for these variables go on, now or when it may."""
        updated = self.updated[number]
        on = [each for each in self._running if each.is_on(updated.numbers)]
        awaited: list[Any] = [agreement for each in on for agreement in each.agreements]

        def after_next() -> None:
            if awaited:
                awaited.pop().when_ended(after_next)
            else:
                updated.queue.enqueue(True)

        after_next()
        return [np.array(True)]

    def accept_set_weights(self, point: str = "fit") -> None:
        """As in ``hvkit.sync.rounds``, which does not see what trains in graphs."""
        for updated in self.updated:
            if updated.rounds > updated.rounds_seen:
                self._trained.update(updated.numbers)
                self._are_agreed(updated.numbers)
            updated.rounds_seen = updated.rounds
        for updated in self.updated:  # also weights that another optimizer has agreed on
            if updated.steps:
                self._trained.update(updated.numbers)
        super().accept_set_weights(point)

    def end_early(self, updated: UpdatedVariables) -> None:
        """End the round of variables in the middle, if it has begun; a collective."""
        if updated.steps:
            updated.steps = 0
            self._trained.update(updated.numbers)
            self._end_round(updated.number, updated.step + 1)
        self._add_pending(updated.numbers)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for updated in self.updated:
            updated.begun.assign(False)  # graphs hold it
            updated.rounds = updated.rounds_seen = 0
        super().begin_anew()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and weight, and counts."""
        place = {id(weight): i for i, weight in enumerate(self.variables.of_model())}
        arrays = self.variables.by_place(super().state())
        for updated in self.updated:
            weights = [place[id(v)] for v in updated.variables if id(v) in place]
            # The steps, and which weights the optimizer updates.
            key = f"{_UPDATED}{updated.optimizer_number}-{updated.number}"
            arrays[key] = np.array([updated.steps, *weights], np.int64)
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
        counted = {key: arrays[key] for key in sorted(arrays) if key.startswith(_UPDATED)}
        others = counted.keys() | {"optimizers"}
        self._load(self.variables.by_number({k: a for k, a in arrays.items() if k not in others}))
        if not in_round:
            self._state.set_anchors()
            return
        weights = self.variables.of_model()
        for key, array in counted.items():
            steps, *updated = array.tolist()
            optimizer = optimizers[int(key.removeprefix(_UPDATED).partition("-")[0])]
            if optimizer is not None:
                optimizer.go_on([weights[i] for i in updated], steps)
        for updated in self.updated:
            for i in updated.numbers:
                self._state.begin(i)
        self._begun = True
        if not self.strategy.same_weights:  # the ranks' weights differ also between two rounds
            self._trained.update(i for updated in self.updated for i in updated.numbers)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is pending for its weights."""
        return self.variables.by_place(super().own_state())

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        super().load_own_state(self.variables.by_number(arrays))


class OptimizerRounds(Updates):
    """Counts the updates of one optimizer, and lets its keeper end rounds.

    The optimizer's ``apply`` keeps this object.
    """

    def __init__(
        self,
        keeper: TensorFlowRoundKeeper,
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
        # No agreement here, though others share variables: the rest is not loaded yet.
        updated = super()._updated_together(variables)
        updated.steps = steps
        self.checks.skip_weights()

    def _updated_together(self, variables: list[tf.Variable]) -> UpdatedVariables:
        """What holds these variables; perhaps anew.

        A new one ends the rounds of others that it shares variables with: a script that freezes
        some layers in the middle of a round would otherwise leave them different on each rank.
        """
        if known := self._known(variables):
            return known
        ids = {id(v) for v in variables}
        with tf.init_scope():
            for updated in self._mine():
                if not ids.isdisjoint(map(id, updated.variables)):
                    self._rounds.end_early(updated)
        self._rounds.variables.require_same_list(variables)
        return self._new(variables)

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        updated = self._updated_together(weights)
        with tf.control_dependencies(self.checks(grads, variables)):
            return [self._rounds.begin(updated)]

    def _after(self, weights: list[tf.Variable]) -> None:
        """End the round if it is time, and let one that has overlapped with it count."""
        updated = self._updated_together(weights)
        with tf.control_dependencies([self.calls.assign_add(1)]):
            steps = updated.counted.assign_add(1)
        if self._overlap:
            tf.cond(steps == self._overlap, lambda: self._rounds.end_overlap(updated), nothing)
        tf.cond(steps >= self._updates, lambda: self._count_anew_and_end_round(updated), nothing)

    def _count_anew_and_end_round(self, updated: UpdatedVariables) -> tf.Tensor:
        with tf.control_dependencies([updated.counted.assign(0)]):
            return self._rounds.end_round(updated)
