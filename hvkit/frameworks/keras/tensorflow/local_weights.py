"""Local weights of a Keras model: ranks agree on them in rounds, or exchange them with a server.

``hvkit.sync.rounds`` ends rounds, after so many updates of an optimizer. In a graph the end of a
round is a branch that most steps do not take: it hands the variables' values to a thread, which
ends the round, and goes on with the values that the thread returns.

With a parameter server ranks exchange weights after each update, by
``hvkit.sync.parameter_server_client``. Inside a graph that is a NumPy function: its inputs are the
variables' values after the update, its results the values to go on with.

A ``LossScaleOptimizer`` skips an update if the gradients overflow. That update counts, too, as one
without a change: an overflow on one rank must not move the ends of its rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import threads
from hvkit.communication.exchanges import Exchange, RunningExchanges, Tensor
from hvkit.compression import Compression
from hvkit.frameworks.keras.tensorflow import ops
from hvkit.frameworks.keras.tensorflow.local_updates import UpdatedVariables, Updates, UpdatesSync
from hvkit.frameworks.keras.tensorflow.weight_vectors import Array, Variables
from hvkit.frameworks.keras.tensorflow.wire import NamedCollectives, Wire, nothing
from hvkit.runtime import Group
from hvkit.strategies.strategy import Rounds
from hvkit.sync.compression_state import CompressionState
from hvkit.sync.parameter_server_client import ServerSync
from hvkit.sync.rounds import RoundSync
from hvkit.watch.calls import waiting_for_all_ranks

# Prefix, in a checkpoint, of the names of variables that are updated together.
_UPDATED = "group-"

# Ranks compare how they end a round at least so many steps apart: with a small model that takes as
# long as the agreement.
_COMPARED_EVERY = 256


class TensorFlowRoundSync(UpdatesSync, RoundSync):
    def __init__(
        self,
        strategy: Rounds,
        weights: Variables,
        name: str,
        compression: Compression | None,
    ) -> None:
        wire = Wire("weights", weights.group)
        collectives = NamedCollectives(wire)

        def carry_out(flow: Generator[Exchange, Tensor, Any], name: str) -> Exchanges:
            def run() -> Any:
                return RunningExchanges(collectives.start, flow, name).result()

            return Exchanges(run, weights.group, overlap=bool(strategy.overlap))

        state = CompressionState(compression, ops, wire) if compression else None
        super().__init__(strategy, weights, name, carry_out, state)

    def updated_together(self, updates: Updates, variables: list[tf.Variable]) -> UpdatedVariables:
        """The object for variables that an optimizer updates together; perhaps a new one.

        A new one ends the rounds of others that it shares variables with: a script that freezes
        some layers in the middle of a round would otherwise leave them different on each rank.
        """
        if known := self._known(updates, variables):
            return known
        ids = {id(v) for v in variables}
        with tf.init_scope():
            for updated in self._of_optimizer(updates.number):
                if not ids.isdisjoint(map(id, updated.variables)):
                    self._end_early(updated)
        self.weights.require_same_list(variables)
        return self._new(updates, variables)

    def before_update(
        self, updated: UpdatedVariables, compare: Callable[[], Sequence[Any]]
    ) -> list[Any]:
        with tf.control_dependencies(compare()):
            return [updated.begin_by(self.begin)]

    def after_update(self, updates: Updates, updated: UpdatedVariables) -> None:
        """End the round after its last step; before, add the changes of an overlapped agreement."""
        with tf.control_dependencies([updates.calls.assign_add(1)]):
            steps = updated.counted.assign_add(1)

        def end_overlap() -> tf.Tensor:
            return updated.change_by(self.end_overlap, in_thread=True)

        def end_round() -> tf.Tensor:
            with tf.control_dependencies([updated.counted.assign(0)]):
                ended = updated.change_by(self.end_round, in_thread=True)
                if self.strategy.same_weights and not tf.executing_eagerly():
                    self.weights.average_statistics()  # in the graph, after its forward pass
                return ended

        if overlap := self.strategy.overlap * updates.per_step:
            tf.cond(steps == overlap, end_overlap, nothing)
        tf.cond(steps >= self.strategy.every * updates.per_step, end_round, nothing)

    def begin(self, number: int) -> None:
        for i in self.updated[number].numbers:
            self._agreements.begin(i)
        self._begun = True

    def end_overlap(self, number: int) -> None:
        self._end_overlap(number, self.updated[number].step)

    def end_round(self, number: int) -> None:
        """End the round of variables, after their steps were counted anew; a collective."""
        updated = self.updated[number]
        self._trained.update(updated.numbers)
        self._end_round(number, updated.step)

    def _is_compared(self, rounds: int) -> bool:
        every = self.strategy.every
        # Ranks that end other rounds that do not overlap wait for each other, which is noticed.
        return bool(self.strategy.overlap) or (rounds - 1) * every % _COMPARED_EVERY < every

    def _optimizer_label(self, number: int) -> str:
        updated = self.updated[number]
        at = self._of_optimizer(updated.optimizer_number).index(updated)
        label = f"optimizer {updated.optimizer_number}"
        return f"{label} for its variables number {at}" if at else label

    def accept_set_weights(self, point: str = "fit") -> None:
        """As in ``hvkit.sync.rounds``, which does not see the steps within a round."""
        for updated in self.updated:
            if updated.steps:
                self._trained.update(updated.numbers)
        super().accept_set_weights(point)

    def _end_early(self, updated: UpdatedVariables) -> None:
        """End the round of variables in the middle, if it has begun; a collective."""
        if updated.steps:
            updated.steps = 0
            self._trained.update(updated.numbers)
            self._end_round(updated.number, updated.step + 1)
        self._add_pending(updated.numbers)

    def start_over(self) -> None:
        for updated in self.updated:
            updated.begun.assign(False)  # graphs hold it
            updated.rounds = 0
        super().start_over()

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        position = {id(weight): i for i, weight in enumerate(self.weights.of_model())}
        arrays = self.weights.by_position(super().state())
        for updated in self.updated:
            weights = [position[id(v)] for v in updated.variables if id(v) in position]
            # The steps, and which weights the optimizer updates.
            key = f"{_UPDATED}{updated.optimizer_number}-{updated.number}"
            arrays[key] = np.array([updated.steps, *weights], np.int64)
        return {**arrays, "optimizers": np.array(len(self._updates))}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        self.start_over()
        optimizers = [reference() for reference in self._updates]
        if (saved := int(arrays["optimizers"])) != len(optimizers):
            raise ValueError(f"it has {saved} optimizers, here are {len(optimizers)}")
        counted = {key: arrays[key] for key in sorted(arrays) if key.startswith(_UPDATED)}
        others = counted.keys() | {"optimizers"}
        kept = {key: array for key, array in arrays.items() if key not in others}
        self._agreements.load(self.weights.by_number(kept))
        if not in_round:
            self._agreements.set_anchors()
            return
        weights = self.weights.of_model()
        for key, array in counted.items():
            steps, *updated = array.tolist()
            updates = optimizers[int(key.removeprefix(_UPDATED).partition("-")[0])]
            if updates is not None:
                variables = [weights[i] for i in updated]
                # No agreement here, though others share variables: the rest is not loaded yet.
                resumed = self._known(updates, variables) or self._new(updates, variables)
                resumed.steps = steps
                updates.checks.skip_weights()  # in a round the ranks' weights need not be equal
        for updated in self.updated:
            for i in updated.numbers:
                self._agreements.begin(i)
        self._begun = True
        if not self.strategy.same_weights:  # the ranks' weights differ also between two rounds
            self._trained.update(i for updated in self.updated for i in updated.numbers)

    def rank_state(self) -> dict[str, np.ndarray[Any, Any]]:
        return self.weights.by_position(super().rank_state())

    def load_rank_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        super().load_rank_state(self.weights.by_number(arrays))


class Exchanges:
    """The exchanges of an agreement: in a thread from now on, or when ``result`` is called."""

    def __init__(self, run: Callable[[], Any], group: Group, *, overlap: bool) -> None:
        self._group = group
        self._run = run
        self._future: Future[Any] | None = Future() if overlap else None
        if overlap:
            threads.start("hvkit-agreement", self._run_in_thread)

    def _run_in_thread(self) -> None:
        assert self._future is not None
        try:
            with tf.device("CPU:0"):
                self._future.set_result(self._run())
        except BaseException as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        with waiting_for_all_ranks(self._group.process_set):
            return self._future.result() if self._future else self._run()


# Prefix, in a checkpoint, of the counts of calls of ``apply``.
_CALLS = "calls."


class ServedModel(UpdatesSync, ServerSync):
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
