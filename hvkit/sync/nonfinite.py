"""Gradients that are NaN or infinite: the sentence about them, the options, steps skipped."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

OnNonfinite = Literal["ignore", "skip", "stop"]
ACTIONS = get_args(OnNonfinite)

_SHOWN = 3


@dataclass
class SkippedSteps:
    """How many steps of this process were skipped."""

    number: int = 0


skipped_steps = SkippedSteps()


class Statistics(Protocol):
    """Running statistics of batch norm, which a skipped step must not spoil."""

    def keep(self) -> None:
        """Remember the finite ones."""


# Of all models with ``on_nonfinite="skip"``; loading a checkpoint must ``keep`` them, too.
kept_statistics: weakref.WeakSet[Statistics] = weakref.WeakSet()


def describe(by_rank: Sequence[Sequence[str]], members: Sequence[int] | None = None) -> str:
    """The sentence about ranks with gradients that are not finite, and their parameters' names."""
    members = members or range(len(by_rank))
    found = [
        f"rank {rank} has a NaN or infinite gradient of {_listed(names)}"
        for rank, names in zip(members, by_rank, strict=True)
        if names
    ]
    return "; ".join(found)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"parameter{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"
