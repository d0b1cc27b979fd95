"""Whether the elements of a ``tf.data`` pipeline are batches, and how it made them.

Elements are batches if no step after the last batching runs a function on them: a ``map`` may
turn a batch into one sequence, whose rows are not samples. After an unknown step, elements do not
count as batches either. TensorFlow has no public access to a dataset's inputs; this module reads
private attributes that are the same in TensorFlow 2.16 and 2.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

# Steps that keep the batches and their number.
_PASS_ON = {
    "_AssertCardinalityDataset",
    "CacheDataset",
    "_OptionsDataset",
    "_PrefetchDataset",
    "_RestructuredDataset",
    "_ShuffleDataset",
}
# Steps that keep the batches but may change their number.
_KEEP_BATCHES = {
    *_PASS_ON,
    "_ConcatenateDataset",
    "_IgnoreErrorsDataset",
    "_RepeatDataset",
    "_ShardDataset",
    "_SkipDataset",
    "_SnapshotDataset",
    "_TakeDataset",
    "_ZipDataset",
}
_BATCH = {
    "_BatchDataset",
    "_DenseToSparseBatchDataset",
    "_PaddedBatchDataset",
    "_ParallelBatchDataset",
    "_RebatchDataset",
}


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

        def as_before(*batch: Any) -> Any:
            return tf.nest.map_structure(_like, self.spec, as_element(batch, self.spec))

        return ragged.map(as_before)


def batching_of(data: tf.data.Dataset) -> Batching | None:
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
    drop = any(static(getattr(step, "_drop_remainder", False)) for step in steps)
    return Batching(
        size=size,
        drop_remainder=drop,
        samples=_samples(data, drop),
        spec=data.element_spec,
        padding=_padding(data, steps),
    )


def _like(spec: Any, value: Any) -> Any:
    dense = isinstance(spec, tf.TensorSpec) and isinstance(value, tf.RaggedTensor)
    return value.to_tensor() if dense else value


def _batch_steps(data: tf.data.Dataset) -> Iterator[tf.data.Dataset | None]:
    """The last batching on each path to a source; None for a path without batching."""
    kind = type(data).__name__
    if kind in _BATCH:
        yield data
    elif kind in _KEEP_BATCHES and data._inputs():
        for source in data._inputs():
            yield from _batch_steps(source)
    else:
        yield None


def _size(step: Any) -> int | None:
    value = static(getattr(step, "_batch_size", getattr(step, "_batch_sizes", None)))
    return int(value) if value is not None and not getattr(value, "shape", ()) else None


def static(value: Any) -> Any:
    """The value of an argument of a step; None if it is known only when the pipeline runs."""
    return tf.get_static_value(value) if tf.is_tensor(value) else value


def _samples(data: Any, drop: bool) -> int | None:
    while type(data).__name__ in _PASS_ON:
        (data,) = data._inputs()
    if type(data).__name__ not in _BATCH - {"_RebatchDataset"}:  # its input is not samples
        return None
    (source,), size = data._inputs(), _size(data)
    length = int(source.cardinality())
    if length < 0 or size is None:
        return None
    return length // size * size if drop else length


def _padding(data: tf.data.Dataset, steps: list[Any]) -> Any:
    padded = [step for step in steps if type(step).__name__ == "_PaddedBatchDataset"]
    if not padded:
        return None
    spec = data.element_spec
    if stackable(spec, start=1):
        return None
    if len(steps) > 1 or padded[0].element_spec != spec:
        raise ValueError(
            "the pipeline zips or concatenates the result of padded_batch, so it cannot be padded "
            "again: pass the dataset to hvkit.shard before padded_batch"
        )
    return padded[0]._padding_values


def as_element(arguments: tuple[Any, ...], spec: Any) -> Any:
    """The arguments of a function in ``map``, as the element they came from."""
    return tf.nest.pack_sequence_as(spec, tf.nest.flatten(arguments))


def stackable(spec: Any, start: int = 0) -> bool:
    """Whether elements are dense and have one shape, from dimension ``start`` on."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape[start:].is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )
