"""Exchanges the weights of a Keras model with a parameter server, after each update.

Inside a graph the exchange is a NumPy function: its inputs are the variables' values after the
update, its results the values to go on with. All variables that the model's optimizers have
updated are exchanged, whichever optimizer steps. New ones join in a collective before the first
update that changes them. An update that a ``LossScaleOptimizer`` skips counts as one without a
change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import keras
import numpy as np
import tensorflow as tf

from hvkit.communication import collectives
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing, widened
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.weight_keeper import (
    STEP,
    Array,
    Updates,
    WeightKeeper,
    in_numpy,
)
from hvkit.parameter_server.client import Exchange, compare_iterations
from hvkit.strategies.parameter_server import ParameterServer
from hvkit.watch.calls import call, waiting_for_all_ranks

# What begins names in a checkpoint: of the server's weights, and of the calls of ``apply``.
_SERVED = "served."
_CALLS = "calls."


class _Served(NamedTuple):
    """A variable that the server holds.

    Attributes:
        variable: of any float dtype.
        vector: which of the server's vectors has it.
        start: where in the vector it begins.
        stop: where it ends.
    """

    variable: tf.Variable
    vector: int
    start: int
    stop: int


class ServedModel(WeightKeeper):
    """Exchanges the weights of one model with the server. Making it is a collective.

    Args:
        strategy: how far ranks may be ahead.
        model: a distributed one.
        name: the same on every rank, and no other model's.
        with_statistics: whether to average the statistics of batch-norm layers where
            ``hvkit.settled`` shows the model, and at the end of ``fit``.
    """

    compression = None
    equal_steps = False

    def __init__(
        self, strategy: ParameterServer, model: keras.Model, name: str, with_statistics: bool
    ) -> None:
        super().__init__(model, name, with_statistics)
        self.strategy = strategy
        self._exchange = Exchange(strategy)
        # Both by the id of a variable: TensorFlow never frees what a graph's functions refer to.
        self._variables: dict[int, tf.Variable] = {}
        self._served: dict[int, _Served] = {}
        # The vectors as this rank holds them since its last exchange; the mean over ranks of what
        # scripts have changed since then, as of when the ranks met last.
        self._read: list[Array] = []
        self._unsent: list[Array] = []
        # The server's weights by the id of a variable: those of a checkpoint until an update is
        # about to train them, and those that were shown last.
        self._resumed: dict[int, Array] = {}
        self._shown: dict[int, Array] = {}
        # Flags of graphs, whether the server holds all of a graph's variables.
        self._complete: list[tf.Variable] = []
        # Weak: the optimizers keep them.
        self._updates: list[ref[_ServedUpdates]] = []
        self._steps = 0

    def watch(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """Exchange weights after each update of an optimizer.

        Args:
            optimizer: one that updates variables, not one that scales the loss.
            checks: what the ranks compare before their first update.
            before_update: called with the variables at the start of each update.
        """
        updates = _ServedUpdates(self, optimizer, checks, before_update)
        self._updates.append(ref(updates))

    def flag(self) -> tf.Variable:
        """A variable for ``serve``, false until the server holds all of a graph's variables."""
        with tf.init_scope(), tf.device("CPU:0"):
            self._complete.append(tf.Variable(False, trainable=False))
        return self._complete[-1]

    def serve(self, variables: Sequence[tf.Variable], complete: tf.Variable) -> tf.Tensor:
        """Have the server hold variables; a collective if it lacks any."""
        self._variables.update((id(v), v) for v in variables)
        keys = [id(v) for v in variables]

        def begin() -> tf.Tensor:
            values = [widened(v.value()) for v in variables]
            return complete.assign(in_numpy(self._add, keys, values, [tf.bool])[0])

        return tf.cond(complete, nothing, begin)

    def _add(self, keys: Sequence[int], values: Sequence[Array]) -> list[Array]:
        new = [i for i, key in enumerate(keys) if key not in self._served]
        with call(STEP, self._steps + 1):
            if new or not self._exchange.begun:
                variables = [self._variables[keys[i]] for i in new]
                self._add_new(variables, [values[i] for i in new])
        return [np.array(True)]

    def _add_new(self, variables: Sequence[tf.Variable], values: Sequence[Array]) -> None:
        self.require_same_variables(variables)
        kinds: dict[np.dtype[Any], list[int]] = {}
        for i, value in enumerate(values):
            kinds.setdefault(value.dtype, []).append(i)
        begin: list[Array] = []
        own: list[Array] = []
        for numbers in kinds.values():
            start = 0
            for i in numbers:
                stop = start + values[i].size
                vector = len(self._read) + len(own)
                self._served[id(variables[i])] = _Served(variables[i], vector, start, stop)
                start = stop
            flat = [values[i].reshape(-1) for i in numbers]
            own.append(np.concatenate(flat))
            resumed = [
                self._resumed.get(id(variables[i]), each)
                for i, each in zip(numbers, flat, strict=True)
            ]
            begin.append(np.concatenate(resumed))
        self._exchange.add(begin)
        self._read += own
        for variable in variables:
            self._resumed.pop(id(variable), None)

    def exchange(self, variables: Sequence[tf.Variable]) -> tf.Tensor:
        """Send what an update has changed, and go on from the server's weights."""
        values = [widened(v.value()) for v in variables]
        keys, dtypes = [id(v) for v in variables], [v.dtype for v in values]
        results = in_numpy(self._step, keys, values, dtypes)
        for v, result in zip(variables, results, strict=True):
            v.assign(tf.cast(tf.reshape(result, v.shape), v.dtype))
        return tf.constant(True)

    def _step(self, keys: Sequence[int], values: Sequence[Array]) -> list[Array]:
        self.refuse_step()
        self._steps += 1
        given = dict(zip(keys, values, strict=True))
        changes = [np.empty_like(each) for each in self._read]
        for key, (variable, vector, start, stop) in self._served.items():
            value = given[key] if key in given else widened(variable.value()).numpy()
            changes[vector][start:stop] = value.reshape(-1) - self._read[vector][start:stop]
        with call(STEP, self._steps):
            weights = self._exchange.exchange(changes)
        self._go_on_from(weights)
        # Variables that this graph does not know, because they joined after it was made.
        for key, (variable, vector, start, stop) in self._served.items():
            if key not in given:
                _set(variable, weights[vector][start:stop])
        found = [self._served[key] for key in keys]
        return [
            weights[each.vector][each.start : each.stop].reshape(value.shape)
            for each, value in zip(found, values, strict=True)
        ]

    def _go_on_from(self, weights: Sequence[Array]) -> None:
        """Remember the server's vectors, as variables of 16 bits hold them: rounded."""
        self._read = [each.copy() for each in weights]
        for variable, vector, start, stop in self._served.values():
            dtype = variable.dtype.as_numpy_dtype
            if dtype != self._read[vector].dtype:
                piece = self._read[vector][start:stop]
                piece[:] = piece.astype(dtype).astype(piece.dtype)

    def _meet(self) -> bool:
        compare_iterations()
        self._unsent = [np.zeros_like(each) for each in self._read]
        for variable, vector, start, stop in self._served.values():
            value = widened(variable.value()).numpy().reshape(-1)
            self._unsent[vector][start:stop] = value - self._read[vector][start:stop]
        changed = any(each.any() for each in self._unsent)
        if any(collectives.gather("hvkit.settled", changed)):
            with waiting_for_all_ranks():
                self._unsent = [
                    self._wire.mean(tf.constant(each), f"{self._name}.unsent.{i}").numpy()
                    for i, each in enumerate(self._unsent)
                ]
        return self._exchange.begun or bool(self._resumed)

    def _show_agreed(self) -> None:
        self._shown = dict(self._resumed)
        if self._exchange.begun:
            served = zip(self._exchange.read(), self._unsent, strict=True)
            weights = [each + unsent for each, unsent in served]
            self._shown |= {k: weights[at][i:j] for k, (_, at, i, j) in self._served.items()}
        held = {id(v): v for v in self._weights()}
        held |= {key: each.variable for key, each in self._served.items()}
        for key, value in self._shown.items():
            _set(held[key], value)
        self._average_statistics()

    def put_back(self) -> None:
        """Hold this rank's own weights again."""
        super().put_back()
        self._shown = {}

    def end_rounds(self) -> None:
        """Go on from the server's weights, as at the end of training; a collective.

        All ranks then hold the same weights.
        """
        if not self._meet():
            return
        self._show_agreed()
        if self._exchange.begun:
            vectors = [each.copy() for each in self._read]
            for key, (_, vector, start, stop) in self._served.items():
                # The next step sends what the script has changed, which the server lacks.
                vectors[vector][start:stop] = self._shown[key] - self._unsent[vector][start:stop]
            self._go_on_from(vectors)
        self._shown = {}

    def rebase(self, point: str = "fit") -> None:
        """Nothing to do: what the script has changed travels with the next step."""

    def _replaced(self, variable: tf.Variable, own: Array, agreed: Array, chosen: Array) -> Array:
        if id(variable) not in self._served:
            return chosen
        # All ranks send the difference with their next step, and the server takes their mean.
        self._shown[id(variable)] = widened(variable.value()).numpy().reshape(-1)
        moved: Array = own + (chosen - agreed)
        return moved

    def _updated(self) -> list[tf.Variable]:
        return [each.variable for each in self._served.values()]

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all."""
        self._exchange.close()
        self._exchange = Exchange(self.strategy)
        self._served, self._read, self._resumed = {}, [], {}
        for each in self._complete:  # graphs hold them
            each.assign(False)
        for updates in self._living():
            updates.count_from_optimizer()

    def _living(self) -> list[_ServedUpdates]:
        return [updates for reference in self._updates if (updates := reference()) is not None]

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves: the server's weights, as shown now, the same on every rank."""
        number = {id(weight): i for i, weight in enumerate(self._weights())}
        return {f"{_SERVED}{number[k]}": v for k, v in self._shown.items() if k in number}

    def load_state(self, arrays: Mapping[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank will hold its own weights again. If not, the server begins
                with the weights that all hold now.
        """
        self.begin_anew()
        if not in_round:
            return
        weights = self._weights()
        self._resumed = {
            id(weights[int(key.removeprefix(_SERVED))]): array for key, array in arrays.items()
        }
        for updates in self._living() if self._resumed else ():
            updates.checks.skip_weights()  # the ranks' weights need not be alike

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank besides the model: its calls of ``apply``."""
        living = enumerate(self._living())
        return {f"{_CALLS}{number}": updates.calls.numpy() for number, updates in living}

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        living = self._living()
        for key, array in arrays.items():
            living[int(key.removeprefix(_CALLS))].calls.assign(array)


class _ServedUpdates(Updates):
    """Lets a model exchange its weights after the updates of one optimizer."""

    def __init__(
        self,
        served: ServedModel,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        self._served = served
        self._optimizer = ref(optimizer)
        self._per_step = optimizer.gradient_accumulation_steps or 1
        self._flags: dict[frozenset[int], tf.Variable] = {}
        with tf.init_scope(), tf.device("CPU:0"):
            self.calls = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.count_from_optimizer()
        super().__init__(served, optimizer, checks, before_update)

    def count_from_optimizer(self) -> None:
        """Go on where the optimizer is, between two steps or while it accumulates gradients."""
        if (optimizer := self._optimizer()) is not None:
            self.calls.assign(calls_of_apply(optimizer))

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        key = frozenset(map(id, weights))
        if key not in self._flags:
            self._flags[key] = self._served.flag()
        with tf.control_dependencies([self._served.serve(weights, self._flags[key])]):
            return list(self.checks(grads, variables))

    def _after(self, weights: list[tf.Variable]) -> None:
        """Exchange the weights once in ``gradient_accumulation_steps``."""
        due = self.calls.assign_add(1) % self._per_step == 0
        tf.cond(due, lambda: self._served.exchange(weights), nothing)


def _set(variable: tf.Variable, values: Array) -> None:
    variable.assign(tf.cast(tf.reshape(values, variable.shape), variable.dtype))
