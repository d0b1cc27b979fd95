"""How many bytes this rank sends, by purpose; ``docs/architecture.md`` lists who sends what.

Counts are what the algorithms for large tensors send, on average over ranks: with N ranks a ring
allreduce of P bytes sends 2 (N-1)/N P from each (Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009), an allgather N-1 times a rank's own part, an
all-to-all or a broadcast (N-1)/N P. A message to a single rank counts once. Network headers, and
what Horovod's threads send in every cycle, are not counted. For small tensors MPI may choose an
algorithm that sends more, and where a host has several ranks, less goes to other hosts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Sent(NamedTuple):
    """Bytes and messages that a rank has sent for one purpose.

    Attributes:
        bytes: payload, without the network's headers.
        messages: collectives and messages to single ranks that were started.
    """

    bytes: int = 0
    messages: int = 0


_sent: dict[str, Sent] = {}
# The parameter server sends from another thread.
_counting = threading.Lock()
# Counters in graphs of TensorFlow, by purpose.
_in_graphs: list[tuple[str, Callable[[], Sent]]] = []


def traffic() -> dict[str, Sent]:
    """The bytes and messages that this rank has sent so far, by purpose.

    ``"gradients"`` are averaged in every step, ``"weights"`` agreed on at the end of a round or
    exchanged with a parameter server. ``"batch norm"`` are statistics, ``"checks"`` fingerprints
    and flags that show whether the ranks agree. ``"activations"`` are summed among ranks that
    divide layers. ``"start"`` is rank 0's state at the start. ``"objects"`` are Python objects and
    arrays: metrics, checkpoints, and what ``hvkit.allgather``, ``allreduce`` and ``broadcast``
    send. To count what some steps send, call this before and after them. One process sends nothing.

    Returns:
        By purpose: bytes and messages that this rank has sent.
    """
    with _counting:
        sent = dict(_sent)
    everything = [*sent.items(), *((purpose, read()) for purpose, read in _in_graphs)]
    total: dict[str, Sent] = {}
    for purpose, (size, messages) in everything:
        if messages:
            before = total.get(purpose, Sent())
            total[purpose] = Sent(before.bytes + size, before.messages + messages)
    return total


def count(purpose: str, size: int, messages: int = 1) -> None:
    with _counting:
        before = _sent.get(purpose, Sent())
        _sent[purpose] = Sent(before.bytes + size, before.messages + messages)


def count_in_graphs(purpose: str, read: Callable[[], Sent]) -> None:
    """Add the counts of a graph, which ``read`` returns."""
    _in_graphs.append((purpose, read))


def of_allreduce(size: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` ranks sends for an allreduce of ``size`` bytes."""
    return 2 * size * (ranks - 1) // ranks


def of_allgather(size: int, ranks: int) -> int:
    """Bytes that a rank sends for an allgather to which it contributes ``size`` bytes."""
    return size * (ranks - 1)


def of_messages(row: int, sent: Sequence[int], rank: int) -> tuple[int, int]:
    """Bytes and number of a rank's messages, with so many rows of ``row`` bytes to each rank."""
    others = [rows for to, rows in enumerate(sent) if rows and to != rank]
    return row * sum(others), len(others)


def of_alltoall(size: int, ranks: int) -> int:
    """Bytes that a rank sends for an all-to-all of ``size`` bytes; the same for a broadcast."""
    return size * (ranks - 1) // ranks
