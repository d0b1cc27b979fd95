"""Batch norm on several ranks: which statistics a layer normalises with, and which it keeps.

``batch_norm="average"``: each update averages the layers' moving statistics over ranks.
``batch_norm="sync"``: layers normalise with the statistics of all ranks' batches together. So do
those with ``synchronized=True`` by default.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvkit import runtime
from hvkit.frameworks.keras.collectives.gather import gather_rows
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.refusals import refuse_xla
from hvkit.sync.nonfinite import kept_statistics

# Numbers the collectives; ranks make the layers in the same order.
_serial = itertools.count()


def average_statistics(model: keras.Model, wait: GraphWait) -> None:
    """Average the moving statistics of the model's trainable batch-norm layers; a collective.

    Frozen layers use their statistics without changing them, so those are already equal.

    Args:
        model: with weights.
        wait: counts the waits in this collective.
    """
    kept = _statistics_in(model)
    if not kept:
        return
    flat = tf.concat([tf.cast(tf.reshape(v.value, [-1]), tf.float32) for v in kept], axis=0)

    mean = wait.around(flat, lambda vector: Wire("batch norm").mean(vector, wait.key))
    pieces = tf.split(mean, [int(v.shape[0]) for v in kept])
    for variable, piece in zip(kept, pieces, strict=True):
        variable.assign(tf.cast(piece, variable.dtype))


class LastStatistics:
    """The moving statistics of a model after the last update that was not skipped.

    A batch with a NaN spoils them in the forward pass, before anybody looks at its gradients.

    Args:
        model: need not have weights yet.
        averaged: averages them over the ranks: a skipped update must leave all ranks alike, too.
    """

    def __init__(self, model: keras.Model, averaged: Callable[[], None]) -> None:
        self._model = model
        self._averaged = averaged
        self._kept: list[tuple[Any, tf.Variable]] = []
        kept_statistics.add(self)
        self.prepare()

    def prepare(self) -> None:
        """Make room for them; the first time that the model has weights.

        In eager code the first batch may have spoilt them already: then they are those of a new
        layer.
        """
        if not self._kept:
            with tf.init_scope():
                means_and_variances = enumerate(_statistics_in(self._model))
                self._kept = [
                    (each, tf.Variable(_finite(each.value, float(i % 2)), trainable=False))
                    for i, each in means_and_variances
                ]

    def keep(self) -> None:
        """Remember them."""
        for now, kept in self._kept:
            kept.assign(_finite(now.value, kept))

    def put_back(self) -> None:
        """Put those that are no longer finite back; a collective."""
        self._averaged()
        for now, kept in self._kept:
            now.assign(_finite(now.value, kept))


def _finite(values: Any, otherwise: Any) -> Any:
    """The values if all of them are finite; otherwise others."""
    fine = tf.reduce_all(tf.math.is_finite(values))
    return tf.where(fine, values, tf.cast(otherwise, values.dtype))


def _statistics_in(model: keras.Model) -> list[Any]:
    return [
        variable
        for layer in _layers(model)
        if layer.trainable and layer.built
        for variable in (layer.moving_mean, layer.moving_variance)
    ]


def synchronise_batch_norm(model: keras.Model, *, everything: bool) -> None:
    """Make the model's batch-norm layers compute batch statistics over all ranks.

    Args:
        model: may have no weights yet.
        everything: all layers, or those with ``synchronized=True``.
    """
    for layer in _layers(model) if everything else made_synchronised(model):
        if "_moments" not in vars(layer):
            layer._moments = _moments_over_ranks(layer, f"hvkit.batch_norm.{next(_serial)}")


def made_synchronised(model: keras.Model) -> list[Any]:
    """The layers with ``synchronized=True``, as a script for ``tf.distribute`` makes them."""
    return [layer for layer in _layers(model) if layer.synchronized]


def _layers(model: keras.Model) -> list[Any]:
    normalisation = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, normalisation)]


def _moments_over_ranks(layer: Any, name: str) -> Any:
    """A ``_moments`` for the layer: mean and biased variance of each channel over all samples.

    It combines the ranks' moments as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979).
    """
    of_own_batch = layer._moments

    def moments(inputs: tf.Tensor, mask: Any) -> tuple[tf.Tensor, tf.Tensor]:
        refuse_xla("batch norm over all ranks' batches")
        mean, variance = of_own_batch(inputs, mask)
        count = _samples(layer, inputs, mask)
        mine = tf.concat([mean, variance, [count]], axis=0)
        everyone = gather_rows(mine[None], [1] * runtime.size(), name, _wait(), Wire("batch norm"))
        channels = int(mean.shape[0])
        means, variances, counts = tf.split(everyone, [channels, channels, 1], axis=1)
        total = tf.reduce_sum(counts)
        mean = tf.reduce_sum(means * counts, axis=0) / total
        spread = tf.reduce_sum((variances + (means - mean) ** 2) * counts, axis=0)
        return mean, spread / total

    return moments


@functools.cache
def _wait() -> GraphWait:
    """One counter for all layers together: each one costs the watcher time."""
    return GraphWait("hvkit.batch_norm", "synchronised batch norm")


def _samples(layer: Any, inputs: tf.Tensor, mask: Any) -> tf.Tensor:
    """How many values each channel has in this batch."""
    if mask is None:
        values = tf.size(inputs) / inputs.shape[layer.axis]
        return tf.cast(values, inputs.dtype)
    shape = tf.shape(inputs)[tf.rank(mask) :]
    per_entry = tf.reduce_prod(shape) / inputs.shape[layer.axis]
    return tf.reduce_sum(tf.cast(mask, inputs.dtype)) * tf.cast(per_entry, inputs.dtype)
