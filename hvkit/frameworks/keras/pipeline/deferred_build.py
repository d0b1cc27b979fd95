"""Builds a model of which this rank makes only the weights that it holds.

Keras first learns the shapes of all weights; values are made afterwards, and those of this rank's
stage only. They are those that rank 0 would make: every rank uses the seeds of its initializers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras.src.backend.common import global_state

from hvkit.communication.collectives import from_rank

# What Keras notes in a stateless scope, to initialise when the scope ends.
_UNINITIALISED = "uninitialized_variables"


def without_values(build: Callable[[], None], name: str) -> None:
    """Run ``build`` of a model so that its variables get shapes, but no values.

    Args:
        build: creates the variables.
        name: of the model.

    Raises:
        ValueError: a layer makes a variable from a value instead of an initializer.
    """
    before = global_state.get_global_attribute(_UNINITIALISED, set_to_default=True)
    try:
        with keras.StatelessScope(initialize_variables=False):
            build()
    except ValueError as error:
        raise ValueError(
            f"model {name!r} cannot be built in parts: {error} Build it before hvkit.distribute, "
            "with model.build((None, ...)) or a keras.Input as its first layer"
        ) from error
    finally:
        global_state.set_global_attribute(_UNINITIALISED, before or [])


def share_seeds(model: Any) -> None:
    """Give the initializers of variables without values rank 0's seeds; a collective of all ranks.

    Raises:
        ValueError: an initializer has no number as its seed.
    """
    makers = [v._initializer for v in model.variables if v._value is None]
    seeds = [getattr(maker, "seed", None) for maker in makers]
    for maker, seed in zip(makers, seeds, strict=True):
        if seed is not None and not isinstance(seed, int):
            raise ValueError(
                f"initializer {type(maker).__name__} takes its seed from {seed!r}, so that each "
                f"rank would make other weights: pass a number, or build model {model.name!r} "
                "before hvkit.distribute"
            )
    for maker, seed in zip(makers, from_rank(0, seeds), strict=True):
        if seed is not None:
            maker.seed = seed


def make_values(model: Any, holds: Callable[[Any], bool]) -> None:
    """Make the values of this rank's variables, and of those that are no weights.

    Args:
        model: with variables without values.
        holds: whether this rank's stage holds a weight.
    """
    weights = set(map(id, model.weights))
    for v in model.variables:
        if v._value is None and (id(v) not in weights or holds(v)):
            v._deferred_initialize()
