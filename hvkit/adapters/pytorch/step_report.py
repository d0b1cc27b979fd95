"""The few numbers that travel along with the gradients, and the errors when ranks disagree.

Every rank reports which gradients it has, how many steps it has done, and a checksum of its
learning rates. The numbers are averaged like gradients, at the end of the last bucket. All ranks
read the same report from the mean and so decide alike what to do with the gradients.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from hvkit import collectives
from hvkit.errors import RanksDisagreeError
from hvkit.watch.rank_errors import mark_as_shown_by

# Ranks compare their steps modulo this. Small numbers keep the comparison exact in float32.
_STEP_CYCLE = 8
# Bits of the checksum of the learning rates that travel.
_BITS = 24


@dataclass(frozen=True)
class StepReport:
    """What the ranks had in one reduction; the same on every rank.

    Attributes:
        dense: numbers of the parameters with a dense gradient on any rank.
        sparse: numbers of those with a sparse gradient on any rank.
        outdated: numbers of those whose gradient changed after a rank had sent their bucket.
        frozen_on_some: numbers of those that some ranks train and others do not.
        rates_differ: whether the ranks use different learning rates.
        steps_differ: whether the ranks have done different numbers of optimizer steps.
    """

    dense: set[int]
    sparse: set[int]
    outdated: set[int]
    frozen_on_some: set[int]
    rates_differ: bool
    steps_differ: bool

    @staticmethod
    def length(parameters: int) -> int:
        """How many numbers the report on this number of parameters takes."""
        return 4 * parameters + _BITS + 2

    @staticmethod
    def encode(
        parameters: int,
        *,
        dense: Iterable[int],
        sparse: Iterable[int],
        outdated: Iterable[int],
        trained: Iterable[int],
        rates: int,
        steps: int,
    ) -> torch.Tensor:
        """This rank's report as a float32 tensor of shape ``(length(parameters),)``.

        Args:
            parameters: the number of parameters.
            dense: numbers of those with a dense gradient on this rank.
            sparse: numbers of those with a sparse gradient on this rank.
            outdated: numbers of those whose gradient changed after their bucket was sent.
            trained: numbers of those that require a gradient.
            rates: a checksum of the learning rates.
            steps: optimizer steps done.
        """
        rows = torch.zeros(4, parameters)
        for row, numbers in zip(rows, (dense, sparse, outdated, trained), strict=True):
            row[list(numbers)] = 1
        bits = torch.tensor([rates >> b & 1 for b in range(_BITS)])
        step = float(steps % _STEP_CYCLE)
        return torch.cat([rows.view(-1), bits, torch.tensor([step, step * step])])

    @staticmethod
    def decode(mean: torch.Tensor, size: int) -> StepReport:
        """The report from the mean over ``size`` ranks of the results of ``encode``."""
        values = mean.cpu().double()
        rows = values[: -_BITS - 2].view(4, -1)
        step, square = values[-2:].tolist()
        dense, sparse, outdated = (_numbers(row > 0) for row in rows[:3])
        return StepReport(
            dense,
            sparse,
            outdated,
            frozen_on_some=_numbers(_on_some(rows[3], size)),
            rates_differ=bool(_on_some(values[-_BITS - 2 : -2], size).any()),
            steps_differ=square - step * step > 0.25 / size,
        )


def _on_some(means: torch.Tensor, size: int) -> torch.Tensor:
    """Which means come from zeros on some ranks and ones on others."""
    return (means > 0.5 / size) & (means < 1 - 0.5 / size)


def _numbers(row: torch.Tensor) -> set[int]:
    return set(row.nonzero().flatten().tolist())


def of_this_rank(
    parameters: Sequence[torch.nn.Parameter],
    outdated: set[int],
    optimizers: Sequence[Optimizer],
    steps: int,
) -> torch.Tensor:
    """This rank's report, encoded.

    Args:
        parameters: all of the model's, with this rank's own gradients.
        outdated: numbers of those whose gradient changed after their bucket was sent.
        optimizers: those that update the parameters.
        steps: optimizer steps done.
    """
    trained = {i: p.grad for i, p in enumerate(parameters) if p.requires_grad}
    sparse = {i for i, gradient in trained.items() if gradient is not None and gradient.is_sparse}
    dense = {i for i, gradient in trained.items() if gradient is not None} - sparse
    return StepReport.encode(
        len(parameters),
        dense=dense,
        sparse=sparse,
        outdated=outdated,
        trained=trained,
        rates=checksum_of_rates(optimizers),
        steps=steps,
    )


def refuse_other_parameters(
    parameters: Sequence[torch.nn.Parameter],
    label: Callable[[int, torch.Tensor], str],
    call: str = "backward()",
) -> None:
    """Raise on every rank unless all train the same parameters; a collective.

    Args:
        parameters: all of the model's.
        label: what to call a parameter, from its number and itself.
        call: the user's call.
    """
    mine = {i for i, p in enumerate(parameters) if p.requires_grad}
    everyone = collectives.gather(call, mine)
    for rank, theirs in enumerate(everyone):
        if theirs == everyone[0]:
            continue
        i = min(theirs ^ everyone[0])
        trains, freezes = (rank, 0) if i in theirs else (0, rank)
        error = RanksDisagreeError(
            f"{label(i, parameters[i])} requires a gradient on rank {trains} but not on rank "
            f"{freezes}: freeze the same parameters on every rank (to choose them at random, use "
            "a generator with the same seed on all ranks)"
        )
        raise mark_as_shown_by(error, 0)


def checksum_of_rates(optimizers: Sequence[Optimizer]) -> int:
    """A number that differs, in all likelihood, if the learning rates do."""
    return zlib.crc32(repr([rate for _, rate in _rates(optimizers)]).encode())


def refuse_other_rates(optimizers: Sequence[Optimizer], call: str = "backward()") -> None:
    """Raise on every rank unless all use the same learning rates; a collective.

    Args:
        optimizers: those that update the parameters.
        call: the user's call.
    """
    everyone = collectives.gather(call, _rates(optimizers))
    for rank, theirs in enumerate(everyone):
        for (name, first), (_, other) in zip(everyone[0], theirs, strict=True):
            if first != other:
                error = RanksDisagreeError(
                    f"the learning rate of {name} is {first!r} on rank 0 but {other!r} on rank "
                    f"{rank}: set the same rate on every rank; a scheduler that follows a metric "
                    "needs the mean over ranks: scheduler.step(hvkit.average(loss))"
                )
                raise mark_as_shown_by(error, 0)


def _rates(optimizers: Sequence[Optimizer]) -> list[tuple[str, float]]:
    """The rates in host memory, with names; fetching one from a GPU would delay every step."""
    return [
        (f"parameter group {g} of {type(optimizer).__name__}", float(rate))
        for optimizer in optimizers
        for g, group in enumerate(optimizer.param_groups)
        if isinstance(rate := group.get("lr"), int | float)
        or (isinstance(rate, torch.Tensor) and rate.device.type == "cpu")
    ]
