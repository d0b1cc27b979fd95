"""Sharding ``tf.data`` pipelines.

Every rank runs the whole pipeline and takes its part after the last step, so a seeded shuffle has
the same order as in one process. If the pipeline ends in batches, their samples are divided. Other
elements stay whole, and so do batches after a ``map``. Sharding right after the source takes less
time, because every rank runs the steps before ``shard`` for all samples.

All ranks run the same script, so with ``cache("file")`` after ``hvkit.shard`` they would write
their different parts into the same file, which would be every rank's data in the next epoch.
TensorFlow has no hook for steps that are added to a dataset later, or to one of sharded arrays. So
on several ranks ``hvkit.shard`` replaces ``Dataset.cache`` and ``Dataset.save``.

TensorFlow has no public access to a dataset's inputs and seeds. This module reads private
attributes that are the same in TensorFlow 2.16 and 2.21.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import runtime
from hvkit.communication.collectives import gather
from hvkit.data.rank_samples import Queue, Split
from hvkit.data.tfdata_batches import Batching, as_element, batching_of, stackable, static

# Marks a rank's part, so that ``save`` does not write it over other ranks' parts.
_PART = "_hvkit_part"


def shard_tfdata(
    data: tf.data.Dataset, split: Split, seed: int | None
) -> tuple[tf.data.Dataset, list[str]]:
    """One rank's part of a pipeline, which has its own seeds, and the facts equal on all ranks."""
    if split.size == 1:
        return data, []
    _refuse_unordered(data)
    _refuse_common_caches(data)
    batching = batching_of(data)
    if batching is None:
        part = _elements(data, split)
    elif batching.unpadded:
        part = _regrouped(data, batching, split)
    else:
        part = _rebatched(data, batching, split)
    ordered = tf.data.Options()
    ordered.deterministic = True
    part = part.with_options(ordered)
    setattr(part, _PART, True)
    return part, _facts(data, batching, split)


def dynamic_tfdata(
    data: tf.data.Dataset, split: Split, seed: int | None
) -> tuple[tf.data.Dataset, list[str]]:
    """The elements that this rank takes of the pipeline, and the facts equal on all ranks."""
    _refuse_unordered(data)
    if split.size > 1:
        _refuse_common_caches(data)
    queue, iterations = Queue(), itertools.count(1)
    # By iteration: the number of the element that this rank takes next.
    following: dict[int, int] = {}

    def begin() -> np.int64:
        return np.int64(next(iterations))

    def is_taken(iteration: np.int64, number: np.int64) -> np.bool_:
        key = int(iteration)
        if key not in following:
            following[key] = queue.take(key)
        is_next = following[key] == number
        if is_next:
            del following[key]
        return np.bool_(is_next)

    def epoch(_: tf.Tensor) -> tf.data.Dataset:
        iteration = tf.numpy_function(begin, [], tf.int64)
        taken = data.enumerate().filter(
            lambda number, _: tf.numpy_function(is_taken, [iteration, number], tf.bool)
        )
        return taken.map(lambda _, element: element)

    part = tf.data.Dataset.range(1).flat_map(epoch)
    if split.size > 1:
        setattr(part, _PART, True)
    return part, _facts(data, batching_of(data), split)


def _facts(data: tf.data.Dataset, batching: Batching | None, split: Split) -> list[str]:
    seeds = [
        f"shuffle with seeds {seeds} (of tf.random.set_seed and its own)"
        for seeds in _seeds_of(data)
    ]
    if split.exact:
        return seeds
    batch = None if batching is None else batching.size
    return [f"tf.data pipeline of cardinality {_cardinality(data)}", f"batch size {batch}", *seeds]


def _cardinality(data: tf.data.Dataset) -> int:
    return int(data.cardinality())


def _elements(data: tf.data.Dataset, split: Split) -> tf.data.Dataset:
    """Every N-th element; in training equally many on each rank."""
    length = _cardinality(data)
    if split.exact or length == tf.data.INFINITE_CARDINALITY:
        return data.shard(split.size, split.rank)
    if length == tf.data.UNKNOWN_CARDINALITY:
        return _elements_of_unknown(data, split)
    if split.rank < length % split.size or length % split.size == 0:
        return data.shard(split.size, split.rank)

    # The last group has no element for this rank: it repeats the last element.
    def own(number: tf.Tensor, _: Any) -> tf.Tensor:
        return (number % split.size == split.rank) | (number == length - 1)

    part = data.enumerate().filter(own).map(lambda _, element: element)
    return part.apply(tf.data.experimental.assert_cardinality(split.count(length)))


def _elements_of_unknown(data: tf.data.Dataset, split: Split) -> tf.data.Dataset:
    """One of every N elements, and one of the last few, for a pipeline of unknown length."""
    if stackable(data.element_spec):

        def row(*stack: Any) -> Any:
            element = as_element(stack, data.element_spec)
            rows = tf.shape(tf.nest.flatten(element)[0])[0]
            return tf.nest.map_structure(lambda each: each[split.rank % rows], element)

        return data.batch(split.size).map(row)

    def one_of(*window: Any) -> tf.data.Dataset:
        elements = tf.data.Dataset.zip(as_element(window, data.element_spec))
        return elements.repeat().skip(split.rank).take(1)

    return data.window(split.size).flat_map(one_of)


def _regrouped(data: tf.data.Dataset, batching: Batching, split: Split) -> tf.data.Dataset:
    """Every N-th sample of the batches of N ranks."""
    group, drop = batching.size * split.size, batching.drop_remainder and not split.exact

    def own(*batch: Any) -> Any:
        element = as_element(batch, data.element_spec)
        rows = tf.shape(tf.nest.flatten(element)[0], tf.int64)[0]
        last = rows if split.exact else (rows + split.size - 1) // split.size * split.size
        last = tf.maximum(last, split.rank)
        positions = tf.range(split.rank, last, split.size, tf.int64) % tf.maximum(rows, 1)
        return tf.nest.map_structure(lambda each: tf.gather(each, positions), element)

    def full(*batch: Any) -> Any:
        element = as_element(batch, data.element_spec)
        return tf.nest.map_structure(lambda each: each[split.rank :: split.size], element)

    part = data.rebatch(group, drop_remainder=drop).map(full if drop else own)
    if split.exact:
        part = part.filter(_not_empty)
    return _counted(part, data, batching, split)


def _not_empty(*batch: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(batch)[0])[0] > 0


def _rebatched(data: tf.data.Dataset, batching: Batching, split: Split) -> tf.data.Dataset:
    """This rank's samples, unbatched and batched again: for samples that differ in shape."""
    samples = data.unbatch()
    if batching.samples is not None:
        samples = samples.apply(tf.data.experimental.assert_cardinality(batching.samples))
    drop, group = batching.drop_remainder and not split.exact, batching.size * split.size
    if drop and batching.samples is not None:
        samples = samples.take(batching.samples // group * group)
    elif drop:
        samples = samples.window(group, drop_remainder=True).flat_map(
            lambda *window: tf.data.Dataset.zip(as_element(window, data.element_spec))
        )
    own = samples.shard(split.size, split.rank) if drop else _elements(samples, split)
    part = batching.again(own, drop_remainder=drop)
    return _counted(part, data, batching, split)


def _counted(
    part: tf.data.Dataset, data: tf.data.Dataset, batching: Batching, split: Split
) -> tf.data.Dataset:
    """``part`` with its number of batches, if that can be computed."""
    if _cardinality(data) == tf.data.INFINITE_CARDINALITY:
        return part.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))
    if batching.samples is None:
        return part
    group = batching.size * split.size
    rows = split.count(batching.samples, group=group, drop_last=batching.drop_remainder)
    return part.apply(tf.data.experimental.assert_cardinality(-(-rows // batching.size)))


def _refuse_unordered(data: tf.data.Dataset) -> None:
    for step in _steps_of(data):
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                f"{_name(step)} has deterministic=False, so every rank would read another order: "
                "remove it"
            )
    if (0, 0) in _seeds_of(data):
        raise ValueError(
            "the pipeline shuffles without a seed, so every rank would read another order: "
            "use shuffle(..., seed=...), and a seed in list_files, Dataset.random and "
            "sample_from_datasets, or tf.random.set_seed before the pipeline is made"
        )


def _seeds_of(data: tf.data.Dataset) -> list[tuple[int, int]]:
    found = [
        (int(step._seed), int(step._seed2))
        for step in _steps_of(data)
        if hasattr(step, "_seed") and hasattr(step, "_seed2")
    ]
    return found + [seeds for step in _steps_of(data) for seeds in _seeds_inside(step)]


def _seeds_inside(step: tf.data.Dataset) -> Iterator[tuple[int, int]]:
    """The seeds of shuffles inside the functions of a step, such as ``interleave``."""
    for function in step._functions():
        graph = getattr(function.function, "graph", None)
        for op in graph.get_operations() if graph is not None else ():
            if op.type.startswith("ShuffleDataset"):
                seeds = [tf.get_static_value(each) for each in op.inputs[2:4]]
                if None not in seeds:
                    yield int(seeds[0]), int(seeds[1])


def _name(step: tf.data.Dataset) -> str:
    name = type(step).__name__
    return name.removeprefix("_").removesuffix("Dataset").removeprefix("Parallel").lower()


def _steps_of(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The steps of a pipeline, from the last one back to its sources."""
    yield data
    for source in data._inputs():
        yield from _steps_of(source)


def _refuse_common_caches(data: tf.data.Dataset) -> None:
    for step in _steps_of(data):
        name = _text(step._filename) if type(step).__name__ == "CacheDataset" else None
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
        if _text(filename) != "":  # without a name, the cache is in memory
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
    by_rank = gather("Dataset.save", os.path.realpath(path))
    if len(set(by_rank)) < len(by_rank):
        raise ValueError(
            f"save({path!r}) after hvkit.shard would write the parts of several ranks to one "
            f'place: put hvkit.rank() into the path, as in f"{path}-{{hvkit.rank()}}", or save the '
            "pipeline before hvkit.shard, on rank 0 only"
        )


def _of_rank() -> str:
    return f"-rank-{runtime.rank()}-of-{runtime.size()}"


def _follows_a_part(data: tf.data.Dataset) -> bool:
    return any(hasattr(step, _PART) for step in _steps_of(data))


def _text(filename: Any) -> str | None:
    value = static(filename)
    return value.decode() if isinstance(value, bytes) else value
