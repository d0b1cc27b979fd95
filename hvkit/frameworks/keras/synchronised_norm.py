"""Batch norm with the statistics of all ranks' batches together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hvkit.communication.group import Group

GatherRow = Callable[[str, Group, Any], Any]
"""From a name and a vector: that of each rank of a group as a row, in rank order; a collective."""


def synchronise_batch_norm(
    model: keras.Model, *, everything: bool, gather: GatherRow, group: Group
) -> None:
    """Make the model's batch-norm layers compute batch statistics over all ranks of a group.

    Args:
        model: may have no weights yet.
        everything: all layers, or those with ``synchronized=True``.
        gather: the collective, with a backward pass.
        group: the ranks that train the model.
    """
    for layer in layers_of(model) if everything else made_synchronised(model):
        if "_moments" not in vars(layer):
            name = group.numbered("hvkit.batch_norm")
            everyones = functools.partial(gather, name, group)
            layer._moments = _moments_over_ranks(layer, everyones)


def made_synchronised(model: keras.Model) -> list[Any]:
    """The layers with ``synchronized=True``, as a script for ``tf.distribute`` makes them."""
    return [layer for layer in layers_of(model) if layer.synchronized]


def layers_of(model: keras.Model) -> list[Any]:
    normalisation = keras.layers.BatchNormalization
    return [layer for layer in model._flatten_layers() if isinstance(layer, normalisation)]


def _moments_over_ranks(layer: Any, gather: Callable[[Any], Any]) -> Any:
    """A ``_moments`` for the layer: mean and biased variance of each channel over all samples.

    It combines the ranks' moments as in Chan, Golub and LeVeque, "Updating formulae and a pairwise
    algorithm for computing sample variances" (1979).
    """
    of_own_batch = layer._moments

    def moments(inputs: Any, mask: Any) -> tuple[Any, Any]:
        mean, variance = of_own_batch(inputs, mask)
        count = ops.reshape(_samples(layer, inputs, mask), [1])
        everyone = gather(ops.concatenate([mean, variance, count], axis=0))
        channels = int(mean.shape[0])
        means, variances, counts = ops.split(everyone, [channels, 2 * channels], axis=1)
        total = ops.sum(counts)
        mean = ops.sum(means * counts, axis=0) / total
        spread = ops.sum((variances + (means - mean) ** 2) * counts, axis=0)
        return mean, spread / total

    return moments


def _samples(layer: Any, inputs: Any, mask: Any) -> Any:
    """How many values each channel has in this batch."""
    if mask is None:
        return ops.cast(ops.size(inputs) / inputs.shape[layer.axis], inputs.dtype)
    shape = ops.shape(inputs)[len(mask.shape) :]
    per_entry = ops.prod(ops.convert_to_tensor(shape)) / inputs.shape[layer.axis]
    return ops.sum(ops.cast(mask, inputs.dtype)) * ops.cast(per_entry, inputs.dtype)
