"""Parquet files, as a ``pyarrow.dataset``: each rank reads the row groups that hold its rows.

A rank's rows follow each other in the files, so that ranks share a row group only where the part of
one ends and that of the next begins. All parts have the same number of rows.

In each epoch a rank reads its own part, with a seed in another order: of row groups, and of rows
within them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.argument_checks import check_count
from hvkit.data.rank_samples import Position, Split, WithPosition
from hvkit.log import counted, logger

Columns = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Rows:
    """Some rows of a row group: from ``start`` to ``stop``."""

    fragment: Any
    group: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def table(self, schema: Any, columns: Sequence[str] | None) -> Any:
        read = self.fragment.subset(row_group_ids=[self.group])
        return read.to_table(schema=schema, columns=columns).slice(self.start, len(self))


def shard_parquet(dataset: Any, split: Split, seed: int | None) -> tuple[ParquetRows, list[str]]:
    rows = ParquetRows(dataset, split, seed)
    return rows, rows.facts


class ParquetRows(WithPosition):
    """One rank's rows of a ``pyarrow.dataset`` of Parquet files; ``len`` is their number.

    ``state_dict`` and ``load_state_dict`` return and set the position of ``batches``.
    """

    def __init__(self, dataset: Any, split: Split, seed: int | None) -> None:
        self._schema = dataset.schema
        self._seed = seed
        self._split = split
        self._position = Position()
        groups = list(_row_groups(dataset))
        self.facts = _facts(dataset, groups)
        total = sum(each.stop for each in groups)
        rows = split.in_order(total)
        self._parts = list(_cut(groups, rows.start, rows.stop, total))

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def to_table(self, columns: Sequence[str] | None = None) -> Any:
        """All of these rows in memory, as a ``pyarrow.Table`` of some columns; None for all."""
        import pyarrow

        names = _checked(columns, self._schema)
        if not self._parts:
            empty = pyarrow.Table.from_batches([], self._schema)
            return empty if names is None else empty.select(names)
        return pyarrow.concat_tables([each.table(self._schema, names) for each in self._parts])

    def to_numpy(self, columns: Sequence[str] | None = None) -> Columns:
        """All of these rows in memory, as arrays of shape (n, ...) by column.

        ValueError if a column has lists of different lengths, or nulls among integers, booleans or
        lists.
        """
        return _columns_of(self.to_table(columns))

    def batches(self, batch_size: int, columns: Sequence[str] | None = None) -> ParquetBatches:
        """These rows in batches, of which a row group at a time is in memory.

        Each iteration over batches of these rows is a new epoch, whose last batch may have fewer
        rows. Without a ``seed`` of ``hvkit.shard`` they come in the order of the files; with one,
        each epoch has another order of row groups, and of rows within them.
        """
        size = check_count("batch_size", batch_size)
        return ParquetBatches(self, size, _checked(columns, self._schema))

    def state_dict(self) -> dict[str, Any]:
        """The position: epochs done, and rows of this epoch that all ranks have read."""
        return super().state_dict() | {"ranks": self._split.size}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position: the next iteration is the rest of its epoch.

        Another number of ranks has other parts of the rows. In the middle of an epoch each then
        leaves out as many of its rows as if these ranks had begun the epoch.
        """
        super().load_state_dict(state)
        ranks = state.get("ranks")
        if self._position.samples and ranks != self._split.size:
            logger.warning(
                "the rows of Parquet files were divided among %s ranks before, and now among %d: "
                "this epoch reads some rows twice and others not, the next one all",
                *(ranks, self._split.size),
            )

    def _epoch(self, iteration: object, size: int, names: list[str] | None) -> Iterator[Columns]:
        epoch = self._position.epoch
        numbers = None if self._seed is None else np.random.default_rng([self._seed, epoch])
        parts = len(self._parts)
        left_out = self._position.samples // self._split.size
        rest: Columns | None = None
        for index in range(parts) if numbers is None else numbers.permutation(parts):
            part = self._parts[index]
            chosen = slice(None) if numbers is None else numbers.permutation(len(part))
            if left_out >= len(part):
                left_out -= len(part)
                continue
            read = _columns_of(part.table(self._schema, names))
            rows = {name: array[chosen][left_out:] for name, array in read.items()}
            count, left_out = len(part) - left_out, 0
            if rest is not None:
                count += len(next(iter(rest.values())))
                rows = {name: _joined(name, rest[name], array) for name, array in rows.items()}
            whole = count // size * size
            for start in range(0, whole, size):
                self._position.advance(iteration, size * self._split.size)
                yield {name: array[start : start + size].copy() for name, array in rows.items()}
            rest = {name: array[whole:] for name, array in rows.items()} if whole < count else None
        if rest is not None:
            self._position.advance(iteration, count % size * self._split.size)
            yield rest


class ParquetBatches:
    """Batches of rows; each iteration is an epoch, and ``len`` its number of batches.

    A batch is a dict of arrays by column, of shape (batch_size, ...): lists of equal lengths become
    a second dimension.
    """

    def __init__(self, rows: ParquetRows, batch_size: int, columns: list[str] | None) -> None:
        self._rows = rows
        self._size = batch_size
        self._columns = columns

    def __len__(self) -> int:
        return -(-len(self._rows) // self._size)

    def __iter__(self) -> Iterator[Columns]:
        position = self._rows._position
        iteration = position.begin()
        with position.reading(iteration):
            yield from self._rows._epoch(iteration, self._size, self._columns)


def _row_groups(dataset: Any) -> Iterator[_Rows]:
    try:
        fragments = iter(dataset.get_fragments())
    except ValueError as problem:
        raise ValueError(
            "hvkit.shard divides Parquet files by their row groups, and this dataset has a filter "
            "or columns of its own: write what it selects to files, "
            "pyarrow.dataset.write_dataset(dataset, folder, format='parquet'), and pass these; "
            "choose columns with columns= of batches(), to_numpy() or to_table()"
        ) from problem
    for fragment in fragments:
        if not hasattr(fragment, "row_groups"):
            raise TypeError(
                f"hvkit.shard takes datasets of Parquet files, got {type(fragment).__name__}: "
                "read the table, and pass its arrays: dataset.to_table()[name].to_numpy()"
            )
        for group in fragment.row_groups:
            if group.num_rows:
                yield _Rows(fragment, group.id, 0, group.num_rows)


def _facts(dataset: Any, groups: Sequence[_Rows]) -> list[str]:
    named = [(each.fragment.path, each.group, each.stop) for each in groups]
    digest = hashlib.sha256(repr(named).encode()).hexdigest()
    rows = sum(each.stop for each in groups)
    schema = hashlib.sha256(str(dataset.schema).encode()).hexdigest()
    return [
        f"Parquet files of {rows} rows in {len(groups)} row groups",
        f"row groups of sha256 {digest}",
        f"schema of sha256 {schema}",
    ]


def _cut(groups: Sequence[_Rows], start: int, stop: int, total: int) -> Iterator[_Rows]:
    """The rows from ``start`` to ``stop`` of all row groups, which repeat after their end."""
    at = 0
    while total and at < stop:
        for each in groups:
            first, last = max(start - at, 0), min(stop - at, each.stop)
            if first < last:
                yield _Rows(each.fragment, each.group, first, last)
            at += each.stop


def _checked(columns: Sequence[str] | None, schema: Any) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not all(isinstance(each, str) for each in columns):
        raise TypeError(
            f"columns must be a list of names, got {columns!r}: such as columns={schema.names[:2]}"
        )
    for name in columns:
        if name not in schema.names:
            has = ", ".join(schema.names)
            raise ValueError(f"columns: the files have no column {name!r}, they have {has}")
    if not columns:
        raise ValueError("columns must name at least one column, got none")
    return list(columns)


def _joined(name: str, first: Any, second: Any) -> Any:
    if first.shape[1:] != second.shape[1:]:
        raise ValueError(
            f"the lists of column {name!r} have the shape {first.shape[1:]} in one row group and "
            f"{second.shape[1:]} in another: pad them to one length, or leave the column out with "
            "columns="
        )
    return np.concatenate([first, second])


def _columns_of(table: Any) -> Columns:
    """The columns of a ``pyarrow.Table`` of n rows as arrays of shape (n, ...), which are copies.

    Lists become a second dimension, lists of lists a third; a tensor has its own. A null is NaN
    among floats, NaT among times, and None among strings and other objects.
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
    types = pyarrow.types
    if types.is_dictionary(kind):
        return _array(name, column.dictionary_decode())
    lists = ("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
    if any(getattr(types, f"is_{each}")(kind) for each in lists):
        return _lists(name, column)
    if types.is_integer(kind) or types.is_boolean(kind):
        _refuse_nulls(name, column, "integers" if types.is_integer(kind) else "booleans")
    try:
        return np.array(column.to_numpy(zero_copy_only=False))  # a copy that can be written to
    except pyarrow.ArrowException as problem:
        raise ValueError(
            f"column {name!r} of type {kind} does not become an array ({problem}): leave it out "
            "with columns=, or convert to_table()[name]"
        ) from problem


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
