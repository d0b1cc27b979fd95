"""Ends rounds of a strategy that agrees on weights: after so many updates of an optimizer.

The strategy sees all variables of one dtype as one vector. Its state is kept by variable, because
several optimizers may update the same one, in turn. In a graph the agreement is a branch that most
steps do not take.

A ``LossScaleOptimizer`` skips an update if the gradients overflow. That update counts, too: an
overflow on one rank must not move the ends of its rounds against those of the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np
import tensorflow as tf

from hvkit.adapters.gradient_chunks import chunks
from hvkit.adapters.keras.batch_norm import average_statistics
from hvkit.adapters.keras.checks import Checks
from hvkit.adapters.keras.graph_collectives import CompressedMeans, GraphWait, widened
from hvkit.adapters.keras.initial_state import tf_variable
from hvkit.adapters.keras.optimizers import inner_optimizer
from hvkit.adapters.keras.refusals import refuse_xla, remember_updated
from hvkit.adapters.keras.wire import Wire
from hvkit.compression import Compression
from hvkit.strategies.strategy import Rounds

# Begins the names of what the compression keeps, in a checkpoint.
_SENT = "sent-"

# What ends the rounds of an optimizer, not of one that scales the loss.
_kept: WeakKeyDictionary[Any, _OptimizerRounds] = WeakKeyDictionary()


class RoundKeeper:
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
        self.strategy = strategy
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
        self._optimizers: list[_OptimizerRounds] = []
        # This rank's weights, while the model holds those that the ranks would agree on.
        self._own: list[np.ndarray[Any, Any]] | None = None

    @property
    def in_round(self) -> bool:
        """Whether an optimizer has taken steps since its last agreement."""
        return any(each.steps_done for each in self._optimizers)

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
        self._optimizers.append(rounds)
        _kept[optimizer] = rounds
        _count_skipped_updates()

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
        begun = [self._begun[id(v)] for v in variables]
        tf.cond(tf.reduce_all(begun), _nothing, lambda: self._begin(variables))

    def _begin(self, variables: Sequence[Any]) -> tf.Tensor:
        for v in variables:
            known = self._begun[id(v)]
            for name, value in self.strategy.begin(_flat(v)).items():
                held = self._state[id(v)][name]
                held.assign(tf.where(known, held, value))
            known.assign(True)
        return tf.constant(True)

    def agree(self, variables: Sequence[Any], *, keep: bool = True) -> tf.Tensor:
        """Set variables to the weights that the strategy returns; a collective.

        Args:
            variables: with their state.
            keep: whether the round ends, so that the strategy's state changes.
        """
        for together in _of_one_kind(variables):
            sizes = [int(np.prod(v.shape)) for v in together]
            states = [self._state[id(v)] for v in together]
            comm = _Comm(self._wait, self._wire, together, self._compressed, keep)
            weights = tf.concat([_flat(v) for v in together], axis=0)
            state = {n: tf.concat([each[n] for each in states], axis=0) for n in states[0]}
            weights, state = self.strategy.agree(weights, state, comm)
            for v, piece in zip(together, tf.split(weights, sizes), strict=True):
                v.assign(tf.cast(tf.reshape(piece, v.shape), v.dtype))
            for name in state if keep else ():
                for each, piece in zip(states, tf.split(state[name], sizes), strict=True):
                    each[name].assign(piece)
        if self._statistics and (model := self._model()) is not None:
            average_statistics(model, self._statistics)
        return tf.constant(True)

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Hold the weights that the ranks would agree on now; put this rank's own back after it.

        A collective. Does nothing where no step has been taken since the last agreement.
        """
        if not self.in_round or self._own is not None:
            yield
            return
        self._own = self._values()
        for each in self._optimizers:
            if each.steps_done:
                self.agree(each.variables, keep=False)
        try:
            yield
        finally:
            self._set_values(self._own)
            self._own = None

    @contextmanager
    def unsettled(self) -> Iterator[None]:
        """Hold this rank's own weights for a while, inside ``settled``."""
        if self._own is None:
            yield
            return
        own, self._own, agreed = self._own, None, self._values()
        self._set_values(own)
        try:
            yield
        finally:
            self._set_values(agreed)
            self._own = own

    def _values(self) -> list[np.ndarray[Any, Any]]:
        return [weight.numpy() for weight in self._weights()]

    def _set_values(self, values: list[np.ndarray[Any, Any]]) -> None:
        for weight, value in zip(self._weights(), values, strict=True):
            weight.assign(value)

    def end_rounds(self) -> None:
        """End the rounds that have begun, as at the end of training; a collective."""
        for each in self._optimizers:
            if each.steps_done:
                self.agree(each.variables)
                each.steps_done = 0

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        for begun in self._begun.values():
            begun.assign(False)
        if self._compressed:
            self._compressed.begin_anew()
        for each in self._optimizers:
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
        steps = [each.steps_done for each in self._optimizers]
        return {**arrays, "counts": np.array(steps, np.int64)}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank will hold its own weights again. If not, a new round begins,
                with the weights that all hold now.
        """
        self.begin_anew()
        if len(arrays["counts"]) != len(self._optimizers):
            raise ValueError(
                f"it has {len(arrays['counts'])} optimizers, here are {len(self._optimizers)}"
            )
        weights = self._weights()
        sent = {k.removeprefix(_SENT): a for k, a in arrays.items() if k.startswith(_SENT)}
        if self._compressed:
            self._compressed.load(sent, weights)
        keys = [key for key in arrays if "." in key and not key.startswith(_SENT)]
        numbers = sorted({int(key.partition(".")[2]) for key in keys})
        self.hold_state([weights[i] for i in numbers])
        for i in numbers:
            for name, variable in self._state[id(weights[i])].items():
                if in_round or name != "anchor":
                    variable.assign(arrays[f"{name}.{i}"])
        for each, steps in zip(self._optimizers, arrays["counts"].tolist(), strict=True):
            each.go_on_after(steps if in_round else 0)

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


class _OptimizerRounds:
    """Counts the updates of one optimizer, and lets its keeper end rounds."""

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
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._updating = False
        self.variables: list[tf.Variable] = []
        """Those that the optimizer has updated."""
        apply = optimizer.apply

        # AutoGraph would spend seconds on translating all of hvkit and Horovod below this call.
        @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
        def apply_in_round(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is None and optimizer.built:
                variables, given = optimizer._trainable_variables, None
            else:
                variables = given = trainable_variables
            self.around(lambda: apply(grads, given), grads, variables)

        optimizer.apply = apply_in_round

    @property
    def steps_done(self) -> int:
        """Updates since the last agreement."""
        return int(self._steps.numpy())

    @steps_done.setter
    def steps_done(self, number: int) -> None:
        self._steps.assign(number)

    def go_on_after(self, steps: int) -> None:
        """Resume in a round; in the middle of one, the ranks' weights need not be alike."""
        self.steps_done = steps
        if steps:
            self._checks.skip_weights()

    def around(self, update: Callable[[], None], grads: Sequence[Any], variables: Any) -> None:
        """Update, and end the round if it is time."""
        if self._updating or not grads or variables is None:
            update()
            return
        refuse_xla("optimizer.apply")
        weights = [tf_variable(v) for v in variables]
        remember_updated(variables)
        self._before_update(variables)
        with tf.control_dependencies(self._checks(grads, variables)):
            self._keeper.hold_state(weights)
        known = {id(v) for v in self.variables}
        self.variables += [v for v in weights if id(v) not in known]
        self._updating = True
        try:
            update()
        finally:
            self._updating = False
        steps = self._steps.assign_add(1)
        tf.cond(steps >= self._updates, lambda: self._end_round(weights), _nothing)

    def _end_round(self, weights: Sequence[tf.Variable]) -> tf.Tensor:
        self._steps.assign(0)
        return self._keeper.agree(weights)


class _Comm:
    """The ranks, as a strategy sees them.

    Args:
        wait: counts the waits in graphs.
        wire: counts the bytes.
        variables: of the vectors, all of one dtype.
        compressed: for float32 vectors, if they travel compressed.
        keep: whether the round ends, so that what the compression keeps changes.
    """

    def __init__(
        self,
        wait: GraphWait,
        wire: Wire,
        variables: Sequence[tf.Variable],
        compressed: CompressedMeans | None,
        keep: bool,
    ) -> None:
        self._wait = wait
        self._wire = wire
        self._variables = variables
        self._compressed = compressed
        self._keep = keep
        self.rank, self.size = wire.rank, wire.size

    def mean(self, vector: tf.Tensor) -> tf.Tensor:
        means: list[tf.Tensor] = []
        start = 0
        sizes = [int(np.prod(v.shape)) * vector.dtype.size for v in self._variables]
        for run in chunks(sizes):
            variables = [self._variables[at] for at in run]
            stop = start + sum(sizes[at] for at in run) // vector.dtype.size
            name = f"{self._wait.key}.{vector.dtype.name}.{len(means)}"
            means.append(self._wait.around(vector[start:stop], self._way(variables, name)))
            start = stop
        return tf.concat(means, axis=0)

    def _way(self, variables: list[tf.Variable], name: str) -> Callable[[tf.Tensor], tf.Tensor]:
        def mean(piece: tf.Tensor) -> tf.Tensor:
            if self._compressed and piece.dtype == tf.float32:
                return self._compressed.mean(piece, variables, name, keep=self._keep)
            return self._wire.mean(piece, name)

        return mean


@functools.cache
def _count_skipped_updates() -> None:
    """Make each ``LossScaleOptimizer`` count the updates that it skips because of an overflow.

    This changes the class, because ``compile`` makes the instance later.
    """
    scaler = keras.optimizers.LossScaleOptimizer
    apply = scaler.apply

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def apply_in_round(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        inner = inner_optimizer(self)
        rounds = _kept.get(inner)
        if rounds is None:
            apply(self, grads, trainable_variables)
            return
        grads = list(grads)
        variables = trainable_variables
        if variables is None and inner.built:
            variables = inner._trainable_variables
        rounds.around(lambda: apply(self, grads, trainable_variables), grads, variables)

    scaler.apply = apply_in_round


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
