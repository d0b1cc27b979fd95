"""What the ranks compare when they end a round: they must end the same one in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.errors import RanksDisagreeError
from hvkit.sync.fingerprints import first_unlike
from hvkit.sync.local_weights import SteppedOptimizer, Weights


@sendable
class RoundSummary(NamedTuple):
    """How a rank ends a round.

    Attributes:
        model: the keeper's name.
        optimizer: its name in messages, the same on every rank.
        rounds: how many that optimizer has ended, with this one.
        trained: numbers of the weights that were trained.
        rates: a checksum of the learning rates.
        set_by_script: numbers of the weights that this rank's script has set before the round; not
            necessarily the same on all ranks.
    """

    model: str
    optimizer: str
    rounds: int
    trained: list[int]
    rates: int
    set_by_script: list[int]

    def __str__(self) -> str:
        return f"round {self.rounds} of {self.optimizer} of model {self.model}"

    @property
    def common(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        return self[:-1]


def require_same_round(
    summary: RoundSummary, optimizer: SteppedOptimizer, weights: Weights
) -> list[RoundSummary]:
    """Raise on every rank unless all end the same round in the same way; a collective.

    Args:
        summary: this rank's.
        optimizer: the one whose round ends.
        weights: all of the model.

    Returns:
        The summaries of all ranks.

    Raises:
        RanksDisagreeError: names the ranks and what differs.
    """
    everyone = collectives.gather(weights.step_call, summary, weights.group)
    first = everyone[0]
    for rank, theirs in zip(weights.group.members, everyone, strict=True):
        if theirs[:3] != first[:3]:
            raise RanksDisagreeError(
                f"rank {rank} ends {theirs} while rank {weights.group.first} ends {first}: every "
                f"rank must call {weights.step_call} of the same optimizers equally often"
            )
    if any(theirs.common != first.common for theirs in everyone):
        optimizer.require_same_training(weights.step_call)
    require_same_trained([theirs.trained for theirs in everyone], weights)
    if any(theirs.rates != first.rates for theirs in everyone):  # but are the same by now
        raise RanksDisagreeError(
            f"the ranks' learning rates differed at the end of {summary}: set the same rates, in "
            "the same steps, on every rank"
        )
    return everyone


def require_same_trained(everyone: Sequence[Sequence[int]], weights: Weights) -> None:
    """Raise if ranks have trained different weights.

    Args:
        everyone: their numbers, by rank.
        weights: all of the model.

    Raises:
        RanksDisagreeError: names the first one and two ranks.
    """
    if (unlike := first_unlike(everyone, weights.group)) is not None:
        i, trained, not_trained = unlike
        raise RanksDisagreeError(
            f"{weights.label(i)} was trained in this round on rank {trained} but not "
            f"on rank {not_trained}: train the same {weights.noun} on every rank"
        )
