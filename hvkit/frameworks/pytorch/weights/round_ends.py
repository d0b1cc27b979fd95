"""What the ranks compare when they end a round: they must end the same one in the same way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.pytorch.gradients import step_report
from hvkit.sync.fingerprints import first_unlike

STEP = "optimizer.step()"
"""The user's call that ends a round."""

Label = Callable[[int, torch.Tensor], str]
"""Gives the name of a parameter from its number and itself."""


@sendable
class RoundEnd(NamedTuple):
    """How a rank ends a round.

    Attributes:
        model: the keeper's name.
        number: the optimizer's.
        rounds: how many that optimizer has ended, with this one.
        trained: numbers of the parameters that were trained.
        rates: a checksum of the learning rates.
        rebased: numbers of the parameters that this rank's script has set before the round; not
            necessarily the same on all ranks.
    """

    model: str
    number: int
    rounds: int
    trained: list[int]
    rates: int
    rebased: list[int]

    def __str__(self) -> str:
        return f"round {self.rounds} of optimizer {self.number} of model {self.model}"

    @property
    def common(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        return self[:-1]


def require_same_end(
    end: RoundEnd, optimizer: Optimizer | None, parameters: Sequence[nn.Parameter], label: Label
) -> list[RoundEnd]:
    """Raise on every rank unless all end the same round in the same way; a collective.

    Args:
        end: this rank's.
        optimizer: the one whose round ends; None if the script no longer has it.
        parameters: all of the model.
        label: names one.

    Returns:
        The ends of all ranks.

    Raises:
        RanksDisagreeError: names the ranks and what differs.
    """
    everyone = collectives.gather(STEP, end)
    first = everyone[0]
    for rank, theirs in enumerate(everyone):
        if theirs[:3] != first[:3]:
            raise RanksDisagreeError(
                f"rank {rank} ends {theirs} while rank 0 ends {first}: every rank must call "
                "step() of the same optimizers equally often"
            )
    if any(theirs.common != first.common for theirs in everyone):
        step_report.refuse_other_parameters(parameters, label, STEP)
        step_report.refuse_other_rates([optimizer] if optimizer else [], STEP)
    require_same_trained([theirs.trained for theirs in everyone], parameters, label)
    if any(theirs.rates != first.rates for theirs in everyone):  # but are alike by now
        raise RanksDisagreeError(
            f"the ranks' learning rates differed at the end of {end}: set the same rates, in the "
            "same steps, on every rank"
        )
    return everyone


def require_same_trained(
    everyone: Sequence[Sequence[int]], parameters: Sequence[torch.Tensor], label: Label
) -> None:
    """Raise if ranks have trained different parameters.

    Args:
        everyone: their numbers, by rank.
        parameters: all of the model.
        label: names one.

    Raises:
        RanksDisagreeError: names the first one and two ranks.
    """
    if (unlike := first_unlike(everyone)) is not None:
        i, trained, not_trained = unlike
        raise RanksDisagreeError(
            f"{label(i, parameters[i])} was trained in this round on rank {trained} but not "
            f"on rank {not_trained}: train the same parameters on every rank"
        )
