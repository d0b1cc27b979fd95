"""How ranks that own parameters send them to each other: in pieces, several parameters in each."""

from __future__ import annotations

from collections.abc import Sequence

# Bytes of all ranks' parameters in a piece; bounds the memory for copies.
_LARGEST = 32 << 20


def pieces(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Divide parameters into the pieces in which their owners send them.

    Args:
        sizes: bytes of each parameter.
        owners: the rank that owns each.
        ranks: how many ranks there are.

    Returns:
        For each piece a list of positions in ``sizes`` for each rank: what it sends. Every position
        comes once.
    """
    runs: list[list[list[int]]] = [[] for _ in range(ranks)]
    filled = [0] * ranks
    for position, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        if not runs[owner] or filled[owner] + size > _LARGEST // ranks:
            runs[owner].append([])
            filled[owner] = 0
        runs[owner][-1].append(position)
        filled[owner] += size
    longest = max(map(len, runs))
    return [[run[at] if at < len(run) else [] for run in runs] for at in range(longest)]
