"""Exchanges the weights of a Keras model with a parameter server, after each update.

Inside a graph the exchange is a NumPy function: its inputs are the variables' values after the
update, its results the values to go on with. ``hvkit.parameter_server.worker`` does the rest. An
update that a ``LossScaleOptimizer`` skips counts as one without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvkit.communication.group import all_ranks
from hvkit.frameworks.keras.checks import Checks
from hvkit.frameworks.keras.collectives.wire import nothing
from hvkit.frameworks.keras.optimizers import calls_of_apply
from hvkit.frameworks.keras.weights.around_updates import Updates, UpdatesKeeper
from hvkit.frameworks.keras.weights.variables import Array, Variables
from hvkit.parameter_server import worker
from hvkit.strategies.parameter_server import ParameterServer

# Prefix, in a checkpoint, of the counts of calls of ``apply``.
_CALLS = "calls."


class ServedModel(UpdatesKeeper, worker.ServerKeeper):
    """Exchanges the weights of one model with the server. Making it is a collective."""

    def __init__(
        self, strategy: ParameterServer, model: keras.Model, name: str, with_statistics: bool
    ) -> None:
        variables = Variables(model, name, with_statistics, all_ranks())
        UpdatesKeeper.__init__(self, variables)
        worker.ServerKeeper.__init__(self, strategy, variables, name)

    def watch_updates(
        self, optimizer: Any, checks: Checks, before_update: Callable[[Sequence[Any]], None]
    ) -> None:
        """Exchange weights after each update of an optimizer, as ``ServedUpdates`` does."""
        ServedUpdates(self, optimizer, checks, before_update)

    def serve(self, number: int) -> None:
        """Have the server hold variables; a collective if it lacks any."""
        self._serve(number, self.updated[number].numbers)  # others may have no values yet

    def exchange(self, number: int) -> None:
        """Send the changes of an update, and go on from the server's weights."""
        self.refuse_step()
        self._steps_ended += 1
        self._end_step(number)

    def _require_same(self, new: list[int]) -> None:
        # The values are compared before the update, like those of any other strategy.
        self.variables.require_same_list([self.variables.in_order[i] for i in new])

    def accept_set_weights(self) -> None:
        """Do nothing: the next step sends the script's changes."""

    def start_over(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all."""
        super().start_over()
        for updated in self.updated:  # graphs hold them
            updated.begun.assign(False)
        for updates in self._living():
            updates.count_from_optimizer()

    def _living(self) -> list[ServedUpdates]:
        return [updates for reference in self._updates if (updates := reference()) is not None]

    def state(self) -> dict[str, Array]:
        """For a checkpoint: the server's weights, as shown now, the same on every rank."""
        return self.variables.by_position(super().state())

    def load_state(self, arrays: dict[str, Array], *, in_round: bool) -> None:
        """Set what ``state`` returned."""
        super().load_state(self.variables.by_number(arrays), in_round=in_round)
        for updates in self._living() if in_round and arrays else ():
            updates.checks.skip_weights()  # the ranks' weights need not be equal

    def rank_state(self) -> dict[str, Array]:
        """For a checkpoint, of each rank: its calls of ``apply``."""
        living = enumerate(self._living())
        return {f"{_CALLS}{number}": updates.calls.numpy() for number, updates in living}

    def load_rank_state(self, arrays: dict[str, Array]) -> None:
        """Set what ``rank_state`` returned on this rank."""
        living = self._living()
        for key, array in arrays.items():
            living[int(key.removeprefix(_CALLS))].calls.assign(array)


class ServedUpdates(Updates):
    """Lets a model exchange its weights after the updates of one optimizer."""

    _keeper: ServedModel

    def __init__(
        self,
        keeper: ServedModel,
        optimizer: Any,
        checks: Checks,
        before_update: Callable[[Sequence[Any]], None],
    ) -> None:
        super().__init__(keeper, optimizer, checks, before_update)
        self.count_from_optimizer()

    def count_from_optimizer(self) -> None:
        """Go on where the optimizer is, between two steps or while it accumulates gradients."""
        if (optimizer := self.optimizer()) is not None:
            self.calls.assign(calls_of_apply(optimizer))

    def _before(
        self, grads: Sequence[Any], variables: Sequence[Any], weights: list[tf.Variable]
    ) -> list[Any]:
        updated = self._updated_together(weights)
        with tf.control_dependencies([updated.begin_by(self._keeper.serve)]):
            return list(self.checks(grads, variables))

    def _after(self, weights: list[tf.Variable]) -> None:
        """Exchange the weights once in ``gradient_accumulation_steps``."""
        keeper, updated = self._keeper, self._updated_together(weights)
        step_ends = self.calls.assign_add(1) % self.per_step == 0
        tf.cond(step_ends, lambda: updated.change_by(keeper.exchange, in_thread=False), nothing)
