"""Batch norm, and what else layers assign in forward passes.

``batch_norm="average"``: each update averages the layers' moving statistics over ranks.
``batch_norm="sync"``: layers normalise with the statistics of all ranks' batches together. So do
those with ``synchronized=True`` by default.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from hvkit.frameworks.keras.backends import ON_TENSORFLOW, not_converted, outside_graphs
from hvkit.frameworks.keras.loss_means import rows_in_step
from hvkit.frameworks.keras.refusals import weights_of_models
from hvkit.runtime import Group
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, Rows, require_same_buffers, warn_of_integers
from hvkit.sync.port import kept_statistics

if ON_TENSORFLOW:
    import tensorflow as tf

    from hvkit.frameworks.keras.tensorflow.gather import gather_rows
    from hvkit.frameworks.keras.tensorflow.wire import (
        GraphWait,
        Wire,
        as_one,
        name_in_graph,
        refuse_xla,
        widened,
    )


GatherRow = Callable[[str, Group, Any], Any]
"""From a name and a vector: that of each rank of a group as a row, in rank order; a collective."""


def synchronise_batch_norm(
    model: keras.Model, *, everything: bool, gather: GatherRow, group: Group
) -> None:
    """Make ``everything``, or layers with ``synchronized=True``, use the batches of all ranks."""
    for layer in layers_of(model) if everything else made_synchronised(model):
        if "_moments" not in vars(layer):
            name = group.numbered("hvkit.batch_norm")
            gather_moments = functools.partial(gather, name, group)
            layer._moments = _moments_over_ranks(layer, gather_moments)


def made_synchronised(model: keras.Model) -> list[Any]:
    """The layers with ``synchronized=True``, as a script for ``tf.distribute`` makes them."""
    return [layer for layer in layers_of(model) if layer.synchronized]


def layers_of(model: keras.Model) -> list[Any]:
    normalisation = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, normalisation)]


def _moments_over_ranks(layer: Any, gather_moments: Callable[[Any], Any]) -> Any:
    """A ``_moments`` for the layer: mean and biased variance of each channel over all samples.

    It combines the ranks' moments as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979).
    """
    moments_of_batch = layer._moments

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = moments_of_batch(inputs, mask)
        count = ops.reshape(_samples(layer, inputs, mask), [1])
        gathered = gather_moments(ops.concatenate([mean, variance, count], axis=0))
        channels = int(mean.shape[0])
        means, variances, counts = ops.split(gathered, [channels, 2 * channels], axis=1)
        total = ops.sum(counts)
        mean = ops.sum(means * counts, axis=0) / total
        spread = ops.sum((variances + (means - mean) ** 2) * counts, axis=0)
        return mean, spread / total

    return moments


def _samples(layer: Any, inputs: Any, mask: Any) -> Any:
    if mask is None:
        return ops.cast(ops.size(inputs) / inputs.shape[layer.axis], inputs.dtype)
    shape = ops.shape(inputs)[len(mask.shape) :]
    per_entry = ops.prod(ops.convert_to_tensor(shape)) / inputs.shape[layer.axis]
    return ops.sum(ops.cast(mask, inputs.dtype)) * ops.cast(per_entry, inputs.dtype)


def average_statistics(model: keras.Model, wait: GraphWait, group: Group) -> None:
    """Average the moving statistics of batch-norm layers that train; a collective."""
    _average_over_ranks(_statistics_in(model), wait, group)


def _average_over_ranks(variables: Sequence[Any], wait: GraphWait, group: Group | None) -> None:
    """Average variables in one collective, of the widest of their dtypes."""
    if not variables:
        return
    wide = [widened(tf.convert_to_tensor(v.value)) for v in variables]
    widest = max((each.dtype for each in wide), key=lambda dtype: dtype.size)
    mean = functools.partial(Wire("batch norm", group).mean, name=wait.key)
    collective = functools.partial(wait.around, collective=mean)
    means = as_one([tf.cast(each, widest) for each in wide], collective)
    for v, each in zip(variables, means, strict=True):
        v.assign(tf.cast(each, v.dtype))


class LastStatistics:
    """The moving statistics of a model after the last update that was not skipped.

    A batch with a NaN spoils them in the forward pass, before its gradients are checked.
    ``averaged`` averages them over the ranks, which must be equal after a skipped update, too.
    """

    def __init__(self, model: keras.Model, averaged: Callable[[], None]) -> None:
        self._model = model
        self._averaged = averaged
        self._kept: list[tuple[Any, tf.Variable]] = []
        kept_statistics.add(self)
        self.prepare()

    def prepare(self) -> None:
        """Make room once the model has weights; in eager code a batch may have spoilt them."""
        if not self._kept:
            with tf.init_scope():
                means_and_variances = enumerate(_statistics_in(self._model))
                self._kept = [
                    (each, tf.Variable(_finite(each.value, float(i % 2)), trainable=False))
                    for i, each in means_and_variances
                ]

    def keep(self) -> None:
        for now, kept in self._kept:
            kept.assign(_finite(now.value, kept))

    def put_back(self) -> None:
        """Restore those that are no longer finite; a collective."""
        self._averaged()
        for now, kept in self._kept:
            now.assign(_finite(now.value, kept))


def _finite(values: Any, otherwise: Any) -> Any:
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
    refuse_xla("batch norm over all ranks' batches")
    rows = rows_in_step()
    sent = row if rows is None else tf.concat([row, tf.cast([rows], row.dtype)], axis=0)

    def rows_for_each(gathered: tf.Tensor) -> tf.Tensor | None:
        if rows is None:
            return None
        of_ranks = tf.cast(gathered[:, -1], tf.float64)
        return tf.math.divide_no_nan(tf.reduce_sum(of_ranks), of_ranks[group.rank])

    wire = Wire("batch norm", group)
    counts, wait = [1] * group.size, _wait_for_row(group)
    if not tf.executing_eagerly():  # which may run two calls of a layer at the same time
        name = name_in_graph(name)
    gathered = gather_rows(sent[None], counts, name, wait, wire, rows_for_each)
    return gathered[:, : row.shape[0]]


@functools.cache
def _wait_for_row(group: Group) -> GraphWait:
    """One counter for all layers, since each costs the watcher time."""
    return GraphWait("hvkit.batch_norm", "synchronised batch norm", group)


@not_converted
def average(layers: Sequence[keras.layers.Layer]) -> None:
    """Average the non-trainable variables of layers over ranks, also in a graph; a collective."""
    variables, first = learnt_in(layers, with_batch_norm=True), False
    if tf.executing_eagerly():
        first = require_same_buffers([f"{v.name}: {tuple(v.shape)}, {v.dtype}" for v in variables])
    else:
        refuse_xla("hvkit.average_buffers")
    floating = [v for v in variables if tf.as_dtype(v.dtype).is_floating]
    _average_over_ranks(floating, _wait_for_buffers(), None)
    if first:
        rest = [v for v in variables if not tf.as_dtype(v.dtype).is_floating]
        warn_of_integers(*fingerprints_of(rest))


@functools.cache
def _wait_for_buffers() -> GraphWait:
    return GraphWait("hvkit.average_buffers", "hvkit.average_buffers")


def compared_in(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """The variables of a model that may differ between ranks, although a file holds rank 0's.

    Those that layers assign; without those of batch norm if the model was distributed, since hvkit
    averages them or the script wants local ones. Of a model that was not distributed, all weights.
    """
    distributed = weights_of_models()
    if any(id(w) in distributed for w in model.weights):
        return compared_of(model)
    return fingerprints_of([*model.trainable_weights, *learnt_in([model], with_batch_norm=True)])


def compared_of(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """Fingerprints of the variables that layers assign in forward passes, but for batch norm."""
    return fingerprints_of(learnt_in([model], with_batch_norm=False))


def learnt_in(layers: Sequence[keras.layers.Layer], *, with_batch_norm: bool) -> list[Any]:
    """The variables that layers may assign, each once; not the states of recurrent layers."""
    normalisation = keras.layers.BatchNormalization
    parts = [part for layer in layers for part in layer._flatten_layers()]
    found = {
        id(v): v
        for part in parts
        if not getattr(part, "stateful", False)
        and (with_batch_norm or not isinstance(part, normalisation))
        for v in part._non_trainable_variables
    }
    return list(found.values())


def fingerprints_of(variables: Sequence[Any]) -> tuple[list[Compared], list[Rows]]:
    with outside_graphs():
        rows = [fingerprints.fingerprint(v.numpy()) for v in variables]
    return [Compared(f"variable {getattr(v, 'path', v.name)}") for v in variables], rows
