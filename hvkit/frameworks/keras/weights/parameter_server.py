"""Exchanges the weights of a Keras model with a parameter server, after each update.

Inside a graph the exchange is a NumPy function: its inputs are the variables' values after the
update, its results the values to go on with. ``hvkit.sync.parameter_server_client`` does the
rest. An update that a ``LossScaleOptimizer`` skips counts as one without a change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkit.frameworks.keras.collectives.wire import nothing
from hvkit.frameworks.keras.weights.around_updates import Updates, UpdatesKeeper
from hvkit.frameworks.keras.weights.updated_variables import UpdatedVariables
from hvkit.frameworks.keras.weights.variables import Array
from hvkit.sync.parameter_server_client import ServerKeeper

# Prefix, in a checkpoint, of the counts of calls of ``apply``.
_CALLS = "calls."


class ServedModel(UpdatesKeeper, ServerKeeper):
    """Exchanges the weights of one model with the server. Making it is a collective."""

    def count_updates(self, updates: Updates) -> int:
        updates.count_from_optimizer()
        return super().count_updates(updates)

    def before_update(
        self, updated: UpdatedVariables, compare: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        with tf.control_dependencies([updated.begin_by(self.serve)]):
            return list(compare())

    def after_update(self, updates: Updates, updated: UpdatedVariables) -> None:
        """Exchange the weights once in ``gradient_accumulation_steps``."""
        step_ends = updates.calls.assign_add(1) % updates.per_step == 0
        tf.cond(step_ends, lambda: updated.change_by(self.exchange, in_thread=False), nothing)

    def serve(self, number: int) -> None:
        """Have the server hold variables; a collective if it lacks any."""
        self._serve(number, self.updated[number].numbers)  # others may have no values yet

    def exchange(self, number: int) -> None:
        self.refuse_step()
        self._steps_ended += 1
        self._end_step(number)

    def _require_same(self, new: list[int]) -> None:
        # The values are compared before the update, like those of any other strategy.
        self.weights.require_same_list([self.weights.in_order[i] for i in new])

    def start_over(self) -> None:
        super().start_over()
        for updated in self.updated:  # graphs hold them
            updated.begun.assign(False)
        for updates in self._living():
            updates.count_from_optimizer()

    def _living(self) -> list[Updates]:
        return [updates for reference in self._updates if (updates := reference()) is not None]

    def state(self) -> dict[str, Array]:
        return self.weights.by_position(super().state())

    def load_state(self, arrays: dict[str, Array], *, in_round: bool) -> None:
        super().load_state(self.weights.by_number(arrays), in_round=in_round)
        for updates in self._living() if in_round and arrays else ():
            updates.checks.skip_weights()  # the ranks' weights need not be equal

    def rank_state(self) -> dict[str, Array]:
        living = enumerate(self._living())
        return {f"{_CALLS}{number}": updates.calls.numpy() for number, updates in living}

    def load_rank_state(self, arrays: dict[str, Array]) -> None:
        living = self._living()
        for key, array in arrays.items():
            living[int(key.removeprefix(_CALLS))].calls.assign(array)
