"""Arrays of NumPy and JAX, tensors of PyTorch and TensorFlow; in tuples, lists and dicts too.

Grain's ``MapDataset`` is divided as they are: each rank gets every N-th element.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from hvkit.data.rank_samples import Positions, Split

# Elements of Grain's by which ranks notice that their data differs: each is read for it.
_COMPARED = 4


def shard_arrays(data: Any, split: Split, seed: int | None = None) -> tuple[Any, list[str]]:
    """This rank's rows of arrays of shape (n, ...), and the facts that all ranks must have.

    The ``seed`` is unused: all functions that ``shard`` calls take it.
    """
    length = _rows_of(data)
    facts = [f"arrays of {length} rows", f"rows of sha256 {digest_of_rows(data)}"]
    if split.size == 1:
        return data, facts
    positions = split.of(length)
    return map_arrays(lambda array: _take(array, positions), data), facts


def _rows_of(data: Any) -> int:
    lengths: list[int] = []
    map_arrays(lambda array: lengths.append(int(array.shape[0])), data)
    if not lengths:
        raise TypeError(f"data must hold at least one array, got {data!r}")
    if len(set(lengths)) > 1:
        raise ValueError(
            "all arrays must have the same number of rows (first dimension), "
            f"got {', '.join(map(str, lengths))}"
        )
    return lengths[0]


def digest_of_rows(data: Any) -> str:
    """A sha256 of a few rows of every array, by which ranks notice that their data differs."""
    digest = hashlib.sha256()

    def add(array: Any) -> None:
        length = int(array.shape[0])
        some = np.unique(np.linspace(0, max(length - 1, 0), min(length, 16)).astype(int))
        for row in some:
            value = array[int(row)]
            value = value.detach().cpu() if hasattr(value, "detach") else value
            value = np.asarray(value)
            text = value.dtype.hasobject
            digest.update(repr(value.tolist()).encode() if text else value.tobytes())

    map_arrays(add, data)
    return digest.hexdigest()


def map_arrays(function: Callable[[Any], Any], data: Any) -> Any:
    if isinstance(data, Mapping):
        return {key: map_arrays(function, each) for key, each in data.items()}
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_arrays(function, each) for each in data))
    if isinstance(data, tuple | list):
        return type(data)(map_arrays(function, each) for each in data)
    if not _is_array(data):
        raise TypeError(f"data holds a {_name(data)}, which is not an array: use np.asarray")
    if len(data.shape) == 0:
        raise TypeError(f"data holds an array without dimensions, which has no rows: {data!r}")
    return function(data)


def is_arrays(data: Any) -> bool:
    """Whether this is an array, or a container that may hold arrays."""
    return isinstance(data, tuple | list | Mapping) or _is_array(data)


def _is_array(value: Any) -> bool:
    if _is_of_jax(value) and not value.is_fully_addressable:
        raise TypeError(
            f"data holds an array of shape {value.shape} that belongs to all ranks already: "
            "shard it before hvkit.batch or jax.device_put"
        )
    return (
        isinstance(value, np.ndarray)
        or _is_of_jax(value)
        or _is_tensor(value, "torch")
        or _is_tensor(value, "tensorflow")
    )


def _is_tensor(value: Any, package: str) -> bool:
    return isinstance(value, getattr(sys.modules.get(package), "Tensor", ()))


def _is_of_jax(value: Any) -> bool:
    """Whether this is an array of numbers of JAX, and no key."""
    jax: Any = sys.modules.get("jax")
    kind: Any = getattr(jax, "Array", ())
    return isinstance(value, kind) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _take(array: Any, positions: slice | Positions) -> Any:
    if not isinstance(positions, slice) and _is_tensor(array, "tensorflow"):
        return sys.modules["tensorflow"].gather(array, positions)
    return array[positions]


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def shard_grain(data: Any, split: Split, seed: int | None) -> tuple[Any, list[str]]:
    """This rank's elements as a ``MapDataset``, and the facts that must be equal on all ranks.

    The dataset has seeds of its own, and its earlier steps shuffle and map all elements.
    """
    import grain

    length = len(data)
    facts = [f"a MapDataset of {length} elements"]
    if split.size == 1 or not length:
        return data, facts
    digest = hashlib.sha256()
    for number in sorted({n * (length - 1) // (_COMPARED - 1) for n in range(_COMPARED)}):
        digest.update(pickle.dumps(data[number]))
    facts.append(f"elements of sha256 {digest.hexdigest()}")
    missing = -length % split.size
    # One that repeats without end has the length of the largest integer.
    if missing and not split.exact and length < sys.maxsize:
        repeated = data[:missing] if missing <= length else data.repeat(missing)[:missing]
        data = grain.MapDataset.concatenate([data, repeated])
    return data[split.rank :: split.size], facts
