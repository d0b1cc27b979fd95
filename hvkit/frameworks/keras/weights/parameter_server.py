"""Exchanges the weights of a Keras model with a parameter server, after each update.

Inside a graph the exchange is a NumPy function: its inputs are the variables' values after the
update, its results the values to go on with. ``hvkit.parameter_server.worker`` does the rest. An
update that a ``LossScaleOptimizer`` skips counts as one without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import keras
import numpy as np
import tensorflow as tf

from hvkit.communication.group import all_ranks
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.graph_collectives import nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.around_updates import Updates
from hvkit.frameworks.keras.weights.updated_variables import (
    UpdatedVariables,
    begin_once,
    set_in_numpy,
)
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.parameter_server import worker
from hvkit.strategies.parameter_server import ParameterServer

# What begins the names of the calls of ``apply`` in a checkpoint.
_CALLS = "calls."


class ServedModel(worker.ServedModel):
    """Exchanges the weights of one model with the server. Making it is a collective.

    Args:
        strategy: how far ranks may be ahead.
        model: a distributed one.
        name: the same on every rank, and no other model's.
        with_statistics: whether to average the statistics of batch-norm layers where
            ``hvkit.settled`` shows the model, and at the end of ``fit``.
    """

    def __init__(
        self, strategy: ParameterServer, model: keras.Model, name: str, with_statistics: bool
    ) -> None:
        self.variables = Variables(model, name, with_statistics, all_ranks())
        super().__init__(strategy, self.variables, name)
        self.updated: list[UpdatedVariables] = []
        # Weak: the optimizers keep them.
        self._updates: list[ref[_ServedUpdates]] = []

    def watch_updates(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """Exchange weights after each update of an optimizer.

        Args:
            optimizer: one that updates variables, not one that scales the loss.
            checks: what the ranks compare before their first update.
            before_update: called with the variables at the start of each update.
        """
        updates = _ServedUpdates(self, len(self._updates), optimizer, checks, before_update)
        self._updates.append(ref(updates))

    def add_updated(self, updated: UpdatedVariables) -> None:
        """Know more variables that are updated together; the same ones on every rank."""
        self.updated.append(updated)
        self._add_optimizer(updated)

    def serve(self, updated: UpdatedVariables) -> tf.Tensor:
        """Have the server hold variables; a collective if it lacks any."""
        return begin_once(updated, self._begin_with)

    def _begin_with(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        updated = self.updated[number]
        with self.variables.given(updated.vectors, vectors):
            self._serve(number, updated.numbers)  # others may have no values yet
        return [np.array(True)]

    def _require_same(self, new: list[int]) -> None:
        # The values are compared before the update, like those of any other strategy.
        self.variables.require_same_list([self.variables.in_order[i] for i in new])

    def exchange(self, updated: UpdatedVariables) -> tf.Tensor:
        """Send what an update has changed, and go on from the server's weights."""
        set_in_numpy(updated, self._stepped)
        return nothing()

    def _stepped(self, number: int, vectors: Sequence[Array]) -> list[Array]:
        self.refuse_step()
        self._steps_ended += 1
        with self.variables.given(self.updated[number].vectors, vectors) as changed:
            self._end_step(number)
            return changed()

    def accept_set_weights(self) -> None:
        """Nothing to do: what the script has changed travels with the next step."""

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all."""
        super().begin_anew()
        for updated in self.updated:  # graphs hold them
            updated.begun.assign(False)
        for updates in self._living():
            updates.count_from_optimizer()

    def _living(self) -> list[_ServedUpdates]:
        return [updates for reference in self._updates if (updates := reference()) is not None]

    def state(self) -> dict[str, Array]:
        """What a checkpoint saves: the server's weights, as shown now, the same on every rank."""
        return self.variables.by_place(super().state())

    def load_state(self, arrays: dict[str, Array], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank will hold its own weights again. If not, the server begins
                with the weights that all hold now.
        """
        super().load_state(self.variables.by_number(arrays), in_round=in_round)
        for updates in self._living() if in_round and arrays else ():
            updates.checks.skip_weights()  # the ranks' weights need not be equal

    def own_state(self) -> dict[str, Array]:
        """What a checkpoint saves for each rank besides the model: its calls of ``apply``."""
        living = enumerate(self._living())
        return {f"{_CALLS}{number}": updates.calls.numpy() for number, updates in living}

    def load_own_state(self, arrays: dict[str, Array]) -> None:
        """Set what ``own_state`` returned on this rank."""
        living = self._living()
        for key, array in arrays.items():
            living[int(key.removeprefix(_CALLS))].calls.assign(array)


class _ServedUpdates(Updates):
    """Lets a model exchange its weights after the updates of one optimizer."""

    def __init__(
        self,
        served: ServedModel,
        number: int,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        super().__init__(served, number, optimizer, checks, before_update)
        self._served = served
        self._per_step = optimizer.gradient_accumulation_steps or 1
        self.count_from_optimizer()

    def count_from_optimizer(self) -> None:
        """Go on where the optimizer is, between two steps or while it accumulates gradients."""
        if (optimizer := self._optimizer()) is not None:
            self.calls.assign(calls_of_apply(optimizer))

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        updated = self._updated_together(weights)
        with tf.control_dependencies([self._served.serve(updated)]):
            return list(self.checks(grads, variables))

    def _after(self, weights: list[tf.Variable]) -> None:
        """Exchange the weights once in ``gradient_accumulation_steps``."""
        updated = self._updated_together(weights)
        step_ends = self.calls.assign_add(1) % self._per_step == 0
        tf.cond(step_ends, lambda: self._served.exchange(updated), nothing)
