"""Ends rounds of a strategy that agrees on weights: after so many steps of an optimizer.

A step that ``GradScaler`` skips counts, too: an overflow on one rank must not move the ends of its
rounds against those of the others.

With ``overlap`` the agreement runs beside the first steps of the next round. What it then adds to
the weights is how it has changed those at the end of the round, so no step in between is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.compression import Compression
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.batch_norm import RunningStatistics
from hvkit.frameworks.pytorch.checks import Checks
from hvkit.frameworks.pytorch.collectives.wire import Wire
from hvkit.frameworks.pytorch.gradients.compressed_buckets import CompressionState
from hvkit.frameworks.pytorch.gradients.step_report import checksum_of_rates
from hvkit.frameworks.pytorch.weights.agreements import Agreement
from hvkit.frameworks.pytorch.weights.round_ends import (
    STEP,
    RoundEnd,
    require_same_end,
    require_same_trained,
)
from hvkit.frameworks.pytorch.weights.round_state import RoundState
from hvkit.frameworks.pytorch.weights.weight_keeper import (
    WeightKeeper,
    parameters_of,
    write,
)
from hvkit.strategies.strategy import Rounds
from hvkit.sync.shown_weights import arrive_before_exit, require_equal_steps
from hvkit.watch.calls import call

# What begins the names, in a checkpoint, of what the compression keeps.
_SENT = "sent-"


class _Round(NamedTuple):
    """A round that ends beside training.

    Attributes:
        end: how this rank ends it.
        agreements: on all its parameters, some at a time.
    """

    end: RoundEnd
    agreements: list[Agreement]


class RoundKeeper(WeightKeeper):
    """Ends the rounds of the optimizers of one model.

    Args:
        strategy: what the ranks agree on.
        parameters: in the same order on every rank.
        name: the same on every rank, and no other keeper's.
        checks: what the ranks compare before their first step.
        compression: how float32 vectors travel; None for as they are.
        statistics: of normalisation layers, averaged where ranks agree on the same weights.
    """

    equal_steps = True

    def __init__(
        self,
        strategy: Rounds,
        parameters: Iterable[nn.Parameter],
        name: str,
        checks: Checks,
        compression: Compression | None = None,
        statistics: RunningStatistics | None = None,
    ) -> None:
        self.strategy = strategy
        self.compression = compression
        self._wire = Wire("weights")
        self._sent = CompressionState(compression) if compression else None
        # Numbers of those that may differ between ranks.
        self._trained: set[int] = set()
        # Numbers of those that the script has set on this rank between two rounds.
        self._rebased: set[int] = set()
        # Agreements that run beside training.
        self._running: list[_Round] = []
        # Steps that each optimizer has taken in this round, rounds that it has ended, and steps
        # since the script began, which no checkpoint holds.
        self._steps: list[int] = []
        self._rounds: list[int] = []
        self._taken: list[int] = []
        self._begun = False
        super().__init__(parameters, name, checks, statistics)
        self._state = RoundState(strategy, self._parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Agree on more parameters; the same ones on every rank, with the same values."""
        known = len(self._parameters)
        super().add(parameters)
        for i in range(known, len(self._parameters)) if self._begun else ():
            self._state.begin(i)

    def watch(self, optimizers: Sequence[Optimizer], adopt: Callable[[], bool]) -> None:
        """End a round after every so many steps of an optimizer.

        Args:
            optimizers: one that updates some of the parameters, and those inside it.
            adopt: adds parameters that are new in the optimizers.
        """
        self._steps.append(0)
        self._rounds.append(0)
        self._taken.append(0)
        super().watch(optimizers, adopt)

    def _before_step(self, number: int) -> None:
        self._begin_all()
        if not self._steps[number]:
            self._rebase({self._number[p] for p in parameters_of(self._optimizer(number))})

    def _rebase(self, numbers: Iterable[int]) -> None:
        """Begin the round with weights that the script has set since the last agreement.

        The ranks compare them when they meet next: this is no collective.
        """
        if not self.strategy.alike:
            return  # where they count as a change like any other
        for i in numbers:
            if i not in self._trained and self._state.moved(i):
                self._state.rebase(i)
                self._rebased.add(i)

    @torch.no_grad()
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
        held = [(i, self._parameters[i], anchor) for i, anchor in anchors.items()]
        if not self._checks.require_same(point, ", set between two rounds,", held):
            for together in self._state.pieces(numbers):
                mean = torch.cat([anchors[i] for i in together])
                name = f"{self._name}.anchor.{together[0]}"
                self._wire.wait(self._wire.start_mean(mean, name))
                for i, anchor in self._state.split(together, mean):
                    self._state.rebase(i, anchor)
                    if i not in self._trained:  # the end of the round does not set it
                        write(self._parameters[i], anchor)
        self._rebased.difference_update(numbers)

    def _begin_all(self) -> None:
        """Before the first step: make sure that the ranks are alike, and begin; a collective."""
        if self._begun:
            return
        self._require_alike(_label(self._living()[0]))
        self._begun = True
        for i in range(len(self._parameters)):
            self._state.begin(i)

    def _require_alike(self, label: str) -> None:
        """Raise on every rank unless all hold the same weights; a collective."""
        with call(label, 1, self._name):
            self._checks.send(0, self._parameters)
            self._checks.receive(0)

    def begin_anew(self) -> None:
        """Begin with the weights that the ranks hold now, the same on all; forget all rounds."""
        self.arrive()
        self._state.clear()
        self._trained.clear()
        self._rebased.clear()
        if self._sent:
            self._sent.kept.clear()
        self._steps = [0] * len(self._steps)
        self._begun = False

    def _end_step(self, number: int) -> None:
        optimizer = self._optimizer(number)
        # Momentum moves a parameter that was frozen, as long as it has a gradient.
        self._trained.update(
            self._number[p]
            for p in parameters_of(optimizer)
            if p.requires_grad or p.grad is not None
        )
        self._steps[number] += 1
        self._taken[number] += 1
        held = {self._number[p] for p in parameters_of(optimizer)}
        step = self._taken[number]
        if self.strategy.overlap and self._steps[number] == self.strategy.overlap:
            with call(_label(optimizer), step, self._name):
                self._add_due(held)
        if self._steps[number] < self.strategy.every:
            return
        self._rounds[number] += 1
        with call(_label(optimizer), step, self._name):
            changed = sorted(held & self._trained)
            self._add_due(changed)  # that other optimizers change, too
            end = self._end_of_round(number, held, changed)
            if self.strategy.overlap:
                self._running.append(
                    _Round(end, list(map(self._start, self._state.pieces(changed))))
                )
                arrive_before_exit(self)
            else:
                self._require_same_round(end)
                self._agree(changed)
            if self.strategy.alike:  # if not, they stay each rank's own, as the weights do
                self._average_statistics(keep=True)
        if self.strategy.alike:
            self._trained.difference_update(changed)
        self._steps[number] = 0

    def _end_of_round(self, number: int, held: set[int], changed: list[int]) -> RoundEnd:
        # Of this optimizer alone: whether others are gone already depends on the rank.
        rates = checksum_of_rates([self._optimizer(number)])
        rebased = sorted(held & self._rebased)
        return RoundEnd(self._name, number, self._rounds[number], changed, rates, rebased)

    def _require_same_round(self, end: RoundEnd) -> None:
        """Raise on every rank unless all end the same round in the same way; a collective."""
        stepping = self._optimizers[end.number]()
        everyone = require_same_end(end, stepping, self._parameters, self._checks.label)
        self._make_rebased_same(STEP, [theirs.rebased for theirs in everyone])

    @torch.no_grad()
    def _agree(self, numbers: Sequence[int]) -> None:
        """End the round of some parameters; a collective."""
        for together in self._state.pieces(numbers):
            self._state.write(together, self._end(self._start(together)))

    @torch.no_grad()
    def arrive(self, numbers: Container[int] | None = None) -> None:
        """Wait for the agreements that run beside training; a collective.

        Args:
            numbers: of parameters, for the agreements on any of these; None for all.
        """
        for each in list(self._running):
            agreements = each.agreements
            on = [i for agreement in agreements for i in agreement.numbers]
            if numbers is None or not on or any(i in numbers for i in on):
                self._running.remove(each)
                self._require_same_round(each.end)
                for agreement in agreements:
                    change = self._end(agreement) - agreement.weights
                    self._state.due.update(self._state.split(agreement.numbers, change))

    @torch.no_grad()
    def _add_due(self, numbers: Collection[int]) -> None:
        """Wait, and add what the agreements have changed to the weights of some parameters."""
        self.arrive(numbers)
        self._state.add_due(numbers)

    @torch.no_grad()
    def _show_agreed(self) -> None:
        self.arrive()
        # Also what an optimizer has changed that the script no longer has.
        for together in self._state.pieces(sorted(self._trained)):
            settled = self._start(together, self.strategy.settle).result()
            for i, weights in self._state.split(together, settled):
                write(self._parameters[i].data, weights)
        if self._sent:
            self._sent.commit(())
        self._average_statistics(keep=False)

    @torch.no_grad()
    def _start(self, together: list[int], flow: Callable[..., Any] | None = None) -> Agreement:
        """Begin what the strategy's ``agree``, or another flow of it, does to some parameters."""
        weights = self._state.weights(together)
        begun = (flow or self.strategy.agree)(weights, self._state.kept(together), self._wire)
        members: list[tuple[int, torch.Tensor]] = [(i, self._parameters[i]) for i in together]
        name = f"{self._name}.weights.{together[0]}"
        return Agreement(begun, weights, members, name, self._wire, self._sent)

    def _end(self, agreement: Agreement) -> torch.Tensor:
        """Wait for an agreement, keep its state, and return the weights of the next round."""
        weights: torch.Tensor
        weights, state = agreement.result()
        self._state.keep(agreement.numbers, state)
        if self._sent:
            self._sent.commit(agreement.numbers)
        return weights

    def _meet(self) -> bool:
        require_equal_steps(self._steps)
        if self._begun:
            self._rebase(range(len(self._parameters)))
        mine = sorted(self._trained), sorted(self._rebased)
        trained, rebased = zip(*collectives.gather("hvkit.settled", mine), strict=True)
        require_same_trained(trained, self._parameters, self._checks.label)
        self._make_rebased_same("hvkit.settled", rebased)
        if not self._begun:  # the script may have changed weights without an optimizer
            try:
                self._require_alike("hvkit.settled")
            except RanksDisagreeError as error:
                error.add_note(
                    "No optimizer that was passed to hvkit.distribute has taken a step, so the "
                    "ranks have not agreed on anything: train through it."
                )
                raise
        return any(self._steps) or not self.strategy.alike

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank: by state and parameter, and counts."""
        arrays = self._state.arrays()
        if self._sent:
            sent = self._sent.arrays(self._sent.compression.common)
            arrays |= {f"{_SENT}{key}": array for key, array in sent.items()}
        counts = np.array([self._steps, self._rounds], np.int64)
        return {**arrays, "counts": counts, "trained": np.array(sorted(self._trained), np.int64)}

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
        if self._sent:
            sent = {k.removeprefix(_SENT): a for k, a in arrays.items() if k.startswith(_SENT)}
            self._sent.load(sent, self._parameters)
        counted = ("counts", "trained")
        self._state.load(
            {k: a for k, a in arrays.items() if k not in counted and not k.startswith(_SENT)}
        )
        if in_round:
            self._steps, self._rounds = counts
            self._trained = set(arrays["trained"].tolist())
        else:
            self._rounds = counts[1]
            self._state.rebase_all()
        # Each rank has its own optimizer state again, and in a round also its own weights.
        self._begun = in_round
        if in_round:
            for i in range(len(self._parameters)):
                self._state.begin(i)

    def own_state(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals, and what is due to its weights."""
        sent = self._sent.arrays(self._sent.compression.own) if self._sent else {}
        return self._state.own_arrays() | sent

    def load_own_state(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        """Set what ``own_state`` returned on this rank."""
        sent = self._state.load_own(arrays)
        if self._sent:
            self._sent.load(sent, self._parameters)


def _label(optimizer: Optimizer) -> str:
    return f"{type(optimizer).__name__}.step()"
