"""The weights of a model as vectors, for strategies whose ranks train alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from hvkit.adapters.pytorch.batch_norm import RunningStatistics
from hvkit.adapters.pytorch.buckets import wire_dtype
from hvkit.adapters.pytorch.wire import Wire


class Holder(Protocol):
    """What exchanges the weights of a model."""

    def __contains__(self, parameter: torch.Tensor) -> bool: ...


_holders: WeakSet[Holder] = WeakSet()


def remember(holder: Holder) -> None:
    """Count the parameters of ``holder`` as distributed, as long as it lives."""
    _holders.add(holder)


def is_kept(parameter: torch.Tensor) -> bool:
    """Whether a model whose ranks train alone has this parameter."""
    return any(parameter in holder for holder in _holders)


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """What the optimizer updates."""
    return (p for group in optimizer.param_groups for p in group["params"])


def flat_copy(parameter: torch.Tensor) -> torch.Tensor:
    """A copy as a vector, in the dtype in which it travels."""
    plain = parameter.detach()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    return plain.reshape(-1).to(wire_dtype(parameter.dtype), copy=True)


def write(parameter: torch.Tensor, vector: torch.Tensor) -> None:
    """Set a parameter from a vector that ``flat_copy`` has made."""
    if parameter.is_complex():
        parameter.detach().copy_(torch.view_as_complex(vector.view(*parameter.shape, 2)))
    else:
        parameter.detach().copy_(vector.view_as(parameter))


def of_one_kind(parameters: Sequence[torch.Tensor], numbers: Iterable[int]) -> list[list[int]]:
    """The numbers of float parameters, in lists of those that fit into one vector."""
    kinds: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i in numbers:
        p = parameters[i]
        if p.is_floating_point() or p.is_complex():
            kinds.setdefault((wire_dtype(p.dtype), p.device), []).append(i)
    return list(kinds.values())


def copies_of(
    parameters: Sequence[nn.Parameter], statistics: RunningStatistics | None
) -> list[tuple[Any, Any]]:
    """Everything that an exchange changes, with a copy of its value."""
    values: list[tuple[Any, Any]] = [(p, p.detach().clone()) for p in parameters]
    if statistics:
        vector = torch.zeros(statistics.length, device=parameters[0].device)
        statistics.read_into(vector)
        values.append((statistics, vector))
    return values


@torch.no_grad()
def put_back(values: list[tuple[Any, Any]]) -> None:
    """Set what ``copies_of`` returned."""
    for thing, value in values:
        if isinstance(thing, RunningStatistics):
            thing.write(value, also_in_evaluation=True)
        else:  # a graph that still needs its backward pass may hold the parameter
            thing.data.copy_(value)


def average_statistics(
    statistics: RunningStatistics, device: torch.device, name: str, *, keep: bool
) -> None:
    """Average the statistics of normalisation layers over ranks; a collective.

    Args:
        statistics: of the model.
        device: of its parameters.
        name: the same on every rank, and no other model's.
        keep: whether training goes on with them. If not, this is a view for evaluation, which has
            to change layers that are in evaluation mode.
    """
    mean = torch.zeros(statistics.length, device=device)
    statistics.read_into(mean)
    wire = Wire("batch norm")
    wire.wait(wire.start_mean(mean, f"{name}.statistics"))
    statistics.write(mean, also_in_evaluation=not keep)
