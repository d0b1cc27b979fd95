"""What forward passes learn outside of normalisation layers: do ranks average it, and is it alike?

Batch norm, codebooks and running means learn from the samples that a rank sees. hvkit averages the
statistics of normalisation layers itself; of anything else it does not know what it means.
``hvkit.average_buffers`` averages that, and rank 0 names what differs otherwise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from hvkit.communication import collectives
from hvkit.communication.group import Group, all_ranks
from hvkit.main_rank import warn_once
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, Rows

_MOST_NAMED = 5


# Digests of the lists of buffers that have been averaged; the same on every rank.
_averaged: set[bytes] = set()


def require_same_buffers(facts: Sequence[str]) -> bool:
    """Raise on every rank unless all average the same buffers; a collective, in one message.

    Returns:
        Whether these are averaged for the first time; the same on every rank.
    """
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    if len(set(collectives.share("average_buffers", None, digest))) > 1:
        advice = "call average_buffers with the same module on every rank"
        collectives.require_equal("module", facts, advice, "average_buffers")
    first = digest not in _averaged
    _averaged.add(digest)
    return first


def warn_of_integers(compared: Sequence[Compared], rows: Sequence[Rows]) -> None:
    """Name buffers that have no mean, if they differ between ranks; a collective."""
    if found := _unlike("average_buffers", compared, rows, all_ranks()):
        warn_once(
            "integer buffers",
            f"average_buffers leaves {found} unlike rank 0's: integers and flags have no mean. Use "
            'a floating-point dtype, or hvkit.allreduce(value, op="sum") in the forward pass',
        )


def warn_of_unlike(
    call: str, compared: Sequence[Compared], rows: Sequence[Rows], group: Group | None = None
) -> None:
    """Say once what differs between ranks although hvkit averages it nowhere; a collective.

    Args:
        call: the user's call.
        compared: what the rows belong to.
        rows: fingerprints of this rank's.
        group: the ranks that take part; None for all.
    """
    group = group or all_ranks()
    if found := _unlike(call, compared, rows, group):
        warn_once(
            "unlike buffers",
            f"not the same on all ranks: {found}; a file would hold rank {group.first}'s. If the "
            "forward pass learns it from a rank's samples, call hvkit.average_buffers(module) "
            "after each step. If a module only follows the one that is trained, pass both, "
            "hvkit.distribute([model, teacher], optimizer). If it is a single rank's, ignore this",
            group,
        )


def _unlike(call: str, compared: Sequence[Compared], rows: Sequence[Rows], group: Group) -> str:
    """``buffer codebook of rank 1``, and how many more; empty if all ranks have the same."""
    own = np.array(rows, np.int64).tobytes()
    if len(set(collectives.gather(call, hashlib.sha256(own).digest(), group))) == 1:
        return ""
    # Labels of rank 0 only: Keras numbers layers, and a rank may have made more.
    of_ranks = collectives.gather(call, own, group)
    if len(set(map(len, of_ranks))) > 1:
        return "the number of buffers"
    shape = len(of_ranks), len(compared), fingerprints.WIDTH
    table = np.frombuffer(b"".join(of_ranks), np.int64).reshape(shape)
    found = fingerprints.unlike(table, compared, group.members)
    texts = [f"{label} of {fingerprints.named_ranks(ranks)}" for label, ranks in found.items()]
    more = f" and {len(texts) - _MOST_NAMED} more" if len(texts) > _MOST_NAMED else ""
    return ", ".join(texts[:_MOST_NAMED]) + more
