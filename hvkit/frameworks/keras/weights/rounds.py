"""Ends rounds of a strategy that agrees on weights, when ``update_counts`` says so.

The strategy sees all variables of one dtype as one vector. Its state is kept by variable, because
several optimizers may update the same one, in turn. In a graph the agreement is a branch that most
steps do not take.

A ``LossScaleOptimizer`` skips an update if the gradients overflow. That update counts, too: an
overflow on one rank must not move the ends of its rounds against those of the others.

With ``overlap`` the agreement runs in a thread, beside the first steps of the next round. What it
then adds to the weights is how it has changed those at the end of the round, so no step in between
is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import keras
import numpy as np
import tensorflow as tf

from hvkit.communication import collectives
from hvkit.compression import Compression
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import CompressedMeans, GraphWait, nothing
from hvkit.frameworks.keras.weights.agreements import Network, RunningAgreements, States
from hvkit.frameworks.keras.weights.update_counts import OptimizerRounds, UpdatedVariables
from hvkit.frameworks.keras.weights.weight_keeper import (
    Array,
    WeightKeeper,
    flat_values,
    pieces,
    shaped,
    split,
    wide,
)
from hvkit.strategies.strategy import Rounds
from hvkit.sync.shown_weights import require_equal_steps

# What begins names in a checkpoint: of what the compression keeps, of what agreements that ran
# beside training will add to the weights, and of groups of variables.
_SENT = "sent-"
_DUE = "due-"
_GROUP = "group-"


class RoundKeeper(WeightKeeper):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        model: a distributed one.
        name: the same on every rank, and no other keeper's.
        compression: how float32 vectors travel; None for as they are.
        with_statistics: whether each agreement averages the statistics of batch-norm layers.
    """

    equal_steps = True

    def __init__(
        self,
        strategy: Rounds,
        model: keras.Model,
        name: str,
        compression: Compression | None,
        with_statistics: bool,
    ) -> None:
        super().__init__(model, name, with_statistics)
        self.strategy = strategy
        self.compression = compression
        self._wait = GraphWait(f"{name}.weights")
        self._compressed = CompressedMeans(compression, self._wire) if compression else None
        # By the id of a weight: the variables with its state, and whether they have values.
        self._state: dict[int, dict[str, tf.Variable]] = {}
        self._begun: dict[int, tf.Variable] = {}
        self._all_begun: dict[frozenset[int], tf.Variable] = {}
        # Numbers for the names of collectives, by the id of their first weight.
        self._names: dict[int, int] = {}
        # Updates that the optimizers had done when training last ended, with ranks alike.
        self._ended_at: list[int] | None = None
        self._beside = RunningAgreements(
            self._agree_beside, self._set_states, GraphWait(f"{name}.beside")
        )
        # Weak: the optimizers keep them. Their groups count also when they are gone.
        self._optimizers: list[ref[OptimizerRounds]] = []
        self._groups: list[list[UpdatedVariables]] = []

    def watch(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """End a round after every so many updates of this optimizer.

        Args:
            optimizer: one that updates variables, not one that scales the loss.
            checks: what the ranks compare before their first update.
            before_update: called with the variables at the start of each update.
        """
        rounds = OptimizerRounds(self, optimizer, checks, before_update)
        self._optimizers.append(ref(rounds))
        self._groups.append(rounds.groups)

    def hold_state(self, variables: Sequence[Any]) -> None:
        """Make the variables for the state of some weights, and begin with their values, once."""
        new = [v for v in variables if id(v) not in self._state]
        for v in new:
            with tf.init_scope():
                zeros = tf.zeros([int(np.prod(v.shape))], wide(v.dtype))
                self._state[id(v)] = {
                    name: tf.Variable(value, trainable=False)
                    for name, value in self.strategy.begin(zeros).items()
                }
                with tf.device("CPU:0"):
                    self._begun[id(v)] = tf.Variable(False, trainable=False)
        # One flag for all of them: each step reads it.
        key = frozenset(map(id, variables))
        if key not in self._all_begun:
            with tf.init_scope(), tf.device("CPU:0"):
                self._all_begun[key] = tf.Variable(False, trainable=False)
        # Numbers for the names of collectives, before threads need them in any order.
        for together in pieces(variables):
            self._key(together)
        all_begun = self._all_begun[key]
        tf.cond(all_begun, nothing, lambda: self._begin(variables, all_begun))

    def _begin(self, variables: Sequence[Any], all_begun: tf.Variable) -> tf.Tensor:
        for v in variables:
            known = self._begun[id(v)]
            for name, value in self.strategy.begin(flat_values(v)).items():
                held = self._state[id(v)][name]
                held.assign(tf.where(known, held, value))
            known.assign(True)
        all_begun.assign(True)
        return tf.constant(True)

    def agree(
        self, variables: Sequence[tf.Variable], *, settle: bool = False, keep: bool = True
    ) -> tf.Tensor:
        """Set variables to the weights that the strategy returns; a collective.

        Some at a time, which bounds the memory for copies.

        Args:
            variables: with their state.
            settle: whether to show the ranks' common weights; the strategy's state stays.
            keep: whether what the compression keeps changes.
        """
        network = Network(self._wait, self._wire, self._compressed, keep)
        for together in pieces(variables):
            weights = tf.concat([flat_values(v) for v in together], axis=0)
            weights, states = self._agreed(network, together, weights, settle)
            for v, piece in zip(together, split(weights, together), strict=True):
                v.assign(shaped(piece, v))
            self._set_states(states)
        if (
            settle or self.strategy.same_weights
        ):  # if not, they stay each rank's own, as the weights do
            self._average_statistics()
        return tf.constant(True)

    def _agreed(
        self, network: Network, together: list[tf.Variable], weights: tf.Tensor, settle: bool
    ) -> tuple[tf.Tensor, States]:
        """What the strategy returns: weights, and if the round ends the states by id."""
        held = [self._state[id(v)] for v in together]
        state = {name: tf.concat([each[name] for each in held], axis=0) for name in held[0]}
        end = self.strategy.settle if settle else self.strategy.agree
        result = network.carry_out(end(weights, state, self._wire), together, self._key(together))
        if settle:
            return result, {}
        weights, state = result
        by_name = {name: split(vector, together) for name, vector in state.items()}
        states = {
            id(v): {name: vectors[at] for name, vectors in by_name.items()}
            for at, v in enumerate(together)
        }
        return weights, states

    def _key(self, together: list[tf.Variable]) -> str:
        """A name for collectives on these variables."""
        number = self._names.setdefault(id(together[0]), len(self._names))
        return f"{self._wait.key}.{number}"

    def _agree_beside(
        self, together: list[tf.Variable], weights: tf.Tensor
    ) -> tuple[tf.Tensor, States]:
        network = Network(None, self._wire, self._compressed, keep=True)
        return self._agreed(network, together, weights, settle=False)

    def _set_states(self, states: States) -> None:
        for key, state in states.items():
            for name, vector in state.items():
                self._state[key][name].assign(vector)

    def end_beside(self, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """End a round with an agreement that runs beside training."""
        self.add_due(variables)  # of other groups, which change some of them, too
        return self._beside.begin(variables)

    def add_due(self, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Wait, and add what agreements beside training have changed to the weights."""
        return self._beside.add_due(variables) if self.strategy.overlap else tf.constant(True)

    def arrive(self) -> None:
        """Wait for agreements that run beside training; a collective."""
        self._beside.arrive()

    def _show_agreed(self) -> None:
        self.arrive()
        due = dict(self._beside.due)
        groups = [g for g in self._every_group() if g.steps_done or not self.strategy.same_weights]
        # Once each: groups share variables if the script has frozen some in between.
        variables = {id(v): v for group in groups for v in group.variables}
        try:
            self.add_due(list(variables.values()))
            self.agree(list(variables.values()), settle=True, keep=False)
        finally:
            self._beside.due = due

    def end_rounds(self) -> None:
        """End the rounds that have begun, as at the end of training; a collective.

        All ranks then hold the same weights.
        """
        for group in self._every_group():
            self.add_due(group.variables)
            if self.strategy.same_weights and group.steps_done:
                self.agree(group.variables)
            elif not self.strategy.same_weights:
                self.agree(group.variables, settle=True)
                for v in group.variables:
                    self._rebase(v)
            group.steps_done = 0
        self._ended_at = self._updates_done()

    def _updates_done(self) -> list[int]:
        optimizers = (reference() for reference in self._optimizers)
        return [each.updates_done() for each in optimizers if each is not None]

    def _every_group(self) -> list[UpdatedVariables]:
        return [each for groups in self._groups for each in groups]

    def _updated(self) -> list[tf.Variable]:
        return [v for group in self._every_group() for v in group.variables]

    def _meet(self) -> bool:
        steps = [each.steps_done for each in self._every_group()]
        require_equal_steps(steps)
        self.rebase("hvkit.settled")
        return any(steps) or not self.strategy.same_weights

    def rebase(self, point: str = "fit") -> None:
        """Begin with weights that the script has set, where no round has begun; a collective.

        Where ranks are never alike, that is only after the end of training; other changes count as
        training. Ranks may see different ends: each counts its own updates.

        Args:
            point: the name of the call that the user made.

        Raises:
            RanksDisagreeError: ranks have set other weights.
        """
        ended = self.strategy.same_weights or self._ended_at == self._updates_done()
        ready = ended and not any(each.steps_done for each in self._every_group())
        held = [v for v in self._every_variable() if self._has_begun(v)]
        given = [i for i, v in enumerate(held) if ready and self._is_set(v)]
        everyone = collectives.gather(point, (ready, given))
        if not all(theirs for theirs, _ in everyone):
            return
        variables = [held[i] for i in sorted({i for _, theirs in everyone for i in theirs})]
        self._make_same(point, variables)
        for v in variables:
            self._rebase(v)

    def _has_begun(self, weight: tf.Variable) -> bool:
        begun = self._begun.get(id(weight))
        return begun is not None and bool(begun.numpy())

    def _is_set(self, weight: tf.Variable) -> bool:
        """Whether the script has set a weight since the last agreement."""
        state = {name: variable.value() for name, variable in self._state[id(weight)].items()}
        anchor = self.strategy.anchor(state)
        return anchor is not None and not bool(tf.reduce_all(shaped(anchor, weight) == weight))

    def _replaced(self, variable: tf.Variable, own: Array, agreed: Array, chosen: Array) -> Array:
        self._beside.due.pop(id(variable), None)
        if self._has_begun(variable):
            self._rebase(variable)
        return chosen

    def _rebase(self, weight: tf.Variable) -> None:
        held = self._state[id(weight)]
        state = {name: variable.value() for name, variable in held.items()}
        for name, value in self.strategy.reset(flat_values(weight), state).items():
            held[name].assign(value)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for begun in [*self._begun.values(), *self._all_begun.values()]:
            begun.assign(False)
        self.arrive()
        self._beside.due.clear()
        self._ended_at = None
        if self._compressed:
            self._compressed.begin_anew()
        for each in self._every_group():  # graphs hold them
            each.steps_done = 0

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and weight, and counts."""
        arrays = {
            f"{name}.{i}": np.array(variable.numpy())
            for i, weight in enumerate(self._weights())
            if self._has_begun(weight)
            for name, variable in self._state[id(weight)].items()
        }
        if self._compressed:
            sent = self._compressed.arrays(self._compressed.compression.common, self._weights())
            arrays |= {f"{_SENT}{key}": array for key, array in sent.items()}
        number = {id(weight): i for i, weight in enumerate(self._weights())}
        for o, groups in enumerate(self._groups):
            for g, group in enumerate(groups):
                weights = [number[id(v)] for v in group.variables if id(v) in number]
                # The steps, and which weights the optimizer updates.
                arrays[f"{_GROUP}{o}-{g}"] = np.array([group.steps_done, *weights], np.int64)
        return {**arrays, "optimizers": np.array(len(self._optimizers))}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank will hold its own weights again. If not, a new round begins,
                with the weights that all hold now.
        """
        self.begin_anew()
        optimizers = [reference() for reference in self._optimizers]
        if (saved := int(arrays["optimizers"])) != len(optimizers):
            raise ValueError(f"it has {saved} optimizers, here are {len(optimizers)}")
        weights = self._weights()
        sent = {k.removeprefix(_SENT): a for k, a in arrays.items() if k.startswith(_SENT)}
        if self._compressed:
            self._compressed.load(sent, weights)
        keys = [key for key in arrays if "." in key and not key.startswith(_SENT)]
        numbers = sorted({int(key.partition(".")[2]) for key in keys})
        self.hold_state([weights[i] for i in numbers])
        for i in numbers:
            for name, variable in self._state[id(weights[i])].items():
                variable.assign(arrays[f"{name}.{i}"])
            if not in_round:
                self._rebase(weights[i])
        for key in sorted(key for key in arrays if in_round and key.startswith(_GROUP)):
            steps, *updated = arrays[key].tolist()
            # A strategy may keep nothing of a weight, but that its round has begun.
            self.hold_state([weights[i] for i in updated])
            optimizer = optimizers[int(key.removeprefix(_GROUP).partition("-")[0])]
            if optimizer is not None:
                optimizer.go_on([weights[i] for i in updated], steps)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is due to its weights."""
        weights = self._weights()
        number = {id(weight): i for i, weight in enumerate(weights)}
        # Like the state, without variables that an optimizer updates beside the model's.
        due = {f"{_DUE}{number[k]}": due for k, due in self._beside.due.items() if k in number}
        if self._compressed:
            due |= self._compressed.arrays(self._compressed.compression.own, weights)
        return due

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        weights = self._weights()
        due = {key: array for key, array in arrays.items() if key.startswith(_DUE)}
        self._beside.due = {id(weights[int(key.removeprefix(_DUE))]): due[key] for key in due}
        if self._compressed:
            kept = {key: array for key, array in arrays.items() if key not in due}
            self._compressed.load(kept, weights)
