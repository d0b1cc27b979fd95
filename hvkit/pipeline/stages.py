"""Divides models into even stages, and batches into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

BALANCES = "flops", "bytes"
"""The measures of a stage that cuts can balance."""


@dataclass(frozen=True)
class CutPoint:
    """A module or layer after which a model can be cut.

    ``time`` is when its call ends; ``nbytes`` are what a stage then sends to the next one.
    """

    name: str
    time: int
    nbytes: int

    def __str__(self) -> str:
        return self.name


P = TypeVar("P", bound=CutPoint)


@dataclass(frozen=True)
class Stages:
    """The stages of a model; ``rank_of`` is along the pipeline axis, ``flops`` are fractions."""

    cuts: tuple[Any, ...]
    rank_of: tuple[int, ...]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]
    # The stages that use a weight, in ascending order; a framework chooses the keys.
    of_weight: Mapping[Any, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.rank_of)

    def of_rank(self, rank: int) -> list[int]:
        """The stages that a rank of the pipeline axis holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.rank_of) if holder == rank]

    def holders(self, weight: Hashable) -> list[int]:
        """The ranks of the pipeline axis that hold a weight, in ascending order."""
        return sorted({self.rank_of[stage] for stage in self.of_weight[weight]})

    def described(self) -> str:
        """A line for each stage, for the log."""
        lines = []
        for stage, rank in enumerate(self.rank_of):
            where = "" if rank == stage else f" (rank {rank} of the pipeline)"
            cut = f"; cut after {self.cuts[stage]}" if stage < len(self.cuts) else ""
            lines.append(
                f"stage {stage}{where}: {self.flops[stage]:.0%} of the FLOPs, "
                f"{megabytes(self.nbytes[stage])} MB of weights{cut}"
            )
        return "\n    ".join(lines)


def megabytes(nbytes: int) -> str:
    """Bytes as a number of 10^6 bytes, in three digits: ``0.412``, ``41.2``; from 100 on whole."""
    number = nbytes / 1e6
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def require_places(
    balance: str, stages: int, places: Sequence[CutPoint], part: str, condition: str
) -> None:
    """Raise unless a model can be cut into so many stages; two arguments are for the errors."""
    if balance not in BALANCES:
        raise ValueError(
            f"stages must be {' or '.join(map(repr, BALANCES))}, or a list of the {part}s after "
            f"which to cut, got {balance!r}"
        )
    if len(places) < stages - 1:
        names = ", ".join(place.name for place in places) or f"no {part} at all"
        raise ValueError(
            f"a pipeline of {stages} stages needs {stages - 1} places to cut the model, but there "
            f"are {len(places)}: after {names}. A model can be cut {condition}"
        )


def named_cuts(
    names: Sequence[str], places: Sequence[P], stages: int, reasons: str = ""
) -> list[P]:
    """The cut points with these names; ``reasons`` says why the model cannot be cut elsewhere."""
    by_name = {place.name: place for place in places}
    for name in names:
        if name not in by_name:
            raise ValueError(
                f"stages={list(names)}: the model cannot be cut after {name!r}, only after "
                f"{', '.join(by_name) or 'no layer at all'}{reasons}"
            )
    if len(set(names)) != stages - 1:
        raise ValueError(
            f"stages={list(names)} names {len(set(names))} cuts, but a pipeline of {stages} stages "
            f"has {stages - 1}"
        )
    return sorted((by_name[name] for name in set(names)), key=lambda place: place.time)


def balanced_cuts(
    stages: int, places: Sequence[P], cost: Callable[[int, int], float]
) -> tuple[list[P], float]:
    """The cuts that make the largest stage smallest, by dynamic programming, and its fraction.

    Equally good cuts send the fewest bytes between stages. ``cost`` is that of a stage between two
    places: 0 is the beginning of the model, 1 the first place, and so on to the model's end.
    """
    last = len(places) + 1
    costs = {(i, j): cost(i, j) for j in range(1, last + 1) for i in range(j)}
    crossing = [0, *(place.nbytes for place in places), 0]
    best: dict[int, tuple[float, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(stages):
        best = {
            j: min(
                (max(worst, costs[i, j]), sent + crossing[j], (*chosen, j))
                for i, (worst, sent, chosen) in best.items()
                if i < j
            )
            for j in range(1, last + 1)
            if any(i < j for i in best)
        }
    largest, _, chosen = best[last]
    return [places[j - 1] for j in chosen[:-1]], largest / max(costs[0, last], 1)


def sizes_of(samples: int, count: int) -> list[int]:
    """The numbers of samples of ``count`` micro-batches; they differ by at most one."""
    return [samples // count + (i < samples % count) for i in range(count)]
