"""Functions on TensorFlow tensors for compressions: ``hvkit.compression.compression.Ops``."""

from __future__ import annotations

import functools
import math
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

reshape, cast, where, split, take = tf.reshape, tf.cast, tf.where, tf.split, tf.gather
finite, rounded = tf.math.is_finite, tf.round
permute = transpose = tf.transpose
concat = functools.partial(tf.concat, axis=0)
mean_of_rows = functools.partial(tf.reduce_mean, axis=0)


def pad(x: tf.Tensor, zeros: int) -> tf.Tensor:
    return tf.pad(x, [[0, zeros]]) if zeros else x


def join(*columns: tf.Tensor) -> tf.Tensor:
    return tf.concat(columns, axis=1)


def largest(x: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(_absolute(x), axis=1, keepdims=True)


def _absolute(x: tf.Tensor) -> tf.Tensor:
    # TensorFlow may overlook NaN where it looks for the largest.
    return tf.where(tf.math.is_nan(x), tf.constant(math.inf, x.dtype), tf.abs(x))


def bits(x: tf.Tensor, dtype: str) -> tf.Tensor:
    wanted = tf.as_dtype(dtype)
    if x.dtype.size > wanted.size:  # TensorFlow puts the bytes of a value into a new dimension
        return tf.reshape(tf.bitcast(x, wanted), (x.shape[0], -1))
    if x.dtype.size < wanted.size:
        return tf.bitcast(tf.reshape(x, (x.shape[0], -1, wanted.size // x.dtype.size)), wanted)
    return tf.bitcast(x, wanted)


def constant(array: NDArray[Any], like: tf.Tensor) -> tf.Tensor:
    return tf.constant(array)


def to_numpy(x: tf.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = x.numpy()
    return array


def largest_at(x: tf.Tensor, count: int) -> tf.Tensor:
    return tf.math.top_k(_absolute(x), count, sorted=False).indices


def without(x: tf.Tensor, at: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_update(x, at[:, None], tf.zeros_like(at, x.dtype))


def sum_at(length: int, at: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(values, at, length)


def orthonormal(x: tf.Tensor) -> tf.Tensor:
    return tf.linalg.qr(x).q
