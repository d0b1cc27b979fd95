"""Variables that layers assign in ``call``: whether they differ between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvkit.frameworks.keras.backends import outside_graphs
from hvkit.frameworks.keras.refusals import weights_of_models
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, Rows


def compared_in(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """What of a model may differ between ranks although a file holds rank 0's, and fingerprints.

    These are the variables that layers assign, without those of batch norm if it was distributed:
    hvkit averages them, unless the script wants each rank's own. Of a model that was not
    distributed these are all weights.
    """
    distributed = weights_of_models()
    if any(id(w) in distributed for w in model.weights):
        return compared_of(model)
    return fingerprints_of([*model.trainable_weights, *learnt_in([model], with_batch_norm=True)])


def compared_of(model: keras.Model) -> tuple[list[Compared], list[Rows]]:
    """What the forward passes of a distributed model learn outside of batch norm."""
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
