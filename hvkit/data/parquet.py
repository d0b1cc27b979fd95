"""Parquet files, as a ``pyarrow.dataset``: each rank reads the row groups that hold its rows.

A rank's rows follow each other in the files, so that ranks share a row group only where the part of
one ends and that of the next begins. All parts have the same number of rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit.argument_checks import check_count
from hvkit.data.rank_samples import Share

Batch = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class _Rows:
    """Some rows of a row group: from ``start`` to ``stop``."""

    fragment: Any
    group: int
    start: int
    stop: int

    def table(self, schema: Any, columns: Sequence[str] | None) -> Any:
        names = None if columns is None else list(columns)
        read = self.fragment.subset(row_group_ids=[self.group])
        return read.to_table(schema=schema, columns=names).slice(self.start, self.stop - self.start)


class ParquetRows:
    """One rank's rows of a ``pyarrow.dataset`` of Parquet files; ``len`` is their number.

    Args:
        dataset: the dataset.
        share: rank and size.
        seed: as for ``hvkit.shard``.

    Raises:
        TypeError: its files are no Parquet files.
    """

    def __init__(self, dataset: Any, share: Share, seed: int | None) -> None:
        self._schema = dataset.schema
        self._seed = seed
        groups = list(_row_groups(dataset))
        self.facts = _facts(dataset, groups)
        total = sum(each.stop for each in groups)
        self._parts = list(_cut(groups, *_range_of(share, total), total))

    def __len__(self) -> int:
        return sum(each.stop - each.start for each in self._parts)

    def to_table(self, columns: Sequence[str] | None = None) -> Any:
        """All of these rows in memory, as a ``pyarrow.Table``.

        Args:
            columns: the columns to read; None for all.
        """
        import pyarrow

        tables = [each.table(self._schema, columns) for each in self._parts]
        if not tables:
            empty = self._schema.empty_table()
            return empty if columns is None else empty.select(list(columns))
        return pyarrow.concat_tables(tables)

    def to_numpy(self, columns: Sequence[str] | None = None) -> Batch:
        """All of these rows in memory, as arrays of shape (n, ...) by column."""
        return _arrays(self.to_table(columns))

    def batches(self, batch_size: int, columns: Sequence[str] | None = None) -> ParquetBatches:
        """These rows in batches, of which a row group at a time is in memory.

        Without a ``seed`` of ``hvkit.shard`` they come in the order of the files; with one, each
        epoch has another order of row groups, and of rows within them.

        Args:
            batch_size: rows of a batch; the last one of an epoch may have fewer.
            columns: the columns to read; None for all.
        """
        size = check_count("batch_size", batch_size)
        return ParquetBatches(self._parts, self._schema, size, columns, self._seed)


class ParquetBatches:
    """Batches of rows; each iteration is an epoch, and ``len`` its number of batches.

    A batch is a dict of arrays by column, of shape (batch_size, ...): lists of equal lengths become
    a second dimension.
    """

    def __init__(
        self,
        parts: Sequence[_Rows],
        schema: Any,
        batch_size: int,
        columns: Sequence[str] | None,
        seed: int | None,
    ) -> None:
        self._parts = parts
        self._schema = schema
        self._size = batch_size
        self._columns = columns
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return -(-sum(each.stop - each.start for each in self._parts) // self._size)

    def __iter__(self) -> Iterator[Batch]:
        import pyarrow

        numbers = None
        if self._seed is not None:
            numbers = np.random.default_rng([self._seed, self._epoch])
        self._epoch += 1
        order = list(self._parts)
        if numbers is not None:
            order = [order[each] for each in numbers.permutation(len(order))]
        rest = None
        for part in order:
            table = part.table(self._schema, self._columns)
            if numbers is not None:
                table = table.take(numbers.permutation(table.num_rows))
            if rest is not None:
                table = pyarrow.concat_tables([rest, table])
            whole = table.num_rows // self._size * self._size
            for start in range(0, whole, self._size):
                yield _arrays(table.slice(start, self._size))
            rest = table.slice(whole)
        if rest is not None and rest.num_rows:
            yield _arrays(rest)


def is_dataset(data: Any) -> bool:
    """Whether this is a ``pyarrow.dataset``, of any format."""
    import pyarrow.dataset

    return isinstance(data, pyarrow.dataset.Dataset)


def _row_groups(dataset: Any) -> Iterator[_Rows]:
    """All row groups of the files, in order."""
    for fragment in dataset.get_fragments():
        if not hasattr(fragment, "row_groups"):
            raise TypeError(
                f"hvkit.shard takes datasets of Parquet files, got {type(fragment).__name__}: "
                "read the table, and pass its arrays: dataset.to_table()[name].to_numpy()"
            )
        for group in fragment.row_groups:
            if group.num_rows:
                yield _Rows(fragment, group.id, 0, group.num_rows)


def _facts(dataset: Any, groups: Sequence[_Rows]) -> list[str]:
    """What must be the same on all ranks."""
    named = [(each.fragment.path, each.group, each.stop) for each in groups]
    digest = hashlib.sha256(repr(named).encode()).hexdigest()
    rows = sum(each.stop for each in groups)
    schema = hashlib.sha256(str(dataset.schema).encode()).hexdigest()
    return [
        f"Parquet files of {rows} rows in {len(groups)} row groups",
        f"row groups of sha256 {digest}",
        f"schema of sha256 {schema}",
    ]


def _range_of(share: Share, total: int) -> tuple[int, int]:
    """From which row to which the part goes; the end may be past the last row, and goes around."""
    if share.exact:
        return share.rank * total // share.size, (share.rank + 1) * total // share.size
    each = -(-total // share.size)
    return share.rank * each, (share.rank + 1) * each


def _cut(groups: Sequence[_Rows], start: int, stop: int, total: int) -> Iterator[_Rows]:
    """The rows from ``start`` to ``stop`` of all row groups, which repeat after their end."""
    at = 0
    while total and at < stop:
        for each in groups:
            first, last = max(start - at, 0), min(stop - at, each.stop)
            if first < last:
                yield _Rows(each.fragment, each.group, first, last)
            at += each.stop


def _arrays(table: Any) -> Batch:
    return {name: _array(name, table.column(name)) for name in table.column_names}


def _array(name: str, column: Any) -> NDArray[Any]:
    import pyarrow.compute

    kind = column.type
    if not (pyarrow.types.is_list(kind) or pyarrow.types.is_fixed_size_list(kind)):
        return np.array(column.to_numpy())  # a copy that can be written to
    lengths = set(pyarrow.compute.list_value_length(column).to_pylist())
    if len(lengths) > 1:
        raise ValueError(
            f"the lists of column {name!r} have different lengths ({', '.join(map(str, lengths))}):"
            " pad them to one, or leave the column out with columns="
        )
    values = pyarrow.compute.list_flatten(column).to_numpy()
    return np.array(values).reshape(len(column), *lengths)
