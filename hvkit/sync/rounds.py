"""Counts optimizer steps and, every ``every`` steps, ends the round: the ranks agree on weights.

With ``overlap`` the agreement runs while the next round begins. It changes the weights of the end
of the round; that change is then added to the present weights, so no step in between is lost.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from hvkit.communication import collectives
from hvkit.errors import RankLostError, RanksDisagreeError
from hvkit.strategies.strategy import Flow, Rounds
from hvkit.sync.agreements import (
    Agreement,
    Agreements,
    CarryOut,
    RoundSummary,
    require_equal_steps,
    require_same_round,
    require_same_trained,
)
from hvkit.sync.compression_state import CompressionState
from hvkit.sync.local_weights import LocalWeightsSync, Weights, pieces
from hvkit.watch.calls import call


class _Round(NamedTuple):
    """A round whose agreements overlap with the next one."""

    number: int  # the optimizer's number
    summary: RoundSummary | None  # its summary; None if the ranks do not compare how they end it
    agreements: list[Agreement]  # the agreements on all its weights, each on some of them

    def concerns(self, numbers: Container[int] | None) -> bool:
        """Whether to wait for it before any of these weights changes; None for all."""
        on = [i for agreement in self.agreements for i in agreement.numbers]
        return numbers is None or not on or any(i in numbers for i in on)


class RoundSync(LocalWeightsSync):
    """Ends the rounds of the optimizers of one model."""

    strategy: Rounds

    def __init__(
        self,
        strategy: Rounds,
        weights: Weights,
        name: str,
        carry_out: CarryOut,
        compression: CompressionState | None = None,
    ) -> None:
        super().__init__(weights, name)
        self.strategy = strategy
        self.compression = compression.compression if compression else None
        self._agreements = Agreements(strategy, weights, carry_out, compression)
        # Numbers of the weights that may differ between ranks.
        self._trained: set[int] = set()
        # Numbers of the weights that the script has set on this rank between two rounds.
        self._set_by_script: set[int] = set()
        # Rounds whose agreements overlap with the present round.
        self._overlapping_rounds: list[_Round] = []
        # Each optimizer's steps when training last ended with the ranks' weights equal.
        self._ended_at: list[int] | None = None
        self._begun = False

    def add(self, weights: Iterable[Any]) -> None:
        known = len(self.weights)
        super().add(weights)
        for i in range(known, len(self.weights)) if self._begun else ():
            self._agreements.begin(i)

    def _before_step(self, number: int) -> None:
        if not self._begun:
            self._require_equal(self._optimizers[0].call)
            self._begin()
        if not self._optimizers[number].steps:
            self._note_set_weights(self._optimizers[number].updates())

    def _note_set_weights(self, numbers: Iterable[int]) -> None:
        """Begin the round with weights that the script has set; ranks compare them at its end."""
        if not (self.strategy.same_weights or self._steps_taken() == self._ended_at):
            return  # setting weights counts as training
        for i in numbers:
            if i not in self._trained and self._agreements.moved(i):
                self._agreements.set_anchor(i)
                self._set_by_script.add(i)

    def _agree_on_set_weights(self, point: str, set_by_script: Iterable[Iterable[int]]) -> None:
        """Make the weights that scripts have set between rounds the same on all; a collective.

        Their numbers, by rank, may differ; their values only by rounding. They all have an anchor,
        without which setting weights counts as training.
        """
        numbers = sorted(set().union(*set_by_script))
        anchors = {i: self._agreements.anchor(i) for i in numbers}
        note = ", set between two rounds,"
        for i, anchor in self._without_rounding(point, note, anchors, "anchor"):
            self._agreements.set_anchor(i, anchor)
            if i not in self._trained:  # the end of the round does not set it
                self.weights.write(i, anchor)
        self._set_by_script.difference_update(numbers)

    def _begin(self) -> None:
        self._begun = True
        for i in range(len(self.weights)):
            self._agreements.begin(i)

    def _require_equal(self, point: str) -> None:
        """Raise on every rank unless all hold the same weights; a collective."""
        with call(point, 1, self._name):
            self.weights.require_equal()

    def start_over(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        self.wait_for_agreements()
        self._agreements.clear()
        self._trained.clear()
        self._set_by_script.clear()
        for optimizer in self._optimizers:
            optimizer.steps = 0
        self._ended_at = None
        self._begun = False

    def _end_step(self, number: int) -> None:
        optimizer = self._optimizers[number]
        self._trained.update(optimizer.trained())
        optimizer.steps += 1
        if optimizer.steps == self.strategy.overlap:
            self._end_overlap(number, optimizer.taken)
        if optimizer.steps >= self.strategy.every:
            self._end_round(number, optimizer.taken)
            optimizer.steps = 0

    def _end_overlap(self, number: int, step: int) -> None:
        """Add the changes of the agreement that has run since this round began; a collective."""
        optimizer = self._optimizers[number]
        with call(optimizer.call, step, f"{self._name}.{number}"):
            self._add_pending(optimizer.updates())

    def _end_round(self, number: int, step: int) -> None:
        """End a round of one optimizer; a collective. The arguments are as for ``_end_overlap``."""
        optimizer = self._optimizers[number]
        optimizer.rounds += 1
        with call(optimizer.call, step, f"{self._name}.{number}"):
            updated = optimizer.updates()
            changed = sorted(updated & self._trained)
            self._add_pending(changed)  # of rounds of other optimizers, too
            summary = None
            if self._is_compared(optimizer.rounds):
                label, rounds = self._optimizer_label(number), optimizer.rounds
                # The rates of this optimizer only: some ranks may have freed the others already.
                rates = optimizer.checksum_of_rates()
                chosen = sorted(updated & self._set_by_script)
                summary = RoundSummary(self._name, label, rounds, changed, rates, chosen)
            if self.strategy.overlap:
                begun = [self._start(number, each) for each in pieces(self.weights, changed)]
                self._overlapping_rounds.append(_Round(number, summary, begun))
                _overlapping()[self] = None
            else:
                self._require_same_round(number, summary)
                self._agree(number, changed)
            if self.strategy.same_weights:  # if not, statistics stay local, as the weights do
                self._average_statistics(keep=True)
                self._trained.difference_update(changed)

    def _is_compared(self, rounds: int) -> bool:
        """Whether the ranks compare how they end this round of an optimizer."""
        return True

    def _optimizer_label(self, number: int) -> str:
        return f"optimizer {number}"

    def _require_same_round(self, number: int, summary: RoundSummary | None) -> None:
        """Raise on every rank unless all end the same round in the same way; a collective."""
        if summary is None:
            return
        summaries = require_same_round(summary, self._optimizers[number], self.weights)
        set_by_script = [each.set_by_script for each in summaries]
        self._agree_on_set_weights(self.weights.step_call, set_by_script)

    def _agree(self, number: int, weights: Sequence[int], *, ends_training: bool = False) -> None:
        """End the round of some weights of an optimizer; a collective."""
        for together in pieces(self.weights, weights):
            if ends_training and not self.strategy.same_weights:
                agreement = self._start(number, together, self.strategy.settle)
                self._agreements.write(together, agreement.exchanges.result())
                self._agreements.commit(together)
                for i in together:
                    self._agreements.set_anchor(i)
            else:
                agreed = self._agreements.finish(self._start(number, together))
                self._agreements.write(together, agreed)

    def wait_for_agreements(self, numbers: Container[int] | None = None) -> None:
        """Wait for agreements that overlap, on any of these weights or all; a collective."""
        for each in list(self._overlapping_rounds):
            if each.concerns(numbers):
                self._overlapping_rounds.remove(each)
                self._require_same_round(each.number, each.summary)
                for agreement in each.agreements:
                    change = self._agreements.finish(agreement) - agreement.values
                    parts = self._agreements.split(agreement.numbers, change)
                    self._agreements.pending.update(parts)

    def _add_pending(self, numbers: Collection[int]) -> None:
        """Wait for the agreements on some weights, and add their changes."""
        self.wait_for_agreements(numbers)
        self._agreements.add_pending(numbers)

    def _show_agreed(self) -> None:
        self.wait_for_agreements()
        # Also weights of optimizers that the script has freed.
        for together in pieces(self.weights, sorted(self._trained)):
            agreed = self._start("shown", together, self.strategy.settle).exchanges.result()
            for i, values in self._agreements.split(together, agreed):
                self.weights.show(i, values)
        self._agreements.discard()
        self._average_statistics(keep=False)

    def _replaced(self, i: int, local: Any, agreed: Any, chosen: Any) -> Any:
        self._agreements.pending.pop(i, None)
        if i in self._agreements.state:
            self._agreements.set_anchor(i)
        return chosen

    def end_rounds(self) -> None:
        """End the rounds that have begun, so that all ranks hold the same weights; a collective."""
        self._compare_ranks()
        for number, optimizer in enumerate(self._optimizers):
            updated = optimizer.updates()
            self._add_pending(updated)
            if optimizer.steps or not self.strategy.same_weights:
                self._agree(number, sorted(updated & self._trained), ends_training=True)
                self._trained.difference_update(updated)
            optimizer.steps = 0
        self._average_statistics(keep=True)
        self._ended_at = self._steps_taken()

    def _steps_taken(self) -> list[int]:
        return [optimizer.taken for optimizer in self._optimizers]

    def _start(
        self, of: int | str, numbers: list[int], flow: Callable[..., Flow[Any]] | None = None
    ) -> Agreement:
        """Start an agreement, of an optimizer's weights by its number, or of another word.

        That is part of the names of collectives: ranks whose optimizers take turns differently must
        not meet in one.
        """
        return self._agreements.start(numbers, f"{self._name}.{of}.weights.{numbers[0]}", flow)

    def _compare_ranks(self) -> bool:
        steps = [optimizer.steps for optimizer in self._optimizers]
        require_equal_steps(steps, self.weights.group)
        self.accept_set_weights("hvkit.settled")
        if not self._begun:  # the script may have changed weights without an optimizer
            try:
                self._require_equal("hvkit.settled")
            except RanksDisagreeError as error:
                error.add_note(
                    "No optimizer that was passed to hvkit.distribute has taken a step, so the "
                    "ranks have not agreed on anything: train through it."
                )
                raise
        return any(steps) or not self.strategy.same_weights

    def accept_set_weights(self, point: str = "fit") -> None:
        """Begin with weights that the script has set since the last agreement; a collective."""
        self._note_set_weights(self._agreements.state)
        numbers = sorted(self._trained), sorted(self._set_by_script)
        by_rank = collectives.gather(point, numbers, self.weights.group)
        trained, set_by_script = zip(*by_rank, strict=True)
        require_same_trained(trained, self.weights)
        self._agree_on_set_weights(point, set_by_script)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        counts = np.array(
            [[o.steps for o in self._optimizers], [o.rounds for o in self._optimizers]], np.int64
        )
        trained = np.array(sorted(self._trained), np.int64)
        return {**self._agreements.arrays(), "counts": counts, "trained": trained}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        self.start_over()
        steps, rounds = arrays["counts"].tolist()
        if len(steps) != len(self._optimizers):
            raise ValueError(f"it has {len(steps)} optimizers, here are {len(self._optimizers)}")
        counted = ("counts", "trained")
        self._agreements.load({key: a for key, a in arrays.items() if key not in counted})
        for optimizer, number in zip(self._optimizers, rounds, strict=True):
            optimizer.rounds = number
        if in_round:
            for optimizer, number in zip(self._optimizers, steps, strict=True):
                optimizer.steps = number
            self._trained = set(arrays["trained"].tolist())
            self._begin()  # each rank has its local weights again
        else:
            self._agreements.set_anchors()

    def rank_state(self) -> dict[str, np.ndarray[Any, Any]]:
        return self._agreements.rank_arrays()

    def load_rank_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        self._agreements.load_rank(arrays)


@functools.cache
def _overlapping() -> WeakKeyDictionary[RoundSync, None]:
    """Those with overlapped agreements, in the order in which they began, the same on all ranks.

    Horovod ends on all ranks with the first script, so each waits for its agreements before.
    """
    syncs: WeakKeyDictionary[RoundSync, None] = WeakKeyDictionary()

    def wait_for_all() -> None:
        if getattr(sys, "last_value", None) is None:  # this rank has not failed
            with suppress(RankLostError), call("the end of the script"):
                for sync in list(syncs):
                    sync.wait_for_agreements()

    # Registered after Horovod's own function and the watcher's, so it runs before them.
    atexit.register(wait_for_all)
    return syncs
