"""Batch norm on several ranks: which statistics a layer normalises with, and which it keeps.

``batch_norm="average"``: each update averages the layers' moving statistics over ranks.
``batch_norm="sync"``: layers normalise with the statistics of all ranks' batches together. So do
those with ``synchronized=True`` by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvkit.communication.group import Group
from hvkit.frameworks.keras.collectives.gather import gather_rows
from hvkit.frameworks.keras.collectives.graph_collectives import GraphWait
from hvkit.frameworks.keras.collectives.wire import Wire
from hvkit.frameworks.keras.graph_refusals import refuse_xla
from hvkit.frameworks.keras.loss_means import rows_in_step
from hvkit.frameworks.keras.synchronised_norm import layers_of
from hvkit.sync.nonfinite import kept_statistics


def average_statistics(model: keras.Model, wait: GraphWait, group: Group) -> None:
    """Average the moving statistics of the model's trainable batch-norm layers; a collective.

    Frozen layers use their statistics without changing them, so those are already equal.

    Args:
        model: with weights.
        wait: counts the waits in this collective.
        group: the ranks that train the model.
    """
    kept = _statistics_in(model)
    if not kept:
        return
    flat = tf.concat([tf.cast(tf.reshape(v.value, [-1]), tf.float32) for v in kept], axis=0)

    mean = wait.around(flat, lambda vector: Wire("batch norm", group).mean(vector, wait.key))
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
        for layer in layers_of(model)
        if layer.trainable and layer.built
        for variable in (layer.moving_mean, layer.moving_variance)
    ]


def gather_row(name: str, group: Group, row: tf.Tensor) -> tf.Tensor:
    """All ranks' vectors as rows, in rank order; a collective, as is its backward pass."""
    refuse_xla("batch norm over all ranks' batches")
    rows = rows_in_step()
    sent = row if rows is None else tf.concat([row, tf.cast([rows], row.dtype)], axis=0)

    def share(everyone: tf.Tensor) -> tf.Tensor | None:
        if rows is None:
            return None
        of_ranks = tf.cast(everyone[:, -1], tf.float64)
        return tf.math.divide_no_nan(tf.reduce_sum(of_ranks), of_ranks[group.rank])

    wire = Wire("batch norm", group)
    everyone = gather_rows(sent[None], [1] * group.size, name, _wait(group), wire, share)
    return everyone[:, : row.shape[0]]


@functools.cache
def _wait(group: Group) -> GraphWait:
    """One counter for all layers together: each one costs the watcher time."""
    return GraphWait("hvkit.batch_norm", "synchronised batch norm", group)
