"""Comparisons of ranks: all must end the same round in the same way, after equally many steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.communication.group import Group
from hvkit.errors import RanksDisagreeError
from hvkit.sync.fingerprints import first_unlike
from hvkit.sync.local_weights import LocalOptimizer, Weights
from hvkit.watch.rank_errors import mark_as_shown_by


@sendable
class RoundSummary(NamedTuple):
    """How a rank ends a round.

    Attributes:
        model: the keeper's name.
        optimizer: its name in messages, the same on every rank.
        rounds: how many that optimizer has ended, with this one.
        trained: numbers of the weights that were trained in it.
        rates: a checksum of the learning rates.
        set_by_script: numbers of the weights that this rank's script has set before the round; they
            may differ between ranks.
    """

    model: str
    optimizer: str
    rounds: int
    trained: list[int]
    rates: int
    set_by_script: list[int]

    def __str__(self) -> str:
        return f"round {self.rounds} of {self.optimizer} of model {self.model}"


def require_same_round(
    summary: RoundSummary, optimizer: LocalOptimizer, weights: Weights
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
    """Raise if ranks have trained different weights.

    Args:
        trained: their numbers, by rank.
        weights: all of the model.

    Raises:
        RanksDisagreeError: names the first one and two ranks.
    """
    if (unlike := first_unlike(trained, weights.group)) is not None:
        i, by, not_by = unlike
        raise RanksDisagreeError(
            f"{weights.label(i)} was trained in this round on rank {by} but not "
            f"on rank {not_by}: train the same {weights.noun} on every rank"
        )


def require_equal_steps(steps: Sequence[int], group: Group) -> None:
    """Raise on every rank of a group unless all have taken equally many steps; a collective.

    Args:
        steps: this rank's since the last agreement, for each optimizer.
        group: the ranks that take part.

    Raises:
        RanksDisagreeError: they have not.
    """
    by_rank = collectives.gather("hvkit.settled", list(steps), group)
    for rank, taken in zip(group.members, by_rank, strict=True):
        if taken != by_rank[0]:
            error = RanksDisagreeError(
                f"rank {rank} has taken {sum(taken)} steps since the last agreement, rank "
                f"{group.first} {sum(by_rank[0])}: every rank must take equally many; "
                "hvkit.shard(data) gives each as many batches"
            )
            raise mark_as_shown_by(error, group.first)
