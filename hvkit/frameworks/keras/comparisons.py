"""Which variables must be the same on all ranks, and whether they are.

These are weights that a layer made trainable, also while they are frozen, the state of optimizers,
and what layers have adapted to. Left out is what may differ between ranks: the statistics of
layers, the states of random generators, and gradients that an optimizer is still accumulating.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from hvkit.communication.group import Group
from hvkit.frameworks.keras.adapted import compared_in as adapted_in
from hvkit.frameworks.keras.backends import outside_graphs
from hvkit.frameworks.keras.divided_state import ids_of_slots
from hvkit.frameworks.keras.optimizers import inner_optimizer
from hvkit.frameworks.keras.refusals import is_alike, is_distributed, weights_of_distributed
from hvkit.sync import fingerprints
from hvkit.sync.fingerprints import Compared, Rows

# The distance from 1 to the next number.
_UNITS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def compared_in(thing: Any) -> tuple[list[Compared], list[Rows]]:
    """The variables of a model or optimizer that must be equal on all ranks, and fingerprints.

    Args:
        thing: a model or an optimizer. If it was not distributed, only those of its weights count
            that a distributed model shares.
    """
    adapted: list[Compared] = []
    rows: list[Rows] = []
    if isinstance(thing, keras.Model):
        alike = weights_of_distributed()
        variables = [v for v in made_trainable(thing) if id(v) in alike]
        if is_distributed(thing):
            adapted, rows = adapted_in(thing)
    elif not is_alike(inner_optimizer(thing)):
        variables = []
    else:
        local = {id(v) for v in _accumulators(thing)} | ids_of_slots([thing])
        variables = [v for v in thing.variables if id(v) not in local]
    with outside_graphs():
        return [*labels_of(variables), *adapted], [*rows_of([v.numpy() for v in variables]), *rows]


def require_same_weights(
    call: str, model: keras.Model, optimizers: Sequence[Any], group: Group
) -> None:
    """Raise on every rank unless all hold the same weights, up to rounding; a collective.

    Args:
        call: the name of the call that the user made.
        model: a distributed one.
        optimizers: those that ``distribute`` got with it.
        group: the ranks that train it.

    Raises:
        RanksDisagreeError: names the first variable that differs, and the ranks.
    """
    found = [compared_in(each) for each in (model, *optimizers)]
    compared = [each for theirs, _ in found for each in theirs]
    rows = [row for _, theirs in found for row in theirs]
    fingerprints.require_same(call, compared, rows, group)


def require_same(call: str, labels: Sequence[str], variables: Sequence[Any], group: Group) -> bool:
    """Raise on every rank unless all hold the same values, up to rounding; a collective.

    Args:
        call: the name of the call that the user made.
        labels: the variables' names in the error message.
        variables: the same ones on every rank.
        group: the ranks that hold them.

    Returns:
        Whether they hold the same bit for bit.

    Raises:
        RanksDisagreeError: names the first variable that differs, and the ranks.
    """
    compared = [Compared(each, unit(v)) for each, v in zip(labels, variables, strict=True)]
    rows = rows_of([v.numpy() for v in variables])
    return fingerprints.require_same(call, compared, rows, group)


def made_trainable(model: Any) -> list[Any]:
    """The model's weights, without the state that layers keep for themselves; each once."""
    layers = model._flatten_layers()
    return list({id(v): v for each in layers for v in each._trainable_variables}.values())


def _accumulators(optimizer: Any) -> list[Any]:
    """The gradients accumulated since the last update: each rank's own, not averaged yet."""
    inner = inner_optimizer(optimizer)
    parts = [inner, *getattr(inner, "optimizers", ())]
    return [v for part in parts for v in getattr(part, "_accumulated_gradients", ())]


def labels_of(variables: Sequence[Any]) -> list[Compared]:
    return [Compared(getattr(v, "path", v.name), unit(v)) for v in variables]


def unit(variable: Any) -> float:
    """The distance from 1 to the next number of the variable's dtype; 0 if it is exact."""
    return _UNITS.get(keras.backend.standardize_dtype(variable.dtype), 0.0)


def rows_of(arrays: Sequence[Any]) -> list[Rows]:
    return [fingerprints.fingerprint(array) for array in arrays]
