"""How both frameworks send gradients: in a few collectives.

A few messages are enough to send the first while backward computes the rest; each further one costs
another negotiation between the ranks. Large models get more messages, because nothing is left to
compute behind the last one: it has to stay short.
"""

from collections.abc import Sequence

# Sizes in bytes.
_MOST_CHUNKS_OF_SMALL_MODELS = 4
_SMALLEST = 1 << 20
_LARGEST = 32 << 20


def chunks(sizes: Sequence[int]) -> list[list[int]]:
    """Cut a sequence of gradients into runs that travel together.

    Args:
        sizes: bytes of each gradient, in the order in which backward makes them ready.

    Returns:
        Lists of positions in ``sizes``: every position once, in order, no list empty.
    """
    target = min(max(-(-sum(sizes) // _MOST_CHUNKS_OF_SMALL_MODELS), _SMALLEST), _LARGEST)
    runs: list[list[int]] = []
    filled = 0
    for position, size in enumerate(sizes):
        if not runs or filled + size > target:
            runs.append([])
            filled = 0
        runs[-1].append(position)
        filled += size
    return runs
