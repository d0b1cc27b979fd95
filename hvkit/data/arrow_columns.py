"""NumPy arrays from the columns of Arrow tables: lists and tensors become further dimensions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.wording import counted

Columns = dict[str, NDArray[Any]]


def columns_of(table: Any) -> Columns:
    """The columns of a ``pyarrow.Table`` of n rows as arrays of shape (n, ...), which are copies.

    Lists become a second dimension, lists of lists a third; a tensor has its own. A null is NaN
    among floats, NaT among times, and None among strings and other objects.

    Raises:
        ValueError: a column has lists of different lengths, or nulls that its array cannot hold;
            the message names it.
    """
    return {name: _array(name, table.column(name).combine_chunks()) for name in table.column_names}


def _array(name: str, column: Any) -> NDArray[Any]:
    import pyarrow

    if isinstance(column, pyarrow.ChunkedArray):  # of no rows, in some versions
        column = pyarrow.concat_arrays(column.chunks or [pyarrow.array([], column.type)])
    kind = column.type
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        _refuse_nulls(name, column, "tensors")
        stored = _array(name, column.storage).reshape(len(column), *kind.shape)
        return stored.transpose(
            0, *(1 + each for each in kind.permutation or range(len(kind.shape)))
        )
    if isinstance(kind, pyarrow.BaseExtensionType):
        return _array(name, column.storage)
    if pyarrow.types.is_dictionary(kind):
        return _array(name, column.dictionary_decode())
    if _is_list(kind):
        return _lists(name, column)
    types = pyarrow.types
    if types.is_integer(kind) or types.is_boolean(kind):
        what = "integers" if types.is_integer(kind) else "booleans"
        _refuse_nulls(name, column, what)
    try:
        return np.array(column.to_numpy(zero_copy_only=False))  # a copy that can be written to
    except pyarrow.ArrowException as problem:
        raise ValueError(
            f"column {name!r} of type {kind} does not become an array ({problem}): leave it out "
            "with columns=, or convert to_table()[name]"
        ) from problem


def _is_list(kind: Any) -> bool:
    import pyarrow

    names = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    checks = (getattr(pyarrow.types, f"is_{each}", None) for each in names)
    return any(check is not None and check(kind) for check in checks)


def _lists(name: str, column: Any) -> NDArray[Any]:
    import pyarrow.compute

    _refuse_nulls(name, column, "lists")
    if pyarrow.types.is_fixed_size_list(column.type):
        shortest = longest = column.type.list_size
    elif len(column):
        lengths = pyarrow.compute.list_value_length(column).to_numpy()
        shortest, longest = lengths.min(), lengths.max()
    else:
        shortest = longest = 0
    if shortest != longest:
        raise ValueError(
            f"the lists of column {name!r} have different lengths (from {shortest} to {longest}): "
            "pad them to one, or leave the column out with columns="
        )
    values = _array(name, column.flatten())
    return values.reshape(len(column), longest, *values.shape[1:])


def _refuse_nulls(name: str, column: Any, what: str) -> None:
    if column.null_count:
        nulls = counted(column.null_count, "null")
        raise ValueError(
            f"column {name!r} has {nulls} among {len(column)} {what}, for which an array has no "
            "value: fill them before the files are written, or leave the column out with columns="
        )
