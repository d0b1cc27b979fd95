"""Agreements of ranks on weights: exchanges, state between two agreements, comparisons of ranks.

All ranks must end the same round in the same way, after equally many steps, which they compare.

The strategy sees all weights of an optimizer that have one dtype as one vector. Its state is stored
by weight, because several optimizers may update the same one, in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.communication.exchanges import Exchange, Messages, Neighbours, Tensor, by_rank, circle
from hvkit.errors import RanksDisagreeError
from hvkit.runtime import Group
from hvkit.strategies.strategy import Flow, Rounds, State, Vector
from hvkit.sync.compression_state import CompressionState
from hvkit.sync.fingerprints import first_unlike
from hvkit.sync.local_weights import LocalOptimizer, Weights
from hvkit.watch.rank_errors import mark_as_shown_by

SENT = "sent-"  # prefix, in a checkpoint, of the names of the state that a compression keeps

# Prefix, in a checkpoint, of the names of changes that agreements will add to the weights.
_PENDING = "due-"


class Running(Protocol):
    """Exchanges that are running."""

    def result(self) -> Any:
        """Wait for the other ranks; return what the generator of the exchanges returns."""


# Starts the exchanges of a generator, under names that begin with a text.
CarryOut = Callable[[Generator[Exchange, Tensor, Any], str], Running]


class Agreement(NamedTuple):
    """An agreement on some weights that is running."""

    numbers: list[int]
    values: Vector  # the weights' values when it began
    exchanges: Running  # the exchanges that run; they return what the strategy returns


class Agreements:
    """Agreements on a model's weights; all ranks start and finish the same ones in one order."""

    def __init__(
        self,
        strategy: Rounds,
        weights: Weights,
        carry_out: CarryOut,
        compression: CompressionState | None,
    ) -> None:
        # Changes that overlapped agreements will add to the weights, by number.
        self.pending: dict[int, Vector] = {}
        self._strategy = strategy
        self._weights = weights
        self._carry_out = carry_out
        self._compression = compression
        # The strategy's state, by the number of a weight; empty before the first round.
        self.state: dict[int, State] = {}

    def begin(self, i: int) -> None:
        """Make the state of a weight from its value, unless a checkpoint has set it."""
        if i not in self.state:
            self.state[i] = self._strategy.begin(self._weights.read(i))

    def anchor(self, i: int) -> Vector | None:
        return self._strategy.anchor(self.state[i])

    def moved(self, i: int) -> bool:
        """Whether a weight differs from what the ranks have last agreed on."""
        anchor = self.anchor(i)
        return anchor is not None and not self._weights.equals(i, anchor)

    def set_anchor(self, i: int, values: Vector | None = None) -> None:
        """Begin a round with values, by default the weight's, as if ranks had agreed on them."""
        values = self._weights.read(i) if values is None else values
        self.state[i] = self._strategy.reset(values, self.state[i])

    def set_anchors(self) -> None:
        """Begin a round with the present values of all weights."""
        for i in self.state:
            self.set_anchor(i)

    def clear(self) -> None:
        self.pending.clear()
        self.state.clear()
        if self._compression:
            self._compression.start_over()

    def start(
        self, numbers: list[int], name: str, flow: Callable[..., Flow[Any]] | None = None
    ) -> Agreement:
        """Start an agreement on weights of one dtype, by the strategy's ``agree`` or another flow.

        No other agreement that runs at the same time may have the same name.
        """
        values = self._weights.join([self._value(i) for i in numbers])
        states = [self.state[i] for i in numbers]
        joined = {n: self._weights.join([state[n] for state in states]) for n in states[0]}
        begun = (flow or self._strategy.agree)(values, joined, self._weights.group)
        return Agreement(numbers, values, self._carry_out(self._exchanges(begun, numbers), name))

    def _exchanges(self, flow: Flow[Any], numbers: list[int]) -> Generator[Exchange, Tensor, Any]:
        """The exchanges of a flow, compressed where possible; return the result of the flow."""
        answer: Any = None
        while True:
            try:
                needed = flow.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(needed, Neighbours):
                answer = yield from self._of_neighbours(needed)
            elif self._compression and self._compression.suits(needed.vector.dtype):
                shapes = [self._weights.shape(i) for i in numbers]
                answer = yield from self._compression.reduce(numbers, shapes, needed.vector)
            else:
                answer = yield needed

    def _of_neighbours(self, needed: Neighbours) -> Generator[Exchange, Tensor, list[Vector]]:
        to, sources = circle(needed.offsets, group := self._weights.group)
        length = needed.vector.shape[0]
        received = yield Messages(
            self._weights.join([needed.vector] * len(to)),
            by_rank(length, to, group.size),
            by_rank(length, sources, group.size),
        )
        first = {rank: at * length for at, rank in enumerate(sorted(sources))}
        return [received[first[rank] : first[rank] + length] for rank in sources]

    def finish(self, agreement: Agreement) -> Vector:
        """Wait for an agreement, keep its state, and return the values of the next round."""
        values, state = agreement.exchanges.result()
        numbers = agreement.numbers
        parts = {name: self._weights.split(each, numbers) for name, each in state.items()}
        for at, i in enumerate(numbers):
            self.state[i] = {name: each[at] for name, each in parts.items()}
        self.commit(numbers)
        return values

    def commit(self, numbers: Iterable[int]) -> None:
        """Keep the residuals that the compression has computed for these weights."""
        if self._compression:
            self._compression.commit(numbers)

    def discard(self) -> None:
        """Discard the residuals of agreements whose result was shown but not used."""
        if self._compression:
            self._compression.pending.clear()

    def split(self, numbers: Sequence[int], vector: Vector) -> list[tuple[int, Vector]]:
        """Each number with its weight's part of a vector."""
        return list(zip(numbers, self._weights.split(vector, numbers), strict=True))

    def write(self, numbers: Sequence[int], vector: Vector) -> None:
        for i, values in self.split(numbers, vector):
            self._weights.write(i, values)

    def _value(self, i: int) -> Vector:
        """A weight, with its pending change."""
        value = self._weights.read(i)
        return value + self.pending[i] if i in self.pending else value

    def add_pending(self, numbers: Iterable[int]) -> None:
        """Add the pending changes of some weights."""
        for i in sorted(self.pending.keys() & set(numbers)):
            self._weights.write(i, self._value(i))
            del self.pending[i]

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves, the same on every rank."""
        found = {
            f"{name}.{i}": self._weights.to_numpy(vector)
            for i, state in self.state.items()
            for name, vector in state.items()
        }
        if self._compression:
            names = self._compression.compression.common
            sent = self._compression.arrays(names, range(len(self._weights)))
            found |= {f"{SENT}{key}": array for key, array in sent.items()}
        return found

    def load(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        sent = {key: array for key, array in arrays.items() if key.startswith(SENT)}
        self._load_sent({key.removeprefix(SENT): array for key, array in sent.items()})
        for key in arrays.keys() - sent.keys():
            name, _, number = key.partition(".")
            i = int(number)
            self.state.setdefault(i, {})[name] = self._weights.from_numpy(arrays[key], i)

    def rank_arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """What a checkpoint saves for each rank: residuals and pending changes."""
        found = {f"{_PENDING}{i}": self._weights.to_numpy(v) for i, v in self.pending.items()}
        if self._compression:
            names = self._compression.compression.per_rank
            found |= self._compression.arrays(names, range(len(self._weights)))
        return found

    def load_rank(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        pending = {key for key in arrays if key.startswith(_PENDING)}
        for key in pending:
            i = int(key.removeprefix(_PENDING))
            self.pending[i] = self._weights.from_numpy(arrays[key], i)
        self._load_sent({key: a for key, a in arrays.items() if key not in pending})

    def _load_sent(self, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        if self._compression:
            self._compression.load(arrays, range(len(self._weights)))


@sendable
class RoundSummary(NamedTuple):
    """How a rank ends a round."""

    model: str
    optimizer: str
    rounds: int  # the number of rounds that the optimizer has ended, with this one
    trained: list[int]
    rates: int  # a checksum of the learning rates
    # Weights that this rank's script has set before the round; the only part that may differ.
    set_by_script: list[int]

    def __str__(self) -> str:
        return f"round {self.rounds} of {self.optimizer} of model {self.model}"


def require_same_round(
    summary: RoundSummary, optimizer: LocalOptimizer, weights: Weights
) -> list[RoundSummary]:
    """Return all ranks' summaries, or raise if they end the round differently; a collective."""
    summaries = collectives.gather(weights.step_call, summary, weights.group)
    first = summaries[0]
    for rank, other in zip(weights.group.members, summaries, strict=True):
        if other[:3] != first[:3]:
            raise RanksDisagreeError(
                f"rank {rank} ends {other} while rank {weights.group.first} ends {first}: every "
                f"rank must call {weights.step_call} of the same optimizers equally often"
            )
    if any(other[:-1] != first[:-1] for other in summaries):
        optimizer.require_same_training(weights.step_call)
    require_same_trained([other.trained for other in summaries], weights)
    if any(other.rates != first.rates for other in summaries):  # and are equal again by now
        raise RanksDisagreeError(
            f"the ranks' learning rates differed at the end of {summary}: set the same rates, in "
            "the same steps, on every rank"
        )
    return summaries


def require_same_trained(trained: Sequence[Sequence[int]], weights: Weights) -> None:
    """Raise if ranks have trained different weights; ``trained`` has their numbers, by rank."""
    if (unlike := first_unlike(trained, weights.group)) is not None:
        i, by, not_by = unlike
        raise RanksDisagreeError(
            f"{weights.label(i)} was trained in this round on rank {by} but not "
            f"on rank {not_by}: train the same {weights.noun} on every rank"
        )


def require_equal_steps(steps: Sequence[int], group: Group) -> None:
    """Raise unless all ranks have taken as many steps with each optimizer; a collective."""
    by_rank = collectives.gather("hvkit.settled", list(steps), group)
    for rank, taken in zip(group.members, by_rank, strict=True):
        if taken != by_rank[0]:
            error = RanksDisagreeError(
                f"rank {rank} has taken {sum(taken)} steps since the last agreement, rank "
                f"{group.first} {sum(by_rank[0])}: every rank must take equally many; "
                "hvkit.shard(data) gives each as many batches"
            )
            raise mark_as_shown_by(error, group.first)
