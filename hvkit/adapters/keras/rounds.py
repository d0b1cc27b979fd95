"""Ends rounds of a strategy that agrees on weights: after so many updates of an optimizer.

The strategy sees all variables of one dtype as one vector. Its state is kept by variable, because
several optimizers may update the same one, in turn. In a graph the agreement is a branch that most
steps do not take.

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

from hvkit.adapters.agreed_view import AgreedInRounds
from hvkit.adapters.gradient_chunks import chunks
from hvkit.adapters.keras.batch_norm import average_statistics
from hvkit.adapters.keras.checks import Checks
from hvkit.adapters.keras.graph_collectives import CompressedMeans, GraphWait, widened
from hvkit.adapters.keras.initial_state import tf_variable
from hvkit.adapters.keras.refusals import refuse_xla, remember_updated
from hvkit.adapters.keras.updates import Updates
from hvkit.adapters.keras.wire import Wire
from hvkit.compression import Compression
from hvkit.exchanges import Messages, by_rank, circle
from hvkit.strategies.strategy import Rounds

# What begins names in a checkpoint: of what the compression keeps, and of groups of variables.
_SENT = "sent-"
_GROUP = "group-"


class RoundKeeper(AgreedInRounds):
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
        super().__init__(strategy)
        self.compression = compression
        self.alone = True
        # Weak: hvkit keeps this object as long as the model.
        self._model = ref(model)
        self._wait = GraphWait(f"{name}.weights")
        self._wire = Wire("weights")
        self._compressed = CompressedMeans(compression, self._wire) if compression else None
        self._statistics = GraphWait(f"{name}.statistics") if with_statistics else None
        # By the id of a weight: the variables with its state, and whether they have values.
        self._state: dict[int, dict[str, tf.Variable]] = {}
        self._begun: dict[int, tf.Variable] = {}
        self._all_begun: dict[frozenset[int], tf.Variable] = {}
        # Numbers for the names of collectives, by the id of their first weight.
        self._names: dict[int, int] = {}
        # Weak: the optimizers keep them. Their groups count also when they are gone.
        self._optimizers: list[ref[_OptimizerRounds]] = []
        self._groups: list[list[_Group]] = []

    def steps_in_round(self) -> list[int]:
        """Steps since the last agreement, for each optimizer and the variables it updates."""
        return [each.steps_done for groups in self._groups for each in groups]

    def watch(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """End a round after every so many updates of this optimizer.

        Args:
            optimizer: one that updates variables, not one that scales the loss.
            checks: what the ranks compare before their first update.
            before_update: called with the variables at the start of each update.
        """
        rounds = _OptimizerRounds(self, optimizer, checks, before_update)
        self._optimizers.append(ref(rounds))
        self._groups.append(rounds.groups)

    def hold_state(self, variables: Sequence[Any]) -> None:
        """Make the variables for the state of some weights, and begin with their values, once."""
        new = [v for v in variables if id(v) not in self._state]
        for v in new:
            with tf.init_scope():
                zeros = tf.zeros([int(np.prod(v.shape))], _wide(v.dtype))
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
        all_begun = self._all_begun[key]
        tf.cond(all_begun, _nothing, lambda: self._begin(variables, all_begun))

    def _begin(self, variables: Sequence[Any], all_begun: tf.Variable) -> tf.Tensor:
        for v in variables:
            known = self._begun[id(v)]
            for name, value in self.strategy.begin(_flat(v)).items():
                held = self._state[id(v)][name]
                held.assign(tf.where(known, held, value))
            known.assign(True)
        all_begun.assign(True)
        return tf.constant(True)

    def agree(self, variables: Sequence[tf.Variable], *, keep: bool = True) -> tf.Tensor:
        """Set variables to the weights that the strategy returns; a collective.

        Some at a time, which bounds the memory for copies.

        Args:
            variables: with their state.
            keep: whether the round ends, so that the strategy's state changes.
        """
        for kind in _of_one_kind(variables):
            for run in chunks([int(np.prod(v.shape)) * v.dtype.size for v in kind]):
                self._agree_on([kind[at] for at in run], keep=keep)
        if self._statistics and (model := self._model()) is not None:
            average_statistics(model, self._statistics)
        return tf.constant(True)

    def _agree_on(self, together: list[tf.Variable], *, keep: bool) -> None:
        sizes = [int(np.prod(v.shape)) for v in together]
        states = [self._state[id(v)] for v in together]
        number = self._names.setdefault(id(together[0]), len(self._names))
        name = f"{self._wait.key}.{number}"
        comm = _Comm(self._wait, self._wire, together, self._compressed, name, keep)
        weights = tf.concat([_flat(v) for v in together], axis=0)
        state = {n: tf.concat([each[n] for each in states], axis=0) for n in states[0]}
        if keep:
            weights, state = self.strategy.agree(weights, state, comm)
        else:
            weights = self.strategy.settle(weights, state, comm)
        for v, piece in zip(together, tf.split(weights, sizes), strict=True):
            v.assign(tf.cast(tf.reshape(piece, v.shape), v.dtype))
        for n in state if keep else ():
            for each, piece in zip(states, tf.split(state[n], sizes), strict=True):
                each[n].assign(piece)

    def _show_agreed(self) -> None:
        for groups in self._groups:
            for each in groups:
                if each.steps_done or not self.strategy.alike:
                    self.agree(each.variables, keep=False)

    def _values(self) -> list[tuple[Any, Any]]:
        return [(weight, weight.numpy()) for weight in self._weights()]

    def _set_values(self, values: list[tuple[Any, Any]]) -> None:
        for weight, value in values:
            weight.assign(value)

    def end_rounds(self) -> None:
        """End the rounds that have begun, as at the end of training; a collective.

        All ranks then hold the same weights.
        """
        for groups in self._groups:
            for each in groups:
                if each.steps_done:
                    self.agree(each.variables)
                    each.steps_done = 0
                if not self.strategy.alike:
                    self.agree(each.variables, keep=False)

    def rebase(self) -> None:
        """Take over weights that the script has set since the last agreement, on all ranks.

        Does nothing in the middle of a round.
        """
        if any(self.steps_in_round()):
            return
        for weight in self._weights():
            begun = self._begun.get(id(weight))
            if begun is not None and begun.numpy():
                self._rebase(weight)

    def _rebase(self, weight: tf.Variable) -> None:
        held = self._state[id(weight)]
        state = {name: variable.value() for name, variable in held.items()}
        for name, value in self.strategy.rebase(_flat(weight), state).items():
            held[name].assign(value)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for begun in [*self._begun.values(), *self._all_begun.values()]:
            begun.assign(False)
        if self._compressed:
            self._compressed.begin_anew()
        for groups in self._groups:
            for each in groups:  # graphs hold them
                each.steps_done = 0

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and weight, and counts."""
        arrays = {
            f"{name}.{i}": np.array(variable.numpy())
            for i, weight in enumerate(self._weights())
            if self._begun.get(id(weight)) is not None and self._begun[id(weight)].numpy()
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
            optimizer = optimizers[int(key.removeprefix(_GROUP).partition("-")[0])]
            if optimizer is not None:
                optimizer.go_on([weights[i] for i in updated], steps)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals."""
        if not self._compressed:
            return {}
        return self._compressed.arrays(self._compressed.compression.own, self._weights())

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        if self._compressed:
            self._compressed.load(arrays, self._weights())

    def _weights(self) -> list[tf.Variable]:
        model = self._model()
        return [] if model is None else [tf_variable(w) for w in model.weights]


class _Group:
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


class _OptimizerRounds(Updates):
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
        self._keeper = keeper
        self._checks = checks
        self._before_update = before_update
        self._updates = keeper.strategy.every * (optimizer.gradient_accumulation_steps or 1)
        self._updating = False
        self.groups: list[_Group] = []
        super().__init__(optimizer)

    def go_on(self, variables: list[tf.Variable], steps: int) -> None:
        """Resume in a round; in the middle of one, the ranks' weights need not be alike."""
        self._group_of(variables).steps_done = steps
        self._checks.skip_weights()

    def _group_of(self, variables: list[tf.Variable]) -> _Group:
        """The group of these variables.

        A new one ends the rounds of others that it shares variables with: a script that freezes
        some layers in the middle of a round would otherwise leave them different on each rank.
        """
        ids = {id(v) for v in variables}
        for group in self.groups:
            if ids == {id(v) for v in group.variables}:
                return group
        with tf.init_scope():
            for group in self.groups:
                if group.steps_done and not ids.isdisjoint(map(id, group.variables)):
                    self._keeper.agree(group.variables)
                    group.steps_done = 0
        self.groups.append(_Group(variables))
        return self.groups[-1]

    def around(self, update: Callable[[], None], grads: Sequence[Any], variables: Any) -> None:
        """Update, and end the round if it is time."""
        if self._updating or not grads or variables is None:
            update()
            return
        refuse_xla("optimizer.apply")
        self._keeper.refuse_step()
        remember_updated(variables)
        self._before_update(variables)
        weights = [tf_variable(v) for v in variables]
        with tf.control_dependencies(self._checks(grads, variables)):
            self._keeper.hold_state(weights)
        group = self._group_of(weights)
        self._updating = True
        try:
            update()
        finally:
            self._updating = False
        steps = group.steps.assign_add(1)
        tf.cond(steps >= self._updates, lambda: self._end_round(group), _nothing)

    def _end_round(self, group: _Group) -> tf.Tensor:
        group.steps.assign(0)
        return self._keeper.agree(group.variables)


class _Comm:
    """The ranks, as a strategy sees them.

    Args:
        wait: counts the waits in graphs.
        wire: counts the bytes.
        variables: of the vectors, all of one dtype.
        compressed: for float32 vectors, if they travel compressed.
        name: the same on every rank, and no other collective's.
        keep: whether the round ends, so that what the compression keeps changes.
    """

    def __init__(
        self,
        wait: GraphWait,
        wire: Wire,
        variables: Sequence[tf.Variable],
        compressed: CompressedMeans | None,
        name: str,
        keep: bool,
    ) -> None:
        self._wait = wait
        self._wire = wire
        self._variables = variables
        self._compressed = compressed
        self._name = name
        self._keep = keep
        self.rank, self.size = wire.rank, wire.size

    def mean(self, vector: tf.Tensor) -> tf.Tensor:
        return self._wait.around(vector, self._mean)

    def _mean(self, vector: tf.Tensor) -> tf.Tensor:
        if self._compressed and self._compressed.suits(vector.dtype):
            return self._compressed.mean(vector, self._variables, self._name, keep=self._keep)
        return self._wire.mean(vector, self._name)

    def exchange(self, vector: tf.Tensor, offsets: Sequence[int]) -> list[tf.Tensor]:
        to, sources = circle(offsets, self)
        length = vector.shape[0]
        messages = Messages(
            tf.tile(vector, [len(to)]),
            by_rank(length, to, self.size),
            by_rank(length, sources, self.size),
        )
        received = self._wait.around(
            messages.rows, lambda _: self._wire.exchange(messages, f"{self._name}.exchange")
        )
        of = dict(zip(sorted(sources), tf.split(received, len(sources)), strict=True))
        return [of[source] for source in sources]


def _of_one_kind(variables: Sequence[tf.Variable]) -> list[list[tf.Variable]]:
    kinds: dict[tf.DType, list[tf.Variable]] = {}
    for v in variables:
        kinds.setdefault(_wide(v.dtype), []).append(v)
    return list(kinds.values())


def _wide(dtype: tf.DType) -> tf.DType:
    """The dtype in which a variable's values travel."""
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _flat(variable: tf.Variable) -> tf.Tensor:
    """The values as a vector, in the dtype in which they travel."""
    return widened(tf.reshape(variable.value(), [-1]))


def _nothing() -> tf.Tensor:
    return tf.constant(True)
