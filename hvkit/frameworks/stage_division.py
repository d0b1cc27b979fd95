"""How pipelines are divided: cuts that make stages even, and the sizes of micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def balanced_cuts(
    stages: int, costs: Mapping[tuple[int, int], float], crossing: Sequence[int]
) -> list[int]:
    """The cuts that make the largest stage smallest, by dynamic programming.

    Of cuts that are equal in this, those with the fewest bytes between stages.

    Args:
        stages: how many; at most one more than there are places.
        costs: of what is between each place and each later one. Place 0 is the beginning of the
            model, the last one its end.
        crossing: by place, the bytes that a cut there sends.

    Returns:
        The numbers of the chosen places, in ascending order, one less than there are stages.
    """
    last = len(crossing) - 1
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
    *chosen, _ = best[last][2]
    return chosen


def sizes_of(samples: int, count: int) -> list[int]:
    """The numbers of samples of so many micro-batches; they differ by at most one."""
    return [samples // count + (i < samples % count) for i in range(count)]
