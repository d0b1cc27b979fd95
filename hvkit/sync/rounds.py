"""Ends rounds of a strategy that agrees on weights: after so many steps of an optimizer.

With ``overlap`` the agreement runs while the next round begins. What it then adds to the weights is
how it has changed those at the end of the round, so no step in between is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvkit.communication import collectives
from hvkit.communication.exchanges import Mean, Neighbours, Place
from hvkit.compression import Compression
from hvkit.errors import RanksDisagreeError
from hvkit.strategies.strategy import Rounds, Vector
from hvkit.sync.local_weights import LocalWeights, SteppedOptimizer, Weights, pieces
from hvkit.sync.round_ends import RoundEnd, require_same_end, require_same_trained
from hvkit.sync.round_state import RoundState
from hvkit.sync.shown_weights import arrive_before_exit, require_equal_steps
from hvkit.watch.calls import call

# What begins the names, in a checkpoint, of what the compression keeps.
_SENT = "sent-"


class Agreement(Protocol):
    """An agreement that has begun on some weights.

    Attributes:
        numbers: of the weights.
        values: of the weights when it began.
    """

    numbers: list[int]
    values: Vector

    def result(self) -> Any:
        """Wait for the other ranks, and return what the strategy returns."""


class Agreements(Protocol):
    """Carries out what strategies need from the other ranks."""

    place: Place
    """This rank's among all ranks."""

    def start(
        self, flow: Generator[Mean | Neighbours, Any, Any], values: Vector, numbers: list[int]
    ) -> Agreement:
        """Begin an agreement; every rank must begin and wait for the same ones, in the same order.

        Args:
            flow: the strategy's generator.
            values: of some weights of one kind.
            numbers: of these.
        """

    def commit(self, numbers: Container[int]) -> None:
        """Keep what the compression has not sent of these weights; forget it of all others."""

    def clear(self) -> None:
        """Forget what the compression keeps."""

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What the compression keeps that is the same on every rank, for a checkpoint."""

    def own_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What it keeps on this rank, for a checkpoint."""

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``arrays`` or ``own_arrays`` returned."""


class _Round(NamedTuple):
    """A round whose agreements overlap with the next one.

    Attributes:
        end: how this rank ends it.
        agreements: on all its weights, some at a time.
    """

    end: RoundEnd
    agreements: list[Agreement]


class RoundKeeper(LocalWeights):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        weights: of the model.
        name: the same on every rank, and no other model's.
        agreements: carries out what the strategy needs.
        compression: how float32 vectors travel; None for as they are.
    """

    equal_steps = True

    def __init__(
        self,
        strategy: Rounds,
        weights: Weights,
        name: str,
        agreements: Agreements,
        compression: Compression | None = None,
    ) -> None:
        super().__init__(weights, name)
        self.strategy = strategy
        self.compression = compression
        self._agreements = agreements
        self._state = RoundState(strategy, weights)
        # Numbers of those that may differ between ranks.
        self._trained: set[int] = set()
        # Numbers of those that the script has set on this rank between two rounds.
        self._rebased: set[int] = set()
        # Rounds whose agreements overlap with the one that trains.
        self._running: list[_Round] = []
        # Steps that each optimizer has taken in this round, rounds that it has ended, and steps
        # since the script began, which no checkpoint holds.
        self._steps: list[int] = []
        self._rounds: list[int] = []
        self._taken: list[int] = []
        # The same, when training last ended with the ranks' weights equal.
        self._ended_at: list[int] | None = None
        self._begun = False

    def add(self, weights: Iterable[Any]) -> None:
        """Agree on more weights; the same ones on every rank, with the same values."""
        known = len(self.weights)
        super().add(weights)
        for i in range(known, len(self.weights)) if self._begun else ():
            self._state.begin(i)

    def watch(self, optimizer: SteppedOptimizer, adopt: Callable[[], bool]) -> None:
        """End a round after every so many steps of an optimizer.

        Args:
            optimizer: one that updates some of the weights.
            adopt: adds weights that are new in the optimizer.
        """
        self._steps.append(0)
        self._rounds.append(0)
        self._taken.append(0)
        super().watch(optimizer, adopt)

    def _before_step(self, number: int) -> None:
        self._begin_all()
        if not self._steps[number]:
            self._rebase(self._optimizers[number].held())

    def _rebase(self, numbers: Iterable[int]) -> None:
        """Begin the round with weights that the script has set since the last agreement.

        The ranks compare them at the next agreement: this is no collective.
        """
        if not (self.strategy.same_weights or self._taken == self._ended_at):
            return  # where they count as a change like any other
        for i in numbers:
            if i not in self._trained and self._state.moved(i):
                self._state.rebase(i)
                self._rebased.add(i)

    def _make_rebased_same(self, point: str, rebased: Iterable[Iterable[int]]) -> None:
        """Make the weights that ranks have set between rounds the same on all; a collective.

        Args:
            point: the name of the call that the user made.
            rebased: their numbers, by rank.

        Raises:
            RanksDisagreeError: they differ by more than rounding.
        """
        numbers = sorted(set().union(*rebased))
        if not numbers:
            return
        anchors = {i: anchor for i in numbers if (anchor := self._state.anchor(i)) is not None}
        if not self.weights.require_close(point, ", set between two rounds,", anchors):
            for together in pieces(self.weights, numbers):
                own = self.weights.join([anchors[i] for i in together])
                mean = self.weights.mean(own, f"{self._name}.anchor.{together[0]}")
                for i, anchor in self._state.split(together, mean):
                    self._state.rebase(i, anchor)
                    if i not in self._trained:  # the end of the round does not set it
                        self.weights.write(i, anchor)
        self._rebased.difference_update(numbers)

    def _begin_all(self) -> None:
        """Before the first step: make sure that the ranks are equal, and begin; a collective."""
        if self._begun:
            return
        self._require_equal(self._optimizers[0].call)
        self._begun = True
        for i in range(len(self.weights)):
            self._state.begin(i)

    def _require_equal(self, point: str) -> None:
        """Raise on every rank unless all hold the same weights; a collective."""
        with call(point, 1, self._name):
            self.weights.require_equal()

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        self.arrive()
        self._state.clear()
        self._trained.clear()
        self._rebased.clear()
        self._agreements.clear()
        self._steps = [0] * len(self._steps)
        self._ended_at = None
        self._begun = False

    def _end_step(self, number: int) -> None:
        optimizer = self._optimizers[number]
        held = optimizer.held()
        self._trained.update(optimizer.trained())
        self._steps[number] += 1
        self._taken[number] += 1
        step = self._taken[number]
        if self.strategy.overlap and self._steps[number] == self.strategy.overlap:
            with call(optimizer.call, step, self._name):
                self._add_pending(held)
        if self._steps[number] < self.strategy.every:
            return
        self._rounds[number] += 1
        with call(optimizer.call, step, self._name):
            changed = sorted(held & self._trained)
            self._add_pending(changed)  # of rounds of other optimizers, too
            end = self._end_of_round(number, held, changed)
            if self.strategy.overlap:
                begun = [self._start(together) for together in pieces(self.weights, changed)]
                self._running.append(_Round(end, begun))
                arrive_before_exit(self)
            else:
                self._require_same_round(end)
                self._agree(changed)
            if self.strategy.same_weights:  # if not, they stay each rank's own, as the weights do
                self._average_statistics(keep=True)
        if self.strategy.same_weights:
            self._trained.difference_update(changed)
        self._steps[number] = 0

    def _end_of_round(self, number: int, held: set[int], changed: list[int]) -> RoundEnd:
        # Of this optimizer alone: whether others are gone already depends on the rank.
        rates = self._optimizers[number].checksum_of_rates()
        rebased = sorted(held & self._rebased)
        return RoundEnd(self._name, number, self._rounds[number], changed, rates, rebased)

    def _require_same_round(self, end: RoundEnd) -> None:
        """Raise on every rank unless all end the same round in the same way; a collective."""
        everyone = require_same_end(end, self._optimizers[end.number], self.weights)
        self._make_rebased_same(self.weights.step_call, [theirs.rebased for theirs in everyone])

    def _agree(self, numbers: Sequence[int]) -> None:
        """End the round of some weights; a collective."""
        for together in pieces(self.weights, numbers):
            self._state.write(together, self._end(self._start(together)))

    def arrive(self, numbers: Container[int] | None = None) -> None:
        """Wait for the agreements that overlap with training; a collective.

        Args:
            numbers: of weights, for the agreements on any of these; None for all.
        """
        for each in list(self._running):
            agreements = each.agreements
            on = [i for agreement in agreements for i in agreement.numbers]
            if numbers is None or not on or any(i in numbers for i in on):
                self._running.remove(each)
                self._require_same_round(each.end)
                for agreement in agreements:
                    change = self._end(agreement) - agreement.values
                    self._state.pending.update(self._state.split(agreement.numbers, change))

    def _add_pending(self, numbers: Collection[int]) -> None:
        """Wait, and add what the agreements have changed to some weights."""
        self.arrive(numbers)
        self._state.add_pending(numbers)

    def _show_agreed(self) -> None:
        self.arrive()
        # Also what an optimizer has changed that the script no longer has.
        for together in pieces(self.weights, sorted(self._trained)):
            agreed = self._start(together, self.strategy.settle).result()
            for i, values in self._state.split(together, agreed):
                self.weights.show(i, values)
        self._agreements.commit(())
        self._average_statistics(keep=False)

    def _replaced(self, i: int, own: Any, agreed: Any, chosen: Any) -> Any:
        self._state.pending.pop(i, None)
        if self._begun:
            self._state.rebase(i)
        return chosen

    def end_rounds(self) -> None:
        """End the rounds that have begun, as at the end of training; a collective.

        All ranks then hold the same weights.
        """
        self._meet()
        for number, optimizer in enumerate(self._optimizers):
            held = optimizer.held()
            self._add_pending(held)
            if self._steps[number] or not self.strategy.same_weights:
                self._agree_at_the_end(sorted(held & self._trained))
                self._trained.difference_update(held)
            self._steps[number] = 0
        self._average_statistics(keep=True)
        self._ended_at = list(self._taken)

    def _agree_at_the_end(self, numbers: Sequence[int]) -> None:
        if self.strategy.same_weights:
            self._agree(numbers)
        else:
            for together in pieces(self.weights, numbers):
                self._state.write(together, self._start(together, self.strategy.settle).result())
                for i in together:
                    self._state.rebase(i)
            self._agreements.commit(())

    def _start(self, together: list[int], flow: Callable[..., Any] | None = None) -> Agreement:
        """Begin what the strategy's ``agree``, or another flow of it, does to some weights."""
        values = self._state.values(together)
        agree = flow or self.strategy.agree
        begun = agree(values, self._state.kept(together), self._agreements.place)
        return self._agreements.start(begun, values, together)

    def _end(self, agreement: Agreement) -> Vector:
        """Wait for an agreement, keep its state, and return the values of the next round."""
        values, state = agreement.result()
        self._state.keep(agreement.numbers, state)
        self._agreements.commit(agreement.numbers)
        return values

    def _meet(self) -> bool:
        require_equal_steps(self._steps, self.weights.group)
        if self._begun:
            self._rebase(range(len(self.weights)))
        mine = sorted(self._trained), sorted(self._rebased)
        trained, rebased = zip(
            *collectives.gather("hvkit.settled", mine, self.weights.group), strict=True
        )
        require_same_trained(trained, self.weights)
        self._make_rebased_same("hvkit.settled", rebased)
        if not self._begun:  # the script may have changed weights without an optimizer
            try:
                self._require_equal("hvkit.settled")
            except RanksDisagreeError as error:
                error.add_note(
                    "No optimizer that was passed to hvkit.distribute has taken a step, so the "
                    "ranks have not agreed on anything: train through it."
                )
                raise
        return any(self._steps) or not self.strategy.same_weights

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and weight, and counts."""
        sent = {f"{_SENT}{key}": array for key, array in self._agreements.arrays().items()}
        counts = np.array([self._steps, self._rounds], np.int64)
        trained = np.array(sorted(self._trained), np.int64)
        return {**self._state.arrays(), **sent, "counts": counts, "trained": trained}

    def load_state(self, arrays: dict[str, np.ndarray[Any, Any]], *, in_round: bool) -> None:
        """Set what ``state`` returned.

        Args:
            arrays: from ``state``.
            in_round: whether each rank holds its own weights again. If not, a new round begins,
                with the weights that all hold now.
        """
        self.begin_anew()
        counts = arrays["counts"].tolist()
        if len(counts[0]) != len(self._optimizers):
            raise ValueError(f"it has {len(counts[0])} optimizers, here are {len(self._steps)}")
        sent = {key for key in arrays if key.startswith(_SENT)}
        self._agreements.load({key.removeprefix(_SENT): arrays[key] for key in sent})
        others = sent | {"counts", "trained"}
        self._state.load({key: array for key, array in arrays.items() if key not in others})
        if in_round:
            self._steps, self._rounds = counts
            self._trained = set(arrays["trained"].tolist())
        else:
            self._rounds = counts[1]
            self._state.rebase_all()
        # Each rank has its own optimizer state again, and in a round also its own weights.
        self._begun = in_round
        if in_round:
            for i in range(len(self.weights)):
                self._state.begin(i)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is pending for its weights."""
        return self._state.own_arrays() | self._agreements.own_arrays()

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        self._agreements.load(self._state.load_own(arrays))
