"""``hvkit.batch``: each rank's batch as a part of one batch of all ranks.

A compiled function that gets such a batch computes with the rows of all ranks, as one process does
with the whole batch: XLA has each rank compute with its own rows, and adds the collectives.

It is also where ranks meet in Python once in a step, since steps of JAX are compiled. So here a
rank that has ended or sleeps is noticed, and the ranks compare their weights now and then: a batch
that has not come through here leaves them different, and nothing else would show it.
"""

from __future__ import annotations

import atexit
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from hvkit import runtime
from hvkit.communication.collectives import gather, raise_together
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.jax import places
from hvkit.frameworks.jax.arrays import (
    belongs_to_all,
    is_key,
    placed,
)
from hvkit.frameworks.jax.weight_checks import WeightChecks
from hvkit.main_rank import warn_once
from hvkit.watch.calls import named
from hvkit.watch.rank_errors import mark_as_shown_by

_checks: list[WeightChecks] = []

before_own_batch: list[Callable[[], None]] = []
"""Called in ``batch`` where each rank trains a model of its own, and so keeps its batch."""

# Whether ranks train models of their own; None before the first call of distribute.
_own: bool | None = None
# Batches of all ranks so far.
_batches = 0


def _warn_without_batches() -> None:
    """At the end of the script: say so if no batch has come, since nothing else would."""
    if not _batches and getattr(sys, "last_value", None) is None:
        warn_once(
            "no batches",
            "hvkit.distribute was called, but hvkit.batch never, nor fit of a Keras model that was "
            "passed: unless the script makes arrays of all ranks itself, each rank has trained a "
            "model of its own. Pass each batch through x, y = hvkit.batch(x, y)",
        )


def expect(check_every: int | None, models: Sequence[Any]) -> None:
    """From now on, compare the weights of these models now and then, with the batches."""
    if models:
        _checks.append(WeightChecks(check_every, models))


def refuse_other_batches(own: bool) -> None:
    """Raise if batches have been for the other kind of models: ``batch`` cannot know whose one is.

    Args:
        own: whether each rank trains a model of its own.

    Raises:
        ValueError: they have.
    """
    if _own is not None and _own is not own:
        raise ValueError(
            "in one script, models of JAX train either with hvkit.LocalSGD or hvkit.DiLoCo, where "
            "hvkit.batch leaves each rank its batch, or with strategies whose ranks share one: "
            "train them in two scripts"
        )


def begin(own: bool) -> None:
    """From now on, batches are each rank's own, or parts of one of all."""
    global _own
    if _own is None:
        atexit.register(_warn_without_batches)
    _own = own


@named("hvkit.batch")
def batch(*arrays: Any) -> Any:
    """Make one batch of all ranks' batches, for the compiled step of a JAX script.

        x, y = hvkit.batch(x, y)
        loss = train_step(model, optimizer, x, y)

    A collective: every rank must call it, in each step. The result has the rows of all ranks in
    rank order, each on its own rank's devices, and a function of ``jax.jit`` or ``nnx.jit``
    computes with all of them: its losses are means over the global batch, and so are the statistics
    of batch norm. If the ranks have different numbers of rows, as at the end of an epoch, or ones
    that their devices cannot share equally, every device gets all rows of that batch: the result is
    the same, and takes as long as in one process.

    With one process it returns what it was given, and so it does with ``LocalSGD`` and ``DiLoCo``,
    whose ranks train models of their own, and agree here on weights at the end of a round.

    Args:
        *arrays: of NumPy or JAX, tensors in host memory of PyTorch or TensorFlow, or pytrees of
            these. All have equally many rows, the first dimension.

    Returns:
        The same with arrays of JAX; one argument as itself, several as a tuple. What belongs to all
        ranks already stays as it is.

    Raises:
        ValueError: there is no array, or the numbers of rows differ; on every rank.
        RanksDisagreeError: the ranks' arrays differ in number, shape behind the rows, or dtype; or
            the ranks' weights differ.
        RankLostError: another rank has ended, or waits in another call.
    """
    global _batches
    given: Any = arrays[0] if len(arrays) == 1 else arrays
    if runtime.size() == 1:
        return given
    runtime.init("jax")
    if _own:
        _batches += 1
        for each in before_own_batch:
            each()
        return given
    leaves, structure = jax.tree.flatten(given)
    own: list[NDArray[Any]] = []
    problem: Exception | None = None
    try:
        if leaves and all(map(belongs_to_all, leaves)):
            return given
        own = [rows_of(leaf) for leaf in leaves]
        _require_rows(own)
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    raise_together(problem, "batch")
    return jax.tree.unflatten(structure, as_one(own, str(structure), "batch")[0])


def as_one(
    arrays: Sequence[NDArray[Any]], structure: str, call: str, model: Any = None
) -> tuple[list[jax.Array], list[int]]:
    """Arrays of all ranks' rows; a collective.

    Args:
        arrays: this rank's, with equally many rows.
        structure: what holds them, in words that are the same on every rank.
        call: the user's call.
        model: for which they are; None if that is not known.

    Returns:
        The arrays, and the number of rows of each part of the batch, in general each rank's.

    Raises:
        RanksDisagreeError: the ranks' arrays differ in anything but their number of rows, or those
            of one part differ at all.
    """
    counts = _counts(arrays, structure, call)
    for each in _checks:
        if model is None or each.are_of(model):
            each.next_batch(call)
    if not are_in_parts(counts):
        return [placed(each, _rows_of_all(each), places.whole) for each in arrays], counts
    rows, placing = sum(counts), places.by_rows()
    return [
        jax.make_array_from_process_local_data(placing, each, (rows, *each.shape[1:]))
        for each in arrays
    ], counts


def end(call: str, what: str) -> None:
    """Agree that no rank has another batch; a collective, in place of the next ``as_one``.

    Args:
        call: as that of ``as_one``.
        what: what has come to its end, for the error.

    Raises:
        RanksDisagreeError: a rank has; there, ``as_one`` raises it, too.
    """
    _require_all_or_none(gather(call, what))


def _require_all_or_none(everyone: Sequence[Any]) -> None:
    ended = [rank for rank, theirs in enumerate(everyone) if isinstance(theirs, str)]
    if ended and len(ended) < len(everyone):
        raise mark_as_shown_by(
            RanksDisagreeError(
                f"{everyone[ended[0]]} has stopped on {ranks_text(ended)} alone, before its last "
                "batch: in JAX all ranks compute each batch together, so a callback must stop it "
                "on every rank or none"
            ),
            0,
        )


def are_in_parts(counts: Sequence[int]) -> bool:
    """Whether each rank has its own rows of a batch, and not all of them.

    Args:
        counts: the number of rows of each part of the batch.
    """
    return len(set(counts)) == 1 and counts[0] % places.all_devices().shape[places.LOCAL] == 0


def rows_of(leaf: Any) -> NDArray[Any]:
    """A leaf of this rank's batch in host memory, with JAX's dtype.

    Raises:
        TypeError: it is no array of numbers.
        ValueError: it has no rows.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"hvkit.batch got an array of shape {leaf.shape} that belongs to all ranks already, "
            "beside one that does not: pass all arrays of a step in one call"
        )
    array = np.asarray(None if is_key(leaf) else leaf)
    if array.dtype.kind in "OSUMm":
        raise TypeError(
            f"hvkit.batch takes arrays of numbers, got {type(leaf).__name__}: pass keys and text, "
            "the same on every rank, to the step itself"
        )
    if not array.ndim:
        raise ValueError(
            f"hvkit.batch takes arrays with rows, got {leaf!r}: pass numbers, the same on every "
            "rank, to the step itself"
        )
    return np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _require_rows(arrays: Sequence[NDArray[Any]]) -> None:
    if not arrays:
        raise ValueError("hvkit.batch got no array: pass those of one step, hvkit.batch(x, y)")
    shapes = [each.shape for each in arrays]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "hvkit.batch takes arrays with equally many rows, the first dimension; got the shapes "
            f"{shapes}. Pass numbers and keys, the same on every rank, to the step itself"
        )


def _counts(arrays: Sequence[NDArray[Any]], structure: str, call: str) -> list[int]:
    """The number of rows of each part of the batch; a collective.

    Raises:
        RanksDisagreeError: the ranks' arrays differ in anything else, or those of one part differ.
    """
    global _batches
    n = _batches
    _batches += 1
    kinds = f"{[(each.dtype.name, each.shape[1:]) for each in arrays]} {structure}"
    content = 0
    part_of = places.parts_of_a_batch()
    several_give_one = max(part_of) + 1 < len(part_of)
    if n == 0 or (several_give_one and n & (n - 1) == 0):
        for each in arrays:
            content = zlib.crc32(each.tobytes(), content)
    # One small message a step: the kinds in full only if they differ.
    everyone = gather(call, (len(arrays[0]), zlib.crc32(kinds.encode()), content))
    _require_all_or_none(everyone)
    if len({theirs for _, theirs, _ in everyone}) > 1:
        said = gather(call, kinds)
        other = next(rank for rank, theirs in enumerate(said) if theirs != said[0])
        raise mark_as_shown_by(
            RanksDisagreeError(
                f"rank {other} passes a batch of arrays of {said[other]}, rank 0 of {said[0]}: "
                "pass arrays of the same dtypes, and the same shapes behind the rows, on every rank"
            ),
            0,
        )
    # Of each part, the first rank that gives it.
    first = [part_of.index(part) for part in range(max(part_of) + 1)]
    for rank, part in enumerate(part_of):
        if everyone[rank] != everyone[first[part]]:
            raise mark_as_shown_by(
                RanksDisagreeError(
                    f"ranks {first[part]} and {rank} pass different batches, but stand along the "
                    "axis tensor of one mesh, whose ranks compute with the same: give both the "
                    "same part of the data, hvkit.shard(data, mesh=mesh), and shuffle it with the "
                    "same seed"
                ),
                0,
            )
    if n == 0 < max(part_of) and len({everyone[rank][2] for rank in first}) == 1:
        warn_once(
            "equal work",
            f"{ranks_text(first)} train with the same first batch: "
            "give each rank its own part of the data with hvkit.shard(data)",
        )
    return [everyone[rank][0] for rank in first]


def _rows_of_all(array: NDArray[Any]) -> NDArray[Any]:
    """The rows of all parts of a batch, in their order; a collective."""
    engine = runtime.engine("jax")
    if places.position().along("tensor"):
        array = array[:0]  # another rank gives them
    data = engine.allgather(array.reshape(-1).view(np.uint8))
    return data.view(array.dtype).reshape(-1, *array.shape[1:])
