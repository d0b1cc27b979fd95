"""Makes ``tf.data`` pipelines write one file for each rank, or raises an error.

All ranks run the same script, so with ``cache("file")`` after ``hvkit.shard`` they would write
their different parts into the same file, which would be every rank's data in the next epoch.
TensorFlow has no hook for steps that are added to a dataset later, or to one of sharded arrays. So
on several ranks ``hvkit.shard`` replaces ``Dataset.cache`` and ``Dataset.save``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvkit import runtime
from hvkit.communication.collectives import gather

_PART = "_hvkit_part"


def steps_of(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The steps of a pipeline, from the last one back to its sources."""
    yield data
    for source in data._inputs():
        yield from steps_of(source)


def with_files_of_its_own(part: tf.data.Dataset) -> tf.data.Dataset:
    """Mark a rank's part, so that ``save`` refuses to write it over those of other ranks."""
    setattr(part, _PART, True)
    return part


def refuse_common_caches(data: tf.data.Dataset) -> None:
    """Reject a pipeline in which every rank would write the same cache at once.

    Raises:
        ValueError: it caches into a file that is not complete.
    """
    for step in steps_of(data):
        name = _static(step._filename) if type(step).__name__ == "CacheDataset" else None
        if name and not name.endswith(_of_rank()) and not tf.io.gfile.exists(f"{name}.index"):
            raise ValueError(
                f"the pipeline has cache({name!r}) before hvkit.shard, so all ranks would write "
                "that file at once: call cache after hvkit.shard, so that each rank writes a file "
                "of its own"
            )


@functools.cache
def give_ranks_files_of_their_own() -> None:
    """From now on, ``cache`` writes a file for each rank, and ``save`` compares all paths."""
    cache, save = tf.data.Dataset.cache, tf.data.Dataset.save

    @functools.wraps(cache)
    def cache_of_rank(self: Any, filename: Any = "", name: Any = None) -> Any:
        if _static(filename) != "":  # without a name, the cache is in memory
            filename = tf.strings.join([filename, _of_rank()])
        return cache(self, filename, name)

    @functools.wraps(save)
    def save_of_rank(self: Any, path: Any, *arguments: Any, **options: Any) -> Any:
        if _follows_a_part(self):
            _require_own_path(str(path))
        return save(self, path, *arguments, **options)

    tf.data.Dataset.cache, tf.data.Dataset.save = cache_of_rank, save_of_rank


def _require_own_path(path: str) -> None:
    """Raise on every rank if several would save into one folder; a collective."""
    everyone = gather("Dataset.save", os.path.realpath(path))
    if len(set(everyone)) < len(everyone):
        raise ValueError(
            f"save({path!r}) after hvkit.shard would write the parts of several ranks to one "
            f'place: put hvkit.rank() into the path, as in f"{path}-{{hvkit.rank()}}", or save the '
            "pipeline before hvkit.shard, on rank 0 only"
        )


def _of_rank() -> str:
    return f"-rank-{runtime.rank()}-of-{runtime.size()}"


def _follows_a_part(data: tf.data.Dataset) -> bool:
    return any(hasattr(step, _PART) for step in steps_of(data))


def _static(filename: Any) -> str | None:
    """The name of a file as text; None if it is known only when the pipeline runs."""
    value = tf.get_static_value(filename) if tf.is_tensor(filename) else filename
    return value.decode() if isinstance(value, bytes) else value
