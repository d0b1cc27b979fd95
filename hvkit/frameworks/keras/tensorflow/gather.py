"""Tensors of TensorFlow over all ranks, for the functions of hvkit that scripts call.

In eager code and in graphs ``hvkit.allgather`` and ``hvkit.mean``, which have a backward pass; in
graphs ``hvkit.allreduce``, ``average`` and ``any_rank``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from hvkit.errors import RanksDisagreeError
from hvkit.frameworks.keras.backends import not_converted
from hvkit.frameworks.keras.tensorflow.wire import (
    GraphWait,
    Wire,
    name_in_graph,
    refuse_xla,
    widened,
)
from hvkit.runtime import size
from hvkit.watch.rank_errors import for_graph

# Names of collectives in eager code return after so many calls: Horovod remembers some only.
_NAMES = 64

_ALLGATHER = "hvkit.allgather"

_IN_GRAPHS = (
    *("float16", "bfloat16", "float32", "float64", "bool"),
    *("int8", "uint8", "int16", "uint16", "int32", "int64"),
)

_OTHER_SHAPES = (
    "ranks pass tensors of different shapes to hvkit.mean: pass totals and counts of the same "
    "shapes on every rank; this rank's are"
)

_serial = itertools.count()


def gather_rows(
    rows: tf.Tensor,
    counts: Sequence[Any],
    name: str,
    wait: GraphWait,
    wire: Wire,
    rows_for_each: Callable[[tf.Tensor], tf.Tensor | None] = lambda gathered: None,
) -> tf.Tensor:
    """All ranks' rows below each other, in rank order; a collective, as is its backward pass.

    The gradient sums over the ranks' losses, because the gradients of the weights are averaged
    later. Horovod's own gradient of an allgather would divide by the number of ranks.

    ``rows_for_each`` returns, from the result, how many rows of the batch all ranks have for each
    of this rank, whose loss and gradients are then weighted by its rows; None for equal weights.
    """
    start = sum(counts[: wire.rank])

    def concatenate(tensor: tf.Tensor) -> tf.Tensor:
        return wire.gather(tensor, name)

    def add(tensor: tf.Tensor) -> tf.Tensor:
        return wire.sum(tensor, f"{name}.backward")

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def gather(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        # Horovod has no bfloat16.
        gathered = tf.cast(wait.around(widened(tensor), concatenate), tensor.dtype)
        weight = None
        if (found := rows_for_each(gathered)) is not None:
            weight = tf.math.divide_no_nan(tf.cast(wire.size, found.dtype), found)

        def gradient(upstream: Any) -> tf.Tensor:
            sent = widened(tf.convert_to_tensor(upstream))
            if weight is not None:
                sent *= tf.cast(weight, sent.dtype)
            rows = wait.around(sent, add)[start : start + counts[wire.rank]]
            if weight is not None:  # the averager multiplies this rank's gradients by it later
                rows = tf.math.divide_no_nan(rows, tf.cast(weight, rows.dtype))
            return tf.cast(rows, upstream.dtype)

        return gathered, gradient

    return gather(rows)


def needs_gradients(tensor: tf.Tensor) -> bool:
    """Whether a backward pass may come back to this tensor, since a tape records it."""
    return bool(record.should_record_backprop([tensor]))


def gather(
    tensor: tf.Tensor, shapes: Sequence[tuple[int, ...]], *, rows_for_each: tf.Tensor | None = None
) -> list[tf.Tensor]:
    """The tensors of all ranks, of one dtype, in eager code."""
    sizes = [math.prod(shape) for shape in shapes]
    name = f"hvkit.allgather.{next(_serial) % _NAMES}"
    flat, wait = tf.reshape(tensor, [-1]), _wait(_ALLGATHER)
    gathered = gather_rows(flat, sizes, name, wait, Wire("objects"), lambda _: rows_for_each)
    pieces = zip(tf.split(gathered, sizes), shapes, strict=True)
    return [tf.reshape(piece, shape) for piece, shape in pieces]


@not_converted
def gather_in_graph(
    tensor: tf.Tensor, rows_for_each: Callable[[], tf.Tensor | None] = lambda: None
) -> list[tf.Tensor]:
    """The tensors of all ranks, while TensorFlow traces a graph; first dimensions may differ."""
    refuse_xla("hvkit.allgather")
    dtype, shape = tensor.dtype, tensor.shape
    if dtype.name not in _IN_GRAPHS:
        raise TypeError(
            f"in a graph hvkit.allgather takes tensors of {', '.join(_IN_GRAPHS)}, got one of "
            f"{dtype.name}: gather numbers, such as the indices of strings, or call it outside of "
            "tf.function"
        )
    found = rows_for_each() if dtype.is_floating else None
    wire, name = Wire("objects"), name_in_graph("hvkit.allgather")
    rows = tf.cast(tensor, tf.int32) if dtype == tf.bool else tensor
    rows = rows if shape.rank else tf.reshape(rows, [1])
    length = tf.shape(rows)[:1]
    counts = _wait(_ALLGATHER).around(length, lambda sent: wire.gather(sent, f"{name}.rows"))
    counts = tf.ensure_shape(counts, [wire.size])
    gathered = gather_rows(rows, tf.unstack(counts), name, _wait(_ALLGATHER), wire, lambda _: found)
    pieces = tf.split(gathered, counts, num=wire.size)
    for piece in pieces if shape.rank else ():
        piece.set_shape([None, *shape[1:]])
    return [tf.cast(p if shape.rank else tf.reshape(p, []), dtype) for p in pieces]


def facts_of_mean(total: Any, count: Any) -> tuple[Any, ...]:
    """Facts that ranks compare, and that ranks with plain numbers need.

    The framework, the mean's dtype, the device's type and whether a backward pass may come back,
    neither of which matters here, and of both the shape, None for a number or in a graph.
    """
    given = [each for each in (total, count) if isinstance(each, tf.Tensor | tf.Variable)]
    if any(each.dtype.is_complex for each in given):
        raise TypeError("pass the real and the imaginary part: tf.math.real(total)")
    known: Any = tf.Tensor | tf.Variable if tf.executing_eagerly() else ()
    shapes = [tuple(x.shape) if isinstance(x, known) else None for x in (total, count)]
    dtype = next((each.dtype for each in given if each.dtype.is_floating), None)
    # TensorFlow divides whole numbers in float64, and has numbers of Python in float32.
    dtype = dtype or (tf.float64 if given else tf.float32)
    return "tensorflow", dtype.name, "", False, shapes


@not_converted
def mean(
    both: Sequence[Any],
    shapes: Sequence[Sequence[int]],
    facts: Sequence[Any],
    ranks: tf.Tensor | None,
) -> tf.Tensor:
    """The sum of totals over ranks, divided by the sum of counts; one collective.

    In eager code and in graphs. Gradients of weights are averaged later, so the gradient of the
    total is multiplied by ``ranks``, by default the number of ranks.
    """
    wide = [
        tf.cast(each, tf.float64)
        if isinstance(each, tf.Tensor | tf.Variable)
        else tf.fill(shape, tf.constant(each, tf.float64))
        for each, shape in zip(both, shapes, strict=True)
    ]
    totals, counts = wide if size() == 1 else _sums(wide, ranks)
    return tf.cast(totals / counts, facts[1])


def _sums(numbers: Sequence[tf.Tensor], ranks: tf.Tensor | None) -> list[tf.Tensor]:
    if in_graph := not tf.executing_eagerly():
        refuse_xla("hvkit.mean")
    wire = Wire("objects")
    factor = tf.cast(wire.size if ranks is None else ranks, tf.float64)
    name = name_in_graph("hvkit.mean") if in_graph else f"hvkit.mean.{next(_serial) % _NAMES}"

    def add(sent: tf.Tensor) -> tf.Tensor:
        return wire.sum(sent, name)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def summed(sent: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return _wait(_ALLGATHER).around(sent, add), lambda upstream: upstream * factor

    flat = [tf.reshape(each, [-1]) for each in numbers]
    sizes = [tf.size(each) for each in flat]
    if in_graph:  # where ranks have not compared shapes before
        with tf.device("CPU:0"):
            text = tf.strings.format("{}/{}", [tf.shape(each) for each in numbers])
            key = tf.cast(tf.strings.to_hash_bucket_fast(text, 1 << 20), tf.float64)
        sums = summed(tf.concat([*flat, [key, key * key]], 0))
        *found, keys = tf.split(sums, [*sizes, 2])
        # All keys are equal if the square of their mean is the mean of their squares.
        equal = tf.debugging.Assert(
            keys[0] * keys[0] == wire.size * keys[1],
            [for_graph(RanksDisagreeError(_OTHER_SHAPES), on_every_rank=True), text],
        )
        with tf.control_dependencies([equal]):
            found = list(map(tf.identity, found))
    else:
        found = tf.split(summed(tf.concat(flat, 0)), sizes)
    return [tf.reshape(s, tf.shape(each)) for s, each in zip(found, numbers, strict=True)]


@not_converted
def allreduce(value: Any, op: str, sent_as: str) -> tf.Tensor:
    """``hvkit.allreduce`` of a tensor or variable, without gradients."""
    tensor = tf.convert_to_tensor(value)
    return tf.cast(_reduced(tf.cast(tensor, sent_as), op, "hvkit.allreduce"), tensor.dtype)


@not_converted
def average(values: Mapping[str, Any], weight: Any) -> dict[str, tf.Tensor]:
    """``hvkit.average`` of numbers; a weight that is negative or not finite makes the means NaN."""
    numbers = [tf.reshape(tf.cast(v, tf.float64), []) for v in values.values()]
    w = tf.reshape(tf.cast(1.0 if weight is None else weight, tf.float64), [])
    w = tf.where(tf.math.is_finite(w) & (w >= 0), w, tf.constant(math.nan, tf.float64))
    counted = [tf.where(tf.equal(w, 0), tf.zeros_like(v), v * w) for v in numbers]
    *totals, total = tf.unstack(_reduced(tf.stack([*counted, w]), "sum", "hvkit.average"))
    dtypes = [tf.convert_to_tensor(v).dtype for v in values.values()]
    return {
        name: tf.cast(each / total, dtype if dtype.is_floating else tf.float32)
        for name, each, dtype in zip(values, totals, dtypes, strict=True)
    }


@not_converted
def any_rank(flag: Any) -> tf.Tensor:
    number = tf.cast(tf.reshape(tf.cast(flag, tf.bool), []), tf.int32)
    return _reduced(number, "max", "hvkit.any_rank") > 0


def _reduced(tensor: tf.Tensor, op: str, call: str) -> tf.Tensor:
    if size() == 1:
        return tf.stop_gradient(tensor)
    refuse_xla(call)
    name = name_in_graph(call)
    wire = Wire("objects")
    collective = {"mean": wire.sum, "sum": wire.sum, "min": wire.lowest, "max": wire.highest}[op]
    with tf.device("CPU:0"):
        reduced = _wait(call).around(tensor, lambda sent: collective(sent, name))
        if op in ("min", "max") and tensor.dtype.is_floating:
            # With MPI the result of a NaN depends on the order of ranks.
            is_nan = tf.cast(tf.math.is_nan(tensor), tf.int32)
            nan = _wait(call).around(is_nan, lambda sent: wire.highest(sent, f"{name}.nan")) > 0
            reduced = tf.where(nan, tf.constant(math.nan, tensor.dtype), reduced)
        reduced = tf.ensure_shape(reduced, tensor.shape)
        return tf.stop_gradient(reduced / wire.size if op == "mean" else reduced)


@functools.cache
def _wait(call: str) -> GraphWait:
    """One counter for all calls of a function, since each costs the watcher time."""
    return GraphWait(call, call)
