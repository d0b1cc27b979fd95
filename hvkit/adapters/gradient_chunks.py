"""How both frameworks send gradients: in a few collectives, on request in 16 bits.

A few messages are enough to send the first while backward computes the rest; each further one costs
another negotiation between the ranks. Large models get more messages, because nothing is left to
compute behind the last one: it has to stay short.

Horovod's allreduce would sum 16-bit gradients in 16 bits, where float16 overflows and every rank
adds a rounding error, and it has no bfloat16. The adapters therefore build compressed allreduces
from two other collectives. An all-to-all gives each rank its share of every rank's gradients, and
the rank averages that share in float32. An allgather then brings the means to all ranks. Both send
half the bytes of a ring allreduce in float32.
"""

from collections.abc import Sequence

COMPRESSIONS = ("none", "fp16", "bf16")

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
