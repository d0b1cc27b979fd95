"""``shard``: each rank's part of the data, as an object of the same kind."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

from hvkit import runtime
from hvkit.communication.collectives import raise_together, require_equal
from hvkit.data.arrays import is_arrays, shard_arrays
from hvkit.data.rank_samples import Split
from hvkit.mesh import Mesh, position_in
from hvkit.registry import watch_updates
from hvkit.watch.calls import named

Data = TypeVar("Data")

_ACCEPTED = (
    "a torch DataLoader or Dataset, a tf.data.Dataset, a keras.utils.PyDataset, a pyarrow.dataset, "
    "a grain.MapDataset, or arrays: one, or a tuple, list or dict of them"
)

# A package that the script may have imported, a class of it, and the function for its objects. A
# function takes the data, the split and the seed, and returns one rank's part and the facts that
# must be equal on all ranks. The first row that fits counts.
_PIPELINE = ("tensorflow", "data.Dataset")
_SHARDED = (
    ("torch", "utils.data.DataLoader", "pytorch_loader:shard_loader"),
    ("torch", "utils.data.Dataset", "pytorch_datasets:shard_dataset"),
    (*_PIPELINE, "tfdata:shard_tfdata"),
    ("keras", "utils.PyDataset", "keras_pydataset:shard_pydataset"),
    ("pyarrow.dataset", "Dataset", "parquet:shard_parquet"),
    ("grain", "MapDataset", "arrays:shard_grain"),
)
_DYNAMIC = (
    ("torch", "utils.data.DataLoader", "pytorch_loader:dynamic_loader"),
    (*_PIPELINE, "tfdata:dynamic_tfdata"),
)


@named("hvkit.shard")
def shard(
    data: Data,
    *,
    exact: bool = False,
    seed: int | None = None,
    dynamic: bool = False,
    mesh: Mesh | None = None,
) -> Data:
    """This rank's part of the data, as an object of the same kind.

    For training, all ranks get the same number of batches, with equal sizes in each step, and
    together all samples. A batch size is that of one rank: step k of N ranks reads what one
    process with an N times larger batch would read in step k. If the samples of the last step
    cannot be divided evenly, fewer than N of them are repeated; with ``drop_last`` the step is
    left out instead. With one rank the result reads what ``data`` reads, bit for bit.

    Every rank must call it with the same data in the same order, and iterate equally often: split
    and permute data with a seed that all ranks share.

    Args:
        data: a ``DataLoader``, a ``torch.utils.data.Dataset``, a ``tf.data.Dataset``, a Keras
            ``PyDataset``; or arrays of shape (n, ...), and tuples, lists and dicts of them. A
            ``pyarrow.dataset`` of Parquet files becomes the rows of this rank, which read only
            the row groups that hold them, into memory (``to_table()``, ``to_numpy()``) or in
            batches (``batches(batch_size)``); these rows follow each other in the files.
        exact: True for evaluation: every sample is on exactly one rank, in the original order.
            Parts may differ by one sample (or one element or batch), and may be empty.
        seed: None for the order that rank 0 would read in one process. With a number, the same on
            every rank and not negative, the random numbers of an epoch begin with a seed computed
            from it and the epoch, also with one rank. ``tf.data`` and Grain shuffle by their own
            seeds, and arrays are not shuffled.
        dynamic: instead of fixed parts, each batch goes to the rank that requests one next, for
            ``hvkit.ParameterServer``; not with ``exact``.
        mesh: as passed to ``hvkit.distribute``. Then ranks that train one model together, along the
            pipeline and tensor axes, get the same part, and N is the number of parts: data times
            shard.

    Raises:
        TypeError: ``data`` is of another kind, or an argument of another type.
        ValueError: a negative seed, arrays of different lengths, a ``DistributedSampler``, a
            shuffle without seed, or anything else that leaves ranks without a common order; or
            ``data`` is already a part, unless it is arrays.
        RanksDisagreeError: the ranks passed different data or arguments.
    """
    if mesh is None:
        split = Split(runtime.rank(), runtime.size(), exact is True)
    else:
        position = position_in(mesh)
        split = Split(position.batch, position.batches, exact is True)
    if dynamic and mesh is not None:
        raise ValueError(
            f"dynamic=True gives each rank other batches, but ranks of {mesh} that hold one model "
            "together need the same: leave dynamic out"
        )
    if split.size > 1 and "tensorflow" in sys.modules:
        from hvkit.data.tfdata import give_ranks_files_of_their_own

        give_ranks_files_of_their_own()
    if runtime.size() > 1 and exact is not True:
        watch_updates()
    problem: Exception | None = None
    part: Any = None
    facts: list[str] = []
    try:
        _check(exact, seed, dynamic)
        if dynamic:
            part, facts = _dynamic(data, split, seed)
        if not dynamic or split.size == 1:
            part, facts = shard_for(data, split, seed)
    except Exception as error:
        problem = error
    if exact is True and not facts:
        if problem is not None:
            raise problem
        return part  # type: ignore[no-any-return]
    raise_together(problem, "shard")
    fix = (
        "pass the same data and arguments to hvkit.shard on every rank; if the script splits or "
        "permutes the data, use the same seed on all ranks"
    )
    require_equal("data", facts, fix, "shard")
    return part  # type: ignore[no-any-return]


def shard_for(data: Any, split: Split, seed: int | None) -> tuple[Any, list[str]]:
    """One rank's part, and the facts that must be equal on all ranks; not a collective.

    For evaluation there are facts only if ranks could disagree about the order: evaluation on a
    single rank must not wait for the others.
    """
    divide = _function_for(data, _SHARDED) or (shard_arrays if is_arrays(data) else None)
    if divide is None:
        raise TypeError(_refusal(data))
    part, facts = divide(data, split, seed)
    if split.exact:  # only pipelines shuffle then, by seeds that may differ
        return part, facts if _is(data, *_PIPELINE) else []
    return part, [*facts, f"seed {seed}"]


def _function_for(data: Any, table: Sequence[tuple[str, str, str]]) -> Callable[..., Any] | None:
    for package, name, function in table:
        if _is(data, package, name):
            module, _, function = function.partition(":")
            return getattr(import_module(f"hvkit.data.{module}"), function)  # type: ignore[no-any-return]
    return None


def _is(data: Any, package: str, name: str) -> bool:
    """Whether the data has a class of a package, which the script has then imported."""
    module = sys.modules.get(package)
    return module is not None and isinstance(data, operator.attrgetter(name)(module))


def _dynamic(data: Any, split: Split, seed: int | None) -> tuple[Any, list[str]]:
    divide = _function_for(data, _DYNAMIC)
    if divide is None:
        raise TypeError(
            "dynamic=True takes a torch DataLoader or a tf.data.Dataset, got "
            f"{type(data).__module__}.{type(data).__qualname__}: convert it to one of these, or "
            "leave dynamic out, and each rank gets its part"
        )
    part, facts = divide(data, split, seed)
    return part, [*facts, f"seed {seed}", "dynamic"]


def _check(exact: object, seed: object, dynamic: object) -> None:
    for name, value in {"exact": exact, "dynamic": dynamic}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise TypeError(f"seed must be an int, got {seed!r}")
    if seed is not None and seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    if dynamic and exact:
        raise ValueError(
            "exact=True gives every rank the same part each time, and dynamic=True as many batches "
            "as it has time for: choose one"
        )


def _refusal(data: object) -> str:
    text = f"data must be {_ACCEPTED}; got {type(data).__module__}.{type(data).__qualname__}"
    if hasattr(data, "__next__"):
        return f"{text}, which can be read only once and may not end: convert it to one of these"
    if hasattr(data, "to_numpy"):
        return f"{text}: pass data.to_numpy()"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return f"{text}: pass a DataLoader of it"
    return text
