"""Ends rounds of a strategy that agrees on weights, when ``update_counts`` says so.

In a graph the end of a round is a branch that most steps do not take: a NumPy function, which gets
the variables' values and returns those to go on with. ``hvkit.sync.rounds`` does the rest.

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
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.weights.agreements import Agreements
from hvkit.frameworks.keras.weights.groups import Group, begin_once, in_numpy, set_in_numpy
from hvkit.frameworks.keras.weights.update_counts import OptimizerRounds
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.strategies.strategy import Rounds
from hvkit.sync import rounds
from hvkit.sync.round_ends import RoundEnd

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
        self._wait = GraphWait(f"{name}.weights")
        overlap = bool(strategy.overlap)
        agreements = Agreements(self.variables, name, compression, overlap=overlap)
        super().__init__(strategy, self.variables, name, agreements, compression)
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

    def _begin_with(self, number: int, values: Sequence[Array]) -> list[Array]:
        numbers = self.groups[number].numbers
        with self.variables.given(numbers, values):
            for i in numbers:
                self._state.begin(i)
        self._begun = True
        return [np.array(True)]

    def end_overlap(self, group: Group) -> tf.Tensor:
        """Let the agreement that began with this round count; a collective."""
        if not self.strategy.overlap:
            return tf.constant(True)
        with tf.control_dependencies(self._arrived(group)):
            return set_in_numpy(group, self._overlap_ended)

    def _overlap_ended(self, number: int, values: Sequence[Array]) -> list[Array]:
        with self.variables.given(self.groups[number].numbers, values) as given:
            self._end_overlap(number, self._step(number))
        return list(given.values())

    def end_round(self, group: Group, rate: tf.Tensor) -> tf.Tensor:
        """End the round of a group; a collective.

        Args:
            group: of variables.
            rate: the learning rate of their optimizer, in float64.
        """
        with tf.control_dependencies(self._arrived(group)):
            set_in_numpy(group, self._round_ended, rate)
        if self.strategy.alike:
            self.variables.average_statistics()
        return tf.constant(True)

    def _round_ended(self, number: int, values: Sequence[Array]) -> list[Array]:
        group = self.groups[number]
        self._trained.update(group.numbers)
        *values, rate = values
        group.rate = float(rate)
        with self.variables.given(group.numbers, values) as given:
            self._end_round(number, self._step(number))
        return list(given.values())

    def _require_same_round(self, end: RoundEnd) -> None:
        every = self.strategy.every
        if (end.rounds - 1) * every % _COMPARED_EVERY < every:
            super()._require_same_round(end)

    def _step(self, number: int) -> int:
        return (self._rounds[number] + 1) * self.strategy.every

    def _arrived(self, group: Group) -> list[Any]:
        """What waits in a graph for agreements on these variables that run while it trains.

        A queue takes none of TensorFlow's threads while it waits, as Python code would. There are
        as many as a rank may use cores, and the agreement needs one.
        """
        if not self.strategy.overlap or tf.executing_eagerly():
            return []

        def dequeue(begun: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([begun]), tf.device("CPU:0"):
                return group.queue.dequeue()

        begun = in_numpy(self._enqueue_later, group, [], [tf.bool])[0]
        return [self._wait.around(begun, dequeue)]

    def _enqueue_later(self, number: int, _: Sequence[Array]) -> list[Array]:
        """Let one graph that waits for these variables go on, now or when it may."""
        group = self.groups[number]
        self._agreements.when_done(group.numbers, lambda: group.queue.enqueue(True))
        return [np.array(True)]

    def rebase(self, point: str = "fit") -> None:
        """As in ``hvkit.sync.rounds``, which does not see what trains in graphs."""
        for group in self.groups:
            if group.steps:
                self._trained.update(group.numbers)
        super().rebase(point)

    def end_early(self, group: Group) -> None:
        """End the round of a group in the middle, if it has begun; a collective."""
        if group.steps:
            self._trained.update(group.numbers)
            self._end_round(group.number, self._step(group.number))
            group.steps = 0
        self._add_pending(group.numbers)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for group in self.groups:  # graphs hold them
            group.begun.assign(False)
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
        self._begun = True
        if not self.strategy.alike:  # the ranks' weights differ also between two rounds
            self._trained.update(i for group in self.groups for i in group.numbers)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is pending for its weights."""
        return self.variables.by_place(super().own_state())

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        super().load_own_state(self.variables.by_number(arrays))
