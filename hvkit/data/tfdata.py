"""Sharding ``tf.data`` pipelines.

Every rank runs the whole pipeline and takes its part after the last step, so a seeded shuffle has
the same order as in one process. If the pipeline ends in batches, their samples are divided. Other
elements stay whole, and so do batches after a step that runs a function on them, since a ``map``
may turn a batch into one sequence, whose rows are not samples, or after an unknown step. Sharding
right after the source takes less time, because every rank runs the steps before ``shard`` for all
samples.

All ranks run the same script, so with ``cache("file")`` after ``hvkit.shard`` they would write
their different parts into the same file, which would be every rank's data in the next epoch.
TensorFlow has no hook for steps that are added to a dataset later, or to one of sharded arrays. So
on several ranks ``hvkit.shard`` replaces ``Dataset.cache`` and ``Dataset.save``.

TensorFlow has no public access to a dataset's inputs and seeds. This module reads private
attributes, and names of private classes, that are the same in TensorFlow 2.16 and 2.21.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkit import runtime
from hvkit.communication.collectives import gather
from hvkit.data.rank_samples import Queue, Split

# Marks a rank's part, so that ``save`` does not write it over other ranks' parts.
_PART = "_hvkit_part"

# Kinds of steps that keep the batches and their number.
_PASS_ON = {"assertcardinality", "cache", "options", "prefetch", "restructured", "shuffle"}
# Kinds that keep the batches but may change their number.
_RENUMBER = {"concatenate", "ignoreerrors", "repeat", "shard", "skip", "snapshot", "take", "zip"}
_BATCH = {"batch", "densetosparsebatch", "paddedbatch", "rebatch"}


def shard_tfdata(
    data: tf.data.Dataset, split: Split, seed: int | None
) -> tuple[tf.data.Dataset, list[str]]:
    """One rank's part of a pipeline, which has its own seeds, and the facts equal on all ranks."""
    if split.size == 1:
        return data, []
    _refuse_unordered(data)
    _refuse_common_caches(data)
    batching = _batching_of(data)
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
    return part, _facts(data, _batching_of(data), split)


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
    if _stackable(data.element_spec):

        def row(*stack: Any) -> Any:
            element = _as_element(stack, data.element_spec)
            rows = tf.shape(tf.nest.flatten(element)[0])[0]
            return tf.nest.map_structure(lambda each: each[split.rank % rows], element)

        return data.batch(split.size).map(row)

    def one_of(*window: Any) -> tf.data.Dataset:
        elements = tf.data.Dataset.zip(_as_element(window, data.element_spec))
        return elements.repeat().skip(split.rank).take(1)

    return data.window(split.size).flat_map(one_of)


def _regrouped(data: tf.data.Dataset, batching: Batching, split: Split) -> tf.data.Dataset:
    """Every N-th sample of the batches of N ranks."""
    group, drop = batching.size * split.size, batching.drop_remainder and not split.exact

    def own(*batch: Any) -> Any:
        element = _as_element(batch, data.element_spec)
        rows = tf.shape(tf.nest.flatten(element)[0], tf.int64)[0]
        last = rows if split.exact else (rows + split.size - 1) // split.size * split.size
        last = tf.maximum(last, split.rank)
        positions = tf.range(split.rank, last, split.size, tf.int64) % tf.maximum(rows, 1)
        return tf.nest.map_structure(lambda each: tf.gather(each, positions), element)

    def full(*batch: Any) -> Any:
        element = _as_element(batch, data.element_spec)
        return tf.nest.map_structure(lambda each: each[split.rank :: split.size], element)

    part = data.rebatch(group, drop_remainder=drop).map(full if drop else own)
    if split.exact:
        part = part.filter(lambda *batch: tf.shape(tf.nest.flatten(batch)[0])[0] > 0)
    return _counted(part, data, batching, split)


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
            lambda *window: tf.data.Dataset.zip(_as_element(window, data.element_spec))
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


@dataclass(frozen=True)
class Batching:
    size: int
    drop_remainder: bool
    samples: int | None
    """The number of samples in all batches; None if only reading them would show it."""
    spec: Any
    padding: Any = None
    """The padding values of ``padded_batch``, in the structure of ``spec``."""

    @property
    def unpadded(self) -> bool:
        dense = all(isinstance(leaf, tf.TensorSpec) for leaf in tf.nest.flatten(self.spec))
        return dense and self.padding is None

    def again(self, samples: tf.data.Dataset, *, drop_remainder: bool) -> tf.data.Dataset:
        if self.padding is not None:
            return samples.padded_batch(
                self.size, padding_values=self.padding, drop_remainder=drop_remainder
            )
        if not any(isinstance(leaf, tf.RaggedTensorSpec) for leaf in tf.nest.flatten(self.spec)):
            return samples.batch(self.size, drop_remainder=drop_remainder)
        # ragged_batch makes everything without a fixed shape ragged, even if it was dense.
        ragged = samples.ragged_batch(self.size, drop_remainder=drop_remainder)

        def like(spec: Any, value: Any) -> Any:
            dense = isinstance(spec, tf.TensorSpec) and isinstance(value, tf.RaggedTensor)
            return value.to_tensor() if dense else value

        return ragged.map(
            lambda *batch: tf.nest.map_structure(like, self.spec, _as_element(batch, self.spec))
        )


def _batching_of(data: tf.data.Dataset) -> Batching | None:
    """How a pipeline batched its elements; None if they are no batches."""
    if not all(hasattr(leaf, "shape") for leaf in tf.nest.flatten(data.element_spec)):
        return None  # elements hold None or datasets, which have no rows
    steps = list(_batch_steps(data))
    if None in steps:
        return None
    sizes = {_size(step) for step in steps}
    size = sizes.pop()
    if sizes or size is None:
        found = ", ".join(sorted(map(str, {size, *sizes})))
        raise ValueError(
            f"the pipeline has batches of different sizes ({found}), which cannot be divided into "
            "equal parts: pass the dataset to hvkit.shard before batching it"
        )
    drop = any(_static(getattr(step, "_drop_remainder", False)) for step in steps)
    return Batching(
        size=size,
        drop_remainder=drop,
        samples=_samples(data, drop),
        spec=data.element_spec,
        padding=_padding(data, steps),
    )


def _batch_steps(data: tf.data.Dataset) -> Iterator[tf.data.Dataset | None]:
    """The last batching on each path to a source; None for a path without batching."""
    if _kind(data) in _BATCH:
        yield data
    elif _kind(data) in _PASS_ON | _RENUMBER and data._inputs():
        for source in data._inputs():
            yield from _batch_steps(source)
    else:
        yield None


def _size(step: Any) -> int | None:
    value = _static(getattr(step, "_batch_size", getattr(step, "_batch_sizes", None)))
    return int(value) if value is not None and not getattr(value, "shape", ()) else None


def _static(value: Any) -> Any:
    """The value of an argument of a step; None if it is known only when the pipeline runs."""
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def _samples(data: Any, drop: bool) -> int | None:
    while _kind(data) in _PASS_ON:
        (data,) = data._inputs()
    if _kind(data) not in _BATCH - {"rebatch"}:  # whose input is not samples
        return None
    (source,), size = data._inputs(), _size(data)
    length = int(source.cardinality())
    if length < 0 or size is None:
        return None
    return length // size * size if drop else length


def _padding(data: tf.data.Dataset, steps: list[Any]) -> Any:
    padded = [step for step in steps if _kind(step) == "paddedbatch"]
    if not padded:
        return None
    spec = data.element_spec
    if _stackable(spec, start=1):
        return None
    if len(steps) > 1 or padded[0].element_spec != spec:
        raise ValueError(
            "the pipeline zips or concatenates the result of padded_batch, so it cannot be padded "
            "again: pass the dataset to hvkit.shard before padded_batch"
        )
    return padded[0]._padding_values


def _as_element(arguments: tuple[Any, ...], spec: Any) -> Any:
    """The arguments of a function in ``map``, as the element they came from."""
    return tf.nest.pack_sequence_as(spec, tf.nest.flatten(arguments))


def _stackable(spec: Any, start: int = 0) -> bool:
    """Whether elements are dense and have one shape, from dimension ``start`` on."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape[start:].is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )


def _refuse_unordered(data: tf.data.Dataset) -> None:
    for step in _steps_of(data):
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                f"{_kind(step)} has deterministic=False, so every rank would read another order: "
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


def _kind(step: tf.data.Dataset) -> str:
    """``batch`` for TensorFlow's ``_ParallelBatchDataset``; a script's class keeps its name."""
    name = type(step).__name__
    if not type(step).__module__.startswith("tensorflow."):
        return name
    return name.removeprefix("_").removesuffix("Dataset").removeprefix("Parallel").lower()


def _steps_of(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """The steps of a pipeline, from the last one back to its sources."""
    yield data
    for source in data._inputs():
        yield from _steps_of(source)


def _refuse_common_caches(data: tf.data.Dataset) -> None:
    for step in _steps_of(data):
        name = _text(step._filename) if _kind(step) == "cache" else None
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
        if any(hasattr(step, _PART) for step in _steps_of(self)):
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


def _text(filename: Any) -> str | None:
    value = _static(filename)
    return value.decode() if isinstance(value, bytes) else value
