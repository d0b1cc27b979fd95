"""What a ``tf.data`` pipeline is made of: the shape of its elements, and its random steps.

TensorFlow has no public way to ask a dataset for its inputs and seeds. What is read here are
private attributes, the same in TensorFlow 2.16 and 2.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensorflow as tf


def whole(arguments: tuple[Any, ...], spec: Any) -> Any:
    """What a function of ``map`` was called with, as the one element that it came from."""
    return tf.nest.pack_sequence_as(spec, tf.nest.flatten(arguments))


def stackable(spec: Any, start: int = 0) -> bool:
    """Whether elements are dense and of one shape, from dimension ``start`` on."""
    return all(
        isinstance(leaf, tf.TensorSpec) and leaf.shape[start:].is_fully_defined()
        for leaf in tf.nest.flatten(spec)
    )


def refuse_unordered(data: tf.data.Dataset) -> None:
    """Refuse a pipeline that every rank would read in another order.

    Raises:
        ValueError: a random step without a seed, or one that gives up the order for speed.
    """
    for step in _steps(data):
        if getattr(step, "_deterministic", None) == "false":
            raise ValueError(
                f"{_name(step)} has deterministic=False, so that every rank would see another "
                "order: leave that out"
            )
    if (0, 0) in seeds_of(data):
        raise ValueError(
            "the pipeline shuffles without a seed, so that every rank would see another order: "
            "use shuffle(..., seed=...), and a seed in list_files, Dataset.random and "
            "sample_from_datasets, or tf.random.set_seed before the pipeline is made"
        )


def seeds_of(data: tf.data.Dataset) -> list[tuple[int, int]]:
    """The seeds of all random steps; (0, 0) where there is none."""
    found = [
        (int(step._seed), int(step._seed2))
        for step in _steps(data)
        if hasattr(step, "_seed") and hasattr(step, "_seed2")
    ]
    return found + [seeds for step in _steps(data) for seeds in _seeds_inside(step)]


def _seeds_inside(step: tf.data.Dataset) -> Iterator[tuple[int, int]]:
    """The seeds of shuffles in the functions of a step, as ``interleave`` has."""
    for function in step._functions():
        graph = getattr(function.function, "graph", None)
        for op in graph.get_operations() if graph is not None else ():
            if op.type.startswith("ShuffleDataset"):
                seeds = [tf.get_static_value(each) for each in op.inputs[2:4]]
                if None not in seeds:
                    yield int(seeds[0]), int(seeds[1])


def _steps(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield data
    for source in data._inputs():
        yield from _steps(source)


def _name(step: tf.data.Dataset) -> str:
    name = type(step).__name__
    return name.removeprefix("_").removesuffix("Dataset").removeprefix("Parallel").lower()
