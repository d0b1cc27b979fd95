"""Files that pipelines write after ``shard``: each rank's own."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from cases import MORE
from ranks import error_of, shared_folder

import hvkit
from hvkit.data import shard

LENGTH = 120  # for 2 and 3 ranks a multiple of the global batch
WHOLE = tf.data.Dataset.range(LENGTH)


@pytest.fixture
def file(tmp_path_factory):
    return str(shared_folder(tmp_path_factory) / "file")


AFTER = {
    "a part": lambda: shard(WHOLE.batch(4)),
    "a step behind it": lambda: shard(WHOLE).map(lambda number: number).batch(4),
    "sharded arrays": lambda: tf.data.Dataset.from_tensor_slices(shard(np.arange(LENGTH))).batch(4),
    "evaluation": lambda: shard(WHOLE.batch(4), exact=True),
}


@MORE
@pytest.mark.parametrize("kind", AFTER)
@pytest.mark.parametrize("method", ["cache", "snapshot"])
def test_every_sample_is_read_in_every_epoch_from_files_that_are_cached(kind, method, file):
    part = getattr(AFTER[kind](), method)(file)
    for _ in range(2):
        mine = [int(number) for batch in part for number in batch]
        together = [number for theirs in hvkit.allgather(mine) for number in theirs]
        assert sorted(together) == list(range(LENGTH))


def test_a_cache_in_memory_stays_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part = shard(WHOLE.batch(4)).cache()
    assert [len(list(part)) for _ in range(2)] == [LENGTH // 4 // hvkit.size()] * 2
    assert not list(tmp_path.iterdir())


def test_a_file_that_all_ranks_would_write_is_an_error_with_the_fix(file, monkeypatch):
    plain = tf.data.Dataset.cache.__wrapped__  # as before the first call of shard
    error, text = error_of(lambda: shard(plain(WHOLE, file).batch(4)))
    assert error is ValueError
    assert "call cache after hvkit.shard" in text
    monkeypatch.chdir(Path(file).parent)
    # One folder, although each rank finds its number in the path.
    for folder in ("file", f"v{'.'.join(map(str, range(hvkit.size())))}/file"):
        error, text = error_of(lambda folder=folder: shard(WHOLE).batch(4).save(folder))
        assert error is ValueError
        assert "put hvkit.rank() into the path" in text
        assert not Path(folder).exists()
    own = f"{file}-{hvkit.rank()}"
    shard(WHOLE).save(own)
    mine = [int(number) for number in tf.data.Dataset.load(own)]
    assert mine == list(range(LENGTH))[hvkit.rank() :: hvkit.size()]


def test_a_cache_that_is_complete_is_read_by_all(file):
    plain = tf.data.Dataset.cache.__wrapped__
    if hvkit.rank() == 0:
        assert len(list(plain(WHOLE, file))) == LENGTH
    hvkit.barrier()
    mine = [int(number) for number in shard(plain(WHOLE, file))]
    assert mine == list(range(LENGTH))[hvkit.rank() :: hvkit.size()]
