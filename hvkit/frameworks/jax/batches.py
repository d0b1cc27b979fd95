"""``hvkit.batch``: each rank's batch as a part of one batch of all ranks.

A compiled function that gets such a batch computes with the rows of all ranks, as one process does
with the whole batch: XLA has each rank compute with its own rows, and adds the collectives.

Steps of JAX are compiled, so ``hvkit.batch`` is also where ranks wait for each other in Python,
once in a step. Here they notice a rank that has ended or sleeps. Here they also compare their
weights now and then: a batch that has not come through here leaves the weights different, and
nothing else would show it. They compare models of NNX and Keras; weights in pytrees are out of
reach.
"""

from __future__ import annotations

import atexit
import operator
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import jax
import numpy as np
from numpy.typing import NDArray

from hvkit import runtime
from hvkit.communication.collectives import gather, together
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.frameworks.jax.arrays import (
    LOCAL,
    batch_parts,
    device_mesh,
    global_array,
    is_array,
    is_key,
    is_replicated,
    local_data,
    local_index,
    position,
    replicated,
    sharded_by_rows,
)
from hvkit.frameworks.jax.trees import is_global, is_nnx, named_leaves, weights_of
from hvkit.main_rank import warn_once
from hvkit.sync.fingerprints import Compared, fingerprint, require_same
from hvkit.watch.calls import named
from hvkit.watch.rank_errors import mark_as_shown_by

_FIX = (
    "each rank has trained with batches, keys or arrays of its own, or weights were set on some "
    "ranks only, after hvkit.distribute: pass each batch through hvkit.batch, and the same keys "
    "and other arguments to compiled functions on every rank; load weights before "
    "hvkit.distribute, on every rank, or with hvkit.Checkpoint"
)

_checks: list[WeightChecks] = []

before_local_batch: list[Callable[[], None]] = []
"""Called in ``batch`` where ranks train local weights, and so keep their batches."""

# Whether ranks train local weights; None before the first call of distribute.
_local: bool | None = None
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
    if models:
        _checks.append(WeightChecks(check_every, models))


def refuse_other_batches(local: bool) -> None:
    """Raise if an earlier model needs the other kind: ``batch`` does not know its model."""
    if _local is not None and _local is not local:
        raise ValueError(
            "in one script, models of JAX train either with hvkit.LocalSGD or hvkit.DiLoCo, where "
            "hvkit.batch leaves each rank its batch, or with strategies whose ranks share one: "
            "train them in two scripts"
        )


def begin(local: bool) -> None:
    """From now on, batches stay on their ranks, or become parts of a global batch."""
    global _local
    if _local is None:
        atexit.register(_warn_without_batches)
    _local = local


@named("hvkit.batch")
def batch(*arrays: Any) -> Any:
    """Make one batch of all ranks' batches, for the compiled step of a JAX script.

        x, y = hvkit.batch(x, y)
        loss = train_step(model, optimizer, x, y)

    A collective: every rank must call it, in each step. The result has the rows of all ranks in
    rank order, each row on the devices of its rank, and a function of ``jax.jit`` or ``nnx.jit``
    computes with all of them: its losses are means over the global batch, and so are the statistics
    of batch norm. If the ranks have different numbers of rows, as at the end of an epoch, or if
    their devices cannot divide these equally, every device gets all rows of that batch: the result
    is the same, and takes as long as in one process.

    With one process it returns what it was given, and so it does with ``LocalSGD`` and ``DiLoCo``,
    whose ranks train local weights, and agree on them here at the end of a round.

    Args:
        *arrays: of NumPy or JAX, tensors in host memory of PyTorch or TensorFlow, or pytrees of
            these. All have equally many rows, the first dimension.

    Returns:
        The same with arrays of JAX; one argument as itself, several as a tuple. Arrays of all ranks
        stay as they are.

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
    if _local:
        _batches += 1
        for each in before_local_batch:
            each()
        return given
    leaves, structure = jax.tree.flatten(given)
    if leaves and all(map(is_global, leaves)):
        return given
    with together("batch"):
        local = [rows_of(leaf) for leaf in leaves]
        _require_rows(local)
    return jax.tree.unflatten(structure, as_one(local, str(structure), "batch")[0])


def as_one(
    arrays: Sequence[NDArray[Any]], structure: str, call: str, model: Any = None
) -> tuple[list[jax.Array], list[int]]:
    """Arrays of all ranks' rows, and the number of rows of each part of the batch; a collective.

    This rank's arrays have equally many rows. The structure is that of the pytree around them, in
    words that are the same on every rank; the model is None if it is not known. RanksDisagreeError
    if the ranks' arrays differ in anything but their number of rows, or two ranks that give the
    same part have different arrays.
    """
    counts = _counts(arrays, structure, call)
    for each in _checks:
        if model is None or each.are_of(model):
            each.next_batch(call)
    if not are_in_parts(counts):
        return [global_array(each, _rows_of_all(each), replicated) for each in arrays], counts
    rows, sharding = sum(counts), sharded_by_rows()
    return [
        jax.make_array_from_process_local_data(sharding, each, (rows, *each.shape[1:]))
        for each in arrays
    ], counts


def end(call: str, what: str) -> None:
    """Agree that no rank has another batch; a collective, in place of the next ``as_one``.

    If one has, both calls raise RanksDisagreeError, which names the loop that has ended.
    """
    _require_all_or_none(gather(call, what))


def _require_all_or_none(by_rank: Sequence[Any]) -> None:
    ended = [rank for rank, entry in enumerate(by_rank) if isinstance(entry, str)]
    if ended and len(ended) < len(by_rank):
        raise _disagreement(
            f"{by_rank[ended[0]]} has stopped on {ranks_text(ended)} alone, before its last "
            "batch: in JAX all ranks compute each batch together, so a callback must stop it "
            "on every rank or none"
        )


def _disagreement(text: str) -> Exception:
    """An error that every rank raises, and rank 0 prints."""
    return mark_as_shown_by(RanksDisagreeError(text), 0)


def are_in_parts(counts: Sequence[int]) -> bool:
    return len(set(counts)) == 1 and counts[0] % device_mesh().shape[LOCAL] == 0


def rows_of(leaf: Any) -> NDArray[Any]:
    """A leaf of this rank's batch in host memory, with JAX's dtype."""
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
        raise ValueError("hvkit.batch got no array: pass the arrays of one step, hvkit.batch(x, y)")
    shapes = [each.shape for each in arrays]
    if not all(shapes) or len({shape[0] for shape in shapes}) > 1:
        raise ValueError(
            "hvkit.batch takes arrays with equally many rows, the first dimension; got the shapes "
            f"{shapes}. Pass numbers and keys, the same on every rank, to the step itself"
        )


def _counts(arrays: Sequence[NDArray[Any]], structure: str, call: str) -> list[int]:
    global _batches
    n = _batches
    _batches += 1
    layout = f"{[(each.dtype.name, each.shape[1:]) for each in arrays]} {structure}"
    content = 0
    part_of = batch_parts()
    several_give_one = max(part_of) + 1 < len(part_of)
    if n == 0 or (several_give_one and n & (n - 1) == 0):
        for each in arrays:
            content = zlib.crc32(each.tobytes(), content)
    # One small message a step: the texts in full only if they differ.
    by_rank = gather(call, (len(arrays[0]), zlib.crc32(layout.encode()), content))
    _require_all_or_none(by_rank)
    if len({checksum for _, checksum, _ in by_rank}) > 1:
        texts = gather(call, layout)
        other = next(rank for rank, text in enumerate(texts) if text != texts[0])
        raise _disagreement(
            f"rank {other} passes a batch of arrays of {texts[other]}, rank 0 of {texts[0]}: "
            "pass arrays of the same dtypes, and the same shapes behind the rows, on every rank"
        )
    # Of each part, the first rank that gives it.
    first = [part_of.index(part) for part in range(max(part_of) + 1)]
    for rank, part in enumerate(part_of):
        if by_rank[rank] != by_rank[first[part]]:
            raise _disagreement(
                f"ranks {first[part]} and {rank} pass different batches, but stand along the axis "
                "tensor of one mesh, whose ranks compute with the same: give both the same part of "
                "the data, hvkit.shard(data, mesh=mesh), and shuffle it with the same seed"
            )
    if n == 0 < max(part_of) and len({by_rank[rank][2] for rank in first}) == 1:
        warn_once(
            "equal work",
            f"{ranks_text(first)} train with the same first batch: "
            "give each rank its own part of the data with hvkit.shard(data)",
        )
    return [by_rank[rank][0] for rank in first]


def _rows_of_all(array: NDArray[Any]) -> NDArray[Any]:
    engine = runtime.engine("jax")
    if position().along("tensor"):
        array = array[:0]  # another rank gives them
    data = engine.allgather(array.reshape(-1).view(np.uint8))
    return data.view(array.dtype).reshape(-1, *array.shape[1:])


class WeightChecks:
    """Compares the weights of models of NNX or Keras before every so many batches.

    With None, before the first batch and after 1, 2, 4, 8, ...
    """

    def __init__(self, every: int | None, models: Sequence[Any]) -> None:
        self._every = every
        self._models = [ref(model) for model in models]
        self._seen = [_arrays_of(model) for model in models]
        self._batches = 0

    def are_of(self, model: Any) -> bool:
        return any(reference() is model for reference in self._models)

    def next_batch(self, call: str) -> None:
        """Compare the weights, if it is time; a collective then."""
        n = self._batches
        self._batches += 1
        if n % self._every == 0 if self._every else n & (n - 1) == 0:
            models = [reference() for reference in self._models]
            # A batch may be for another model, which does not change the weights of this one.
            changed = [self._has_changed(number, model) for number, model in enumerate(models)]
            require_same_weights(call, models, changed, fix=_FIX if n and call == "batch" else "")

    def _has_changed(self, number: int, model: Any) -> bool:
        seen, now = self._seen[number], _arrays_of(model)
        self._seen[number] = now
        return len(seen) != len(now) or not all(map(operator.is_, seen, now))


def _arrays_of(model: Any) -> list[ref[Any]]:
    """References to the arrays of a model; one to the same array is the same object."""
    return [ref(leaf) for _, leaf in _named_weights(model) if isinstance(leaf, jax.Array)]


def require_same_weights(
    call: str, models: Sequence[Any], changed: Sequence[bool] = (), fix: str = ""
) -> None:
    """Raise on every rank unless all hold the same weights of some models; a collective.

    A model of NNX or Keras is None if this rank has it no more. ``changed`` says which of them may
    differ, on any rank: all by default.
    """
    named = [_named_weights(model) for model in models]
    # Ranks may collect garbage at different times, and one may have another array.
    sent = [
        (bool(weights), may_differ, any(not is_replicated(leaf) for _, leaf in weights))
        for weights, may_differ in zip(named, changed or [True] * len(models), strict=True)
    ]
    by_rank = gather(call, sent)
    divided = any(is_divided for of_rank in by_rank for *_, is_divided in of_rank)
    compared: list[tuple[str, Any]] = []
    for model, weights, of_ranks in zip(models, named, zip(*by_rank, strict=True), strict=True):
        changers = [rank for rank, (_, may_differ, _) in enumerate(of_ranks) if may_differ]
        if not all(has_weights for has_weights, *_ in of_ranks) or not changers:
            continue
        if divided and len(changers) < len(of_ranks):  # no other rank has the same part
            raise _disagreement(
                f"{ranks_text(changers)} alone changed weights of {type(model).__name__}, of which "
                "each rank holds a part: load or change weights before hvkit.distribute, on every "
                "rank, or with hvkit.Checkpoint"
            )
        compared += [each for each in weights if is_array(each[1])]
    if not compared:
        return
    for full in (True, False) if divided else (True,):
        leaves = [each for each in compared if is_replicated(each[1]) is full]
        require_same(
            call,
            [Compared(name, fix=fix) for name, _ in leaves],
            [fingerprint(local_data(leaf)) for _, leaf in leaves],
            part="" if full else repr([local_index(leaf) for _, leaf in leaves]),
        )


def _named_weights(model: Any) -> list[tuple[str, Any]]:
    """A model's weights with their names; none if it is gone, or its weights are elsewhere by now.

    A loop that splits a module of NNX and donates its arrays to each step keeps the weights in a
    pytree, and leaves the module with arrays that JAX has deleted.
    """
    if model is None:
        return []
    leaves = list(named_leaves(weights_of(model), in_variables=is_nnx(model)))
    deleted = any(isinstance(leaf, jax.Array) and leaf.is_deleted() for _, leaf in leaves)
    whose = f"{type(model).__name__}:" if is_nnx(model) else "variable"
    return [] if deleted else [(f"{whose} {name}", leaf) for name, leaf in leaves]
