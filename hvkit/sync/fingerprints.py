"""Fingerprints of tensors, which show whether ranks have equal ones, and how far they differ.

A fingerprint is a row of three 64-bit numbers:

- a hash of the tensor's bits: a sum modulo 2^64 with an odd, irregular multiplier for each element,
  so that exchanged elements change it. Equal bits have equal hashes, also those of NaN;
- the sum of its values times irregular weights of mean 0 and variance 1: a random projection
  (Johnson and Lindenstrauss, 1984). The squared difference of two such sums is on average the
  squared distance of the two tensors, so ranks can estimate the distance without sending tensors;
- the squared length of the tensor.

Before the first update every bit must agree, because all ranks got rank 0's. Later, rounding may
drive ranks apart, on different kinds of processors or on GPUs that add in no fixed order. Rank 0
warns of rounding; larger differences are errors. Buffers that hvkit does not average itself may
differ, as codebooks do; rank 0 names them, and ``hvkit.average_buffers`` averages them.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.main_rank import warn_once
from hvkit.runtime import Group, all_ranks
from hvkit.watch.rank_errors import mark_as_shown_by

Rows = np.ndarray[Any, np.dtype[np.int64]]

WIDTH = 3  # numbers in a row

BLOCK = 1 << 20  # elements hashed at a time; also the number of multipliers before they repeat

PRIME = 0x100000001B3  # the factor of the hash so far before each further block

# Distances up to this part of a tensor's length count as rounding, as do distances up to this many
# units in the last place, for dtypes with few digits.
_ROUNDING = 1e-4
_UNITS = 4

_MOST_BUFFERS_NAMED = 5


@functools.cache
def multipliers() -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Odd numbers of shape ``(BLOCK,)``, the same on every machine.

    They are the first outputs of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom
    number generators", 2014), made odd.
    """
    z = np.arange(1, BLOCK + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)


@functools.cache
def projection_factors() -> np.ndarray[Any, np.dtype[np.float64]]:
    """Irregular numbers of shape ``(BLOCK,)``, evenly spread from -sqrt(3) to sqrt(3).

    With signs alone, the same change of every element of a small tensor could cancel out.
    """
    spread = (multipliers() >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1
    return spread * math.sqrt(3)


def fingerprint(array: np.ndarray[Any, Any]) -> Rows:
    """The row of one array, int64 of shape ``(WIDTH,)``; also for dtypes from ml_dtypes."""
    flat = np.ascontiguousarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = flat.view(flat.real.dtype)
    words = flat.view(f"u{flat.dtype.itemsize}")
    # NumPy gives the floats of ml_dtypes the kind "V".
    has_values = flat.dtype.kind in "fV"
    bits, projection, square = np.zeros(1, np.uint64), 0.0, 0.0
    with np.errstate(all="ignore"):
        for b, start in enumerate(range(0, flat.size, BLOCK)):
            block = words[start : start + BLOCK]
            factors = multipliers()[: block.size]
            bits = bits * np.uint64(PRIME) + (block.astype(np.uint64) * factors).sum()
            if has_values:
                values = flat[start : start + BLOCK].astype(np.float64)
                sign = np.sign(projection_factors()[b % BLOCK])
                projection += float(sign * (values @ projection_factors()[: values.size]))
                square += float(values @ values)
    return row(int(bits.view(np.int64)[0]), projection, square)


def row(bits: int, projection: float = 0.0, square: float = 0.0) -> Rows:
    """A row from its numbers; from the hash alone for values without a distance."""
    return np.array([bits, *np.array([projection, square]).view(np.int64)], np.int64)


def hashed(text: str) -> Rows:
    digest = hashlib.sha256(text.encode()).digest()
    return row(int.from_bytes(digest[:8], "little", signed=True))


@dataclass(frozen=True)
class Compared:
    """A tensor that ranks compare by its row."""

    label: str  # the name in messages, such as ``"parameter 0.weight"``
    # The distance from 1 to the next number of its dtype; 0 for dtypes that do not round.
    unit: float = 0.0
    fix: str = ""  # the advice if it differs; empty for the advice about weights


def describe_differences(
    rows_by_rank: Rows,
    compared: Sequence[Compared],
    exact: bool,
    members: Sequence[int] | None = None,
) -> tuple[str, bool]:
    """The message about differences, empty for none, and whether they are an error.

    The rows have the shape ``(ranks, len(compared), WIDTH)``. With ``exact``, rounding is an error,
    too. ``members`` are the ranks' numbers among all; None if these are all.
    """
    distances = _distances(rows_by_rank)
    if not distances:
        return "", False
    beyond = list(distances) if exact else _beyond_rounding(distances, compared)
    first = (beyond or list(distances))[0]
    members = members or range(len(rows_by_rank))
    ranks = _unlike_first(rows_by_rank[:, first], members)
    where = f"{compared[first].label} of {ranks} differs from that of rank {members[0]}"
    if beyond:
        rounded = distances[first] <= _UNITS * compared[first].unit < _ROUNDING
        fix = compared[first].fix or (_ROUNDED if rounded else _FIX)
        return f"{where}{_by(distances[first])}; {fix}", True
    return (
        f"{where}{_by(max(distances.values()))}: this is rounding, as between different kinds of "
        "processors, on GPUs, or where a rank adds something to weights and subtracts it again; "
        "hvkit warns of it once",
        False,
    )


def _distances(rows_by_rank: Rows) -> dict[int, float]:
    """The distances of the tensors that differ, by number."""
    bits = rows_by_rank[:, :, 0]
    differing = np.flatnonzero((bits != bits[0]).any(axis=0)).tolist()
    return {i: _distance(rows_by_rank[:, i]) for i in differing}


def _beyond_rounding(distances: Mapping[int, float], compared: Sequence[Compared]) -> list[int]:
    return [i for i, d in distances.items() if not d <= max(_ROUNDING, _UNITS * compared[i].unit)]


def _unlike_first(rows: Rows, members: Sequence[int]) -> str:
    """The members whose rows of a tensor differ from the first one's, in words."""
    return ranks_text([members[at] for at in np.flatnonzero(rows[:, 0] != rows[0, 0]).tolist()])


_FIX = (
    "weights or an optimizer's state were loaded or changed on some ranks only, after "
    "hvkit.distribute: load before the call, or on every rank, or with hvkit.Checkpoint; run a "
    "layer that sets weights from its first batch before the call; perturb weights equally on all "
    "ranks, from averaged gradients (buffers and non-trainable variables may differ: keep values "
    "of a single rank there)"
)

_ROUNDED = (
    "this is rounding, as where a rank adds a perturbation of its own to weights and subtracts it "
    "again (sharpness-aware methods, weight noise): put back a copy of the weights in place of "
    "subtracting, so that all ranks begin the first update with the same bits"
)


def _distance(rows: Rows) -> float:
    """The largest distance from rank 0, divided by rank 0's length; infinite if unknown."""
    _, projections, squares = np.ascontiguousarray(rows.T).view(np.float64)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(squares)
        apart = np.maximum(np.abs(projections - projections[0]), np.abs(lengths - lengths[0]))
        far = apart.max() / lengths[0]
    # Equal projections of different bits give no estimate.
    return float(far) if far > 0 else float("inf")


def _by(distance: float) -> str:
    return f" by about {distance:.1g} times its norm" if np.isfinite(distance) else ""


def judge(
    rows_by_rank: Rows,
    compared: Sequence[Compared],
    exact: bool,
    group: Group,
    members: Sequence[int] | None = None,
) -> str:
    """The error message that all ranks must raise, or an empty one; the first warns of rounding.

    Rows and ``exact`` are as for ``describe_differences``. The group raises the error; the rows are
    those of its ``members`` only, unless that is None.
    """
    text, error = describe_differences(rows_by_rank, compared, exact, members or group.members)
    if text and not error:
        warn_once("rounding", text, group)
    return text if error else ""


def require_same(
    call: str,
    compared: Sequence[Compared],
    rows: Sequence[Rows],
    group: Group | None = None,
    part: str = "",
) -> bool:
    """Raise on every rank unless all ranks hold the same, up to rounding; a collective.

    Ranks with the same ``part`` of a model must have the same. Return whether they hold the same
    bit for bit.
    """
    labels = [each.label for each in compared]
    digest = hashlib.sha256(repr(labels).encode() + b"".join(r.tobytes() for r in rows)).digest()
    group = group or all_ranks()
    digests = collectives.gather(call, (part, digest), group)
    by_part: dict[str, list[int]] = {}
    for index, (its_part, _) in enumerate(digests):
        by_part.setdefault(its_part, []).append(index)
    if len(set(digests)) == len(by_part):
        return True
    gathered = collectives.gather(call, (labels, list(rows)), group)
    first_labels = gathered[0][0]
    for rank, (its_labels, _) in zip(group.members, gathered, strict=True):
        if its_labels != first_labels:
            other = sorted(set(its_labels) ^ set(first_labels))
            error = RanksDisagreeError(
                f"rank {rank} and rank {group.first} do not hold the same: only one of them has "
                f"{other[0]}; {_FIX}"
            )
            raise mark_as_shown_by(error, group.first)
    for indices in by_part.values():
        table = np.array([gathered[index][1] for index in indices])
        members = [group.members[index] for index in indices]
        if text := judge(table, compared, exact=False, group=group, members=members):
            raise mark_as_shown_by(RanksDisagreeError(text), group.first)
    return False


def first_unlike(
    lists: Sequence[Collection[int]], group: Group | None = None
) -> tuple[int, int, int] | None:
    """A number that some ranks list and others do not, a rank that does, and one that does not."""
    members = group.members if group else range(len(lists))
    first = members[0]
    for rank, listed in zip(members, lists, strict=True):
        if not_in_both := set(listed) ^ set(lists[0]):
            number = min(not_in_both)
            return (number, rank, first) if number in listed else (number, first, rank)
    return None


def of_gradients(rows: Sequence[Rows]) -> Rows:
    """A hash of a rank's gradients, and whether to compare it: all are finite, and one is not 0."""
    table = np.array(rows, np.int64).reshape(-1, WIDTH)
    squares = np.ascontiguousarray(table[:, 2]).view(np.float64)
    comparable = squares.any() and np.isfinite(squares).all()
    return np.array([fingerprint(table)[0], int(comparable)], np.int64)


def warn_of_equal_work(rows_by_rank: Rows, group: Group) -> bool:
    """Warn, once, if all ranks have the same gradients; return whether any were comparable."""
    if not rows_by_rank[:, 1].any():
        return False
    if rows_by_rank[:, 1].all() and (rows_by_rank[:, 0] == rows_by_rank[0, 0]).all():
        warn_once("equal work", _EQUAL_WORK, group)
    return True


_EQUAL_WORK = (
    "all ranks computed the same gradients, bit for bit, in the first step: they do the "
    "same work. Give each rank its own part of the data with hvkit.shard(data), and its own random "
    "numbers for dropout, augmentation and environments with seed + hvkit.rank()"
)


# Digests of the lists of buffers that were averaged before; the same on every rank.
_averaged: set[bytes] = set()


def require_same_buffers(facts: Sequence[str]) -> bool:
    """Raise unless all ranks average the same buffers; return whether for the first time."""
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    if len(set(collectives.gather_or_raise("average_buffers", None, digest))) > 1:
        advice = "call average_buffers with the same module on every rank"
        collectives.require_equal("module", facts, advice, "average_buffers")
    before = len(_averaged)
    _averaged.add(digest)
    return len(_averaged) > before


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
    """Name, once, buffers that differ because nothing averages them; a collective."""
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
    local = np.array(rows, np.int64).tobytes()
    if len(set(collectives.gather(call, hashlib.sha256(local).digest(), group))) == 1:
        return ""
    # Only rank 0's labels: Keras numbers layers, and a rank may have made more.
    by_rank = collectives.gather(call, local, group)
    if len(set(map(len, by_rank))) > 1:
        return "the number of buffers"
    shape = len(by_rank), len(compared), WIDTH
    table = np.frombuffer(b"".join(by_rank), np.int64).reshape(shape)
    found = [
        f"{compared[i].label} of {_unlike_first(table[:, i], group.members)}"
        for i in _beyond_rounding(_distances(table), compared)
    ]
    more = len(found) - _MOST_BUFFERS_NAMED
    return ", ".join(found[:_MOST_BUFFERS_NAMED]) + (f" and {more} more" if more > 0 else "")
