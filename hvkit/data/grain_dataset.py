"""Grain's ``MapDataset``: each rank gets every N-th element."""

from __future__ import annotations

import hashlib
import pickle
import sys
from typing import Any

from hvkit.data.rank_samples import Share

# Elements by which ranks notice that their data differs: each is read for it.
_COMPARED = 4


def is_of_grain(data: object) -> bool:
    """Whether this is a data set or a loader of Grain."""
    grain = sys.modules.get("grain")
    return grain is not None and isinstance(
        data, grain.MapDataset | grain.IterDataset | grain.DataLoader
    )


def shard_grain(data: Any, share: Share) -> tuple[Any, list[str]]:
    """This rank's elements as a ``MapDataset``, and the facts that must be equal on all ranks.

    Args:
        data: a ``grain.MapDataset``; shuffles and maps before are those of all elements.
        share: rank and size.

    Raises:
        TypeError: it is an ``IterDataset`` or a ``DataLoader``, whose elements have no numbers.
    """
    import grain

    if isinstance(data, grain.DataLoader):
        raise TypeError(
            "data is a grain.DataLoader, whose sampler chooses its elements: pass the sampler "
            "shard_options=grain.sharding.ShardOptions(hvkit.rank(), hvkit.size(), "
            "drop_remainder=True) instead"
        )
    if not isinstance(data, grain.MapDataset):
        raise TypeError(
            "data is a grain.IterDataset, whose elements have no numbers: call hvkit.shard with "
            "the MapDataset, before .to_iter_dataset()"
        )
    length = len(data)
    facts = [f"a MapDataset of {length} elements"]
    if share.size == 1 or not length:
        return data, facts
    facts.append(f"elements of sha256 {_digest(data, length)}")
    missing = -length % share.size
    # One that repeats without end has the length of the largest integer.
    if missing and not share.exact and length < sys.maxsize:
        repeated = data[:missing] if missing <= length else data.repeat(missing)[:missing]
        data = grain.MapDataset.concatenate([data, repeated])
    return data[share.rank :: share.size], facts


def _digest(data: Any, length: int) -> str:
    """A sha256 of a few elements."""
    digest = hashlib.sha256()
    for number in sorted({n * (length - 1) // (_COMPARED - 1) for n in range(_COMPARED)}):
        digest.update(pickle.dumps(data[number]))
    return digest.hexdigest()
