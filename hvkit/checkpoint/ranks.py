"""What belongs to single ranks: random states, and what layers keep from a rank's own batches."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.adapters.fingerprints import Compared, Rows
from hvkit.checkpoint import randomness
from hvkit.checkpoint.parts import Arrays, Part

FILE = "ranks.npz"

_RANDOM = "random"
# Between the rank, the part and the array's name.
_SEPARATOR = "/"


def capture(parts: Sequence[Part]) -> dict[str, Arrays]:
    """This rank's random state and its own arrays of each part, by the part's name."""
    return {_RANDOM: randomness.capture()} | {part.name: part.own() for part in parts}


def compared(parts: Sequence[Part]) -> tuple[list[Compared], list[Rows]]:
    """What all ranks must hold alike of all parts, and the fingerprints; nothing with one rank."""
    found = [(part.name, *part.compared()) for part in parts if runtime.size() > 1]
    named = [
        replace(each, label=f"{each.label} of {name}") for name, kinds, _ in found for each in kinds
    ]
    return named, [row for _, _, rows in found for row in rows]


def digests(own: Mapping[str, Arrays]) -> dict[str, bytes]:
    """What tells arrays apart, for :func:`unlike`."""
    return {
        f"{part}{_SEPARATOR}{name}": hashlib.sha256(array.tobytes()).digest()
        for part, arrays in own.items()
        if part != _RANDOM
        for name, array in arrays.items()
    }


def unlike(own: Mapping[str, Arrays], first: Mapping[str, bytes]) -> dict[str, Arrays]:
    """Without the arrays that are those of rank 0, which are in the parts' own files.

    Seeds stay: a rank that loads keeps its own when the parts' files are loaded.
    """
    mine = digests(own)
    return {
        part: {
            name: array
            for name, array in arrays.items()
            if part == _RANDOM
            or name.startswith("seed-")
            or mine[key := f"{part}{_SEPARATOR}{name}"] != first.get(key)
        }
        for part, arrays in own.items()
    }


def save(path: Path, everyone: Sequence[Mapping[str, Arrays]]) -> None:
    """Write what all ranks have, in rank order."""
    values = {
        _SEPARATOR.join((str(rank), part, name)): array
        for rank, own in enumerate(everyone)
        for part, arrays in own.items()
        for name, array in arrays.items()
    }
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **values)


def put_back(content: bytes, parts: Sequence[Part], rank: int, *, same_size: bool) -> bool:
    """Give this rank what the rank of its number had; returns whether there was one.

    Args:
        content: of the file that :func:`save` wrote.
        parts: those that were loaded.
        rank: this rank.
        same_size: whether as many ranks resume as saved. If not, layers keep rank 0's statistics.
    """
    found: dict[str, Arrays] = {}
    with np.load(io.BytesIO(content)) as values:
        for key in values.files:
            theirs, part, name = key.split(_SEPARATOR, 2)
            if int(theirs) == rank:
                found.setdefault(part, {})[name] = values[key]
    if not found:
        return False
    for part in parts:
        own: dict[str, Any] = found.get(part.name, {})
        part.load_own({n: array for n, array in own.items() if same_size or n.startswith("seed-")})
    randomness.put_back(found[_RANDOM])
    return True
