"""How gradients and weights are cut into messages.

A few messages are enough to send the first while backward computes the rest; each further one costs
another negotiation between the ranks. Large models get more messages, because nothing is left to
compute behind the last one: it has to stay short.
"""

from collections.abc import Sequence

# Sizes in bytes.
_MOST_CHUNKS_OF_SMALL_MODELS = 4
_SMALLEST = 1 << 20
# A GPU computes the rest before the host has sent a small one.
_SMALLEST_ON_GPU = 8 << 20
_LARGEST = 32 << 20


def chunks(sizes: Sequence[int], *, on_gpu: bool = False) -> list[list[int]]:
    """Cut a sequence of gradients into runs that travel together.

    Args:
        sizes: bytes of each gradient, in the order in which backward makes them ready.
        on_gpu: whether a GPU computes them.

    Returns:
        Lists of positions in ``sizes``: every position once, in order, no list empty.
    """
    smallest = _SMALLEST_ON_GPU if on_gpu else _SMALLEST
    target = min(max(-(-sum(sizes) // _MOST_CHUNKS_OF_SMALL_MODELS), smallest), _LARGEST)
    return runs_of(sizes, target)


def runs_of(sizes: Sequence[int], most: int) -> list[list[int]]:
    """Cut a sequence into runs of positions, each of at most ``most`` in all or of one position."""
    runs: list[list[int]] = []
    filled = 0
    for position, size in enumerate(sizes):
        if not runs or filled + size > most:
            runs.append([])
            filled = 0
        runs[-1].append(position)
        filled += size
    return runs


# Bytes of all ranks' parameters in a piece; bounds the memory for copies.
_LARGEST_OF_OWNERS = 32 << 20


def pieces(sizes: Sequence[int], owners: Sequence[int], ranks: int) -> list[list[list[int]]]:
    """Divide parameters that each belong to a rank into the pieces in which their owners send them.

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
        if not runs[owner] or filled[owner] + size > _LARGEST_OF_OWNERS // ranks:
            runs[owner].append([])
            filled[owner] = 0
        runs[owner][-1].append(position)
        filled[owner] += size
    longest = max(map(len, runs))
    return [[run[at] if at < len(run) else [] for run in runs] for at in range(longest)]
