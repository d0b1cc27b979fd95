"""Slurm's short form of many host names, ``gpu[01-03,7],login1``, written out."""

import itertools
import re
from collections.abc import Iterator

# Names, commas between them, and brackets with what they hold.
_TOKEN = re.compile(r"\[([^][]*)\]|([^][,]+)|(,)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
# The largest clusters have tens of thousands of hosts; a wrong list must not fill the memory.
_MOST_HOSTS = 100_000


def expanded(nodelist: str) -> list[str]:
    """The names that ``nodelist`` stands for, in its order.

    ``gpu[08-10,3]`` is gpu08, gpu09, gpu10 and gpu3; of several brackets in one name the last
    runs fastest: ``rack[1-2]node[3-4]`` is rack1node3, rack1node4, rack2node3 and rack2node4.

    Raises:
        ValueError: it is no such list; the message says why.
    """
    names: list[str] = []
    for parts in _items(nodelist):
        size = 1
        for part in parts:
            size *= len(part)
        if len(names) + size > _MOST_HOSTS:
            raise ValueError(f"stands for more than {_MOST_HOSTS} hosts")
        names.extend(map("".join, itertools.product(*parts)))
    return names


def _items(nodelist: str) -> Iterator[list[list[str]]]:
    """Of each name between commas its parts, each part with the texts that it can be."""
    parts: list[list[str]] = []
    position = 0
    while position < len(nodelist):
        token = _TOKEN.match(nodelist, position)
        if token is None:
            raise ValueError(f"has a bracket without its other half at {nodelist[position:]!r}")
        position = token.end()
        inside, text, comma = token.groups()
        if comma is None:
            parts.append([text] if inside is None else _texts(inside))
            continue
        yield _not_empty(parts)
        parts = []
    yield _not_empty(parts)


def _not_empty(parts: list[list[str]]) -> list[list[str]]:
    if not parts:
        raise ValueError("has an empty name")
    return parts


def _texts(inside: str) -> list[str]:
    """The numbers that stand in one pair of brackets, with their leading zeros."""
    texts: list[str] = []
    for piece in inside.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None or max(map(len, piece.split("-"))) > 9:
            raise ValueError(f"has {piece!r} in brackets, which is neither a number nor a range")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"has the range {piece!r}, which ends before it starts")
        if len(texts) + last - first >= _MOST_HOSTS:
            raise ValueError(f"stands for more than {_MOST_HOSTS} hosts")
        texts.extend(str(number).zfill(len(match[1])) for number in range(first, last + 1))
    return texts
