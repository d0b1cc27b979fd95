"""Ranks read the row groups of Parquet files that hold their rows, as many rows each."""

import itertools

import numpy as np
import pyarrow
import pyarrow.dataset
import pyarrow.parquet
import pytest

from hvkit.data.parquet import ParquetRows
from hvkit.data.rank_samples import Split
from hvkit.data.shard import shard


@pytest.fixture
def dataset(tmp_path):
    """Three files with row groups of 4 rows, 22 rows in all."""
    for number, (first, last) in enumerate([(0, 9), (9, 10), (10, 22)]):
        rows = np.arange(first, last)
        vectors = pyarrow.array([[row, row + 0.5] for row in rows])
        table = pyarrow.table({"row": rows, "vector": vectors})
        pyarrow.parquet.write_table(table, tmp_path / f"{number}.parquet", row_group_size=4)
    return pyarrow.dataset.dataset(tmp_path)


def rows_of(dataset, rank, size, *, exact=False, seed=None):
    return ParquetRows(dataset, Split(rank, size, exact), seed)


@pytest.mark.parametrize(("size", "exact"), [(1, False), (2, False), (3, False), (3, True)])
def test_parts_are_all_rows_and_equally_long(dataset, size, exact):
    parts = [rows_of(dataset, rank, size, exact=exact) for rank in range(size)]
    rows = [part.to_numpy(["row"])["row"].tolist() for part in parts]
    assert [len(part) for part in parts] == [len(each) for each in rows]
    together = list(itertools.chain(*rows))
    assert set(together) == set(range(22))
    assert len(together) == (22 if exact else -(-22 // size) * size)
    longest = max(map(len, rows))
    assert all(longest - len(each) <= exact for each in rows)


def test_a_rank_reads_only_the_row_groups_of_its_rows(dataset):
    part = rows_of(dataset, 1, 2)
    read = [(each.fragment.path[-9:], each.group, each.start, each.stop) for each in part._parts]
    assert read == [("2.parquet", 0, 1, 4), ("2.parquet", 1, 0, 4), ("2.parquet", 2, 0, 4)]


def test_batches_are_of_one_size_over_row_groups_and_vectors_have_a_dimension(dataset):
    batches = rows_of(dataset, 0, 2).batches(3)
    found = list(batches)
    assert len(batches) == len(found) == 4
    assert [batch["row"].tolist() for batch in found] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]
    assert found[1]["vector"].tolist() == [[3, 3.5], [4, 4.5], [5, 5.5]]


def test_with_a_seed_each_epoch_has_an_order_of_its_own_that_is_the_same_again(dataset):
    def epochs():
        batches = rows_of(dataset, 0, 2, seed=7).batches(4, ["row"])
        return [np.concatenate([each["row"] for each in batches]).tolist() for _ in range(2)]

    first, second = epochs()
    assert first != second
    assert sorted(first) == sorted(second) == list(range(11))
    assert epochs() == [first, second]


def test_each_epoch_of_the_loop_of_the_page_has_an_order_and_a_resumed_one_goes_on(dataset):
    def read(rows, epochs, stop_after=None):
        read = []
        for _ in range(epochs):
            for number, batch in enumerate(rows.batches(4, ["row"]), 1):
                read.append(batch["row"].tolist())
                if number == stop_after:
                    return read
        return read

    whole = read(rows_of(dataset, 1, 2, seed=7), 3)
    assert len(whole) == 9
    epochs = [list(itertools.chain(*whole[start : start + 3])) for start in (0, 3, 6)]
    assert [sorted(epoch) for epoch in epochs] == 3 * [list(range(11, 22))]
    assert len(set(map(tuple, epochs))) == 3

    stopped = rows_of(dataset, 1, 2, seed=7)
    first = read(stopped, 1) + read(stopped, 1, stop_after=2)
    state = stopped.state_dict()
    assert state == {"epoch": 1, "samples": 16, "ranks": 2}
    resumed = rows_of(dataset, 1, 2, seed=7)
    resumed.load_state_dict(state)
    assert first + read(resumed, 2) == whole
    stopped.end_epoch()  # as Checkpoint.save at the end of an epoch
    assert stopped.state_dict() == {"epoch": 2, "samples": 0, "ranks": 2}


def test_lists_and_tensors_have_their_shape_and_nulls_are_named(tmp_path):
    values = np.arange(12.0).reshape(3, 2, 2)
    columns = {
        kind.__name__: pyarrow.array(values[:, 0].tolist(), kind(pyarrow.float64()))
        for kind in (pyarrow.list_, pyarrow.large_list)
    }
    columns["nested"] = pyarrow.array(values.tolist())
    columns["tensor"] = pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)
    columns["hole"] = pyarrow.array([1, None, 3])
    columns["missing"] = pyarrow.array([1.0, None, 3.0])
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "all.parquet")
    rows = rows_of(pyarrow.dataset.dataset(tmp_path), 0, 1)
    found = rows.to_numpy([name for name in columns if name != "hole"])
    for name in ("nested", "tensor"):
        np.testing.assert_array_equal(found[name], values)
    for name in ("list_", "large_list"):
        np.testing.assert_array_equal(found[name], values[:, 0])
    np.testing.assert_array_equal(found["missing"], [1, np.nan, 3])
    with pytest.raises(ValueError, match="column 'hole' has 1 null among 3 integers"):
        rows.to_numpy()


@pytest.mark.parametrize("kind", [pyarrow.list_view, pyarrow.large_list_view])
def test_list_views_are_lists(tmp_path, kind):
    file, view = tmp_path / "views.parquet", kind(pyarrow.float64())
    for last in ([5.0, 6.0], None):
        lists = pyarrow.array([[1.0, 2.0], [3.0, 4.0], last], view)
        try:
            pyarrow.parquet.write_table(pyarrow.table({"x": lists}), file)
        except pyarrow.ArrowNotImplementedError as problem:
            pytest.skip(str(problem))
        rows = rows_of(pyarrow.dataset.dataset(file), 0, 1)
        if last:
            assert rows.to_numpy()["x"].tolist() == lists.to_pylist()
        else:
            with pytest.raises(ValueError, match="column 'x' has 1 null among 3 lists"):
                rows.to_numpy()


def test_datasets_that_cannot_be_divided_are_refused(dataset, tmp_path):
    (tmp_path / "table.csv").write_text("x\n1\n")
    with pytest.raises(TypeError, match="takes datasets of Parquet files"):
        shard(pyarrow.dataset.dataset(tmp_path / "table.csv", format="csv"))
    ragged = pyarrow.table({"x": [[1], [1, 2]]})
    pyarrow.parquet.write_table(ragged, tmp_path / "ragged.parquet")
    part = shard(pyarrow.dataset.dataset(tmp_path / "ragged.parquet"))
    with pytest.raises(ValueError, match="lists of column 'x' have different lengths"):
        part.to_numpy()
    for columns, problem in (("xy", TypeError), (["typo"], ValueError)):
        with pytest.raises(problem, match=r"columns.*(got 'xy'|no column 'typo', they have x)"):
            part.batches(1, columns)
    few = pyarrow.dataset.dataset(tmp_path / "0.parquet").filter(pyarrow.dataset.field("row") > 3)
    with pytest.raises(ValueError, match=r"has a filter .* write what it selects to files"):
        shard(few)
