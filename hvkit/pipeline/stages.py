"""How pipelines are divided: cuts that make stages even, and the sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

BALANCES = "flops", "bytes"
"""What the largest stage should have least of."""


class CutPoint(Protocol):
    """Where a model can be cut.

    Attributes:
        time: orders the places of a model.
        nbytes: that a cut there sends.
    """

    @property
    def time(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


P = TypeVar("P", bound=CutPoint)


@dataclass(frozen=True)
class Division:
    """What each stage of a model has.

    Attributes:
        cuts: between each stage and the next; as text they name the layer.
        rank_of: by stage, the rank along the pipeline axis that holds it.
        flops: by stage, the share of forward, from 0 to 1.
        nbytes: by stage, of its weights.
    """

    cuts: tuple[Any, ...]
    rank_of: tuple[int, ...]
    flops: tuple[float, ...]
    nbytes: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.rank_of)

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


def check_balance(balance: str, parts: str) -> None:
    """Raise unless this is one of ``BALANCES``.

    Args:
        parts: what a model of this framework is made of, for the error.
    """
    if balance not in BALANCES:
        raise ValueError(
            f"stages must be {' or '.join(map(repr, BALANCES))}, or a list of the {parts} after "
            f"which to cut, got {balance!r}"
        )


def named_cuts(
    names: Sequence[str], places: Mapping[str, P], stages: int, reasons: str = ""
) -> list[P]:
    """The places that a script has chosen.

    Args:
        names: of the layers after which to cut.
        places: all there are, by this name.
        stages: how many stages there must be.
        reasons: why there are no others, for errors.

    Raises:
        ValueError: a name is none of the places, or there are too few names or too many.
    """
    for name in names:
        if name not in places:
            raise ValueError(
                f"stages={list(names)}: the model cannot be cut after {name!r}, only after "
                f"{', '.join(places) or 'no layer at all'}{reasons}"
            )
    if len(set(names)) != stages - 1:
        raise ValueError(
            f"stages={list(names)} names {len(set(names))} cuts, but a pipeline of {stages} stages "
            f"has {stages - 1}"
        )
    return sorted((places[name] for name in set(names)), key=lambda place: place.time)


def balanced_cuts(
    stages: int, places: Sequence[P], cost: Callable[[int, int], float]
) -> tuple[list[P], float]:
    """The cuts that make the largest stage smallest, by dynamic programming.

    Of cuts that are equal in this, those with the fewest bytes between stages.

    Args:
        stages: how many; at most one more than there are places.
        places: in ascending order.
        cost: of what is between two places, by their numbers: 0 is the beginning of the model, 1
            the first place, and so on to the model's end.

    Returns:
        One place less than there are stages, and the share of the largest stage.
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
    """The numbers of samples of so many micro-batches; they differ by at most one."""
    return [samples // count + (i < samples % count) for i in range(count)]
