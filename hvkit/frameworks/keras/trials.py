"""Whether ranks can divide the weights that an optimizer updates: tried on a few small ones.

``hvkit.frameworks.pytorch.divided_state.trials`` does the same for PyTorch.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from hvkit.frameworks.keras.backends import outside_graphs
from hvkit.frameworks.keras.optimizers import new_like

_STEPS = 10
_RANKS = 2
_SHAPES = [(4, 3), (4, 3), (4,), (4,)]

# Keras's own, each of which updates a weight from its own gradient and state.
_BY_VARIABLE = frozenset(
    getattr(keras.optimizers, name)
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "Ftrl",
        "Lamb",
        "Lion",
        "Muon",
        "Nadam",
        "RMSprop",
        "SGD",
    )
    if hasattr(keras.optimizers, name)
)


def why_not_by_variable(optimizer: Any) -> str:
    """Why ranks cannot update some of the weights each; empty if they can.

    Args:
        optimizer: one that updates variables; it stays as it is.
    """
    if type(optimizer) in _BY_VARIABLE:
        return ""
    before = random.getstate()  # Keras draws seeds from it
    try:
        with outside_graphs():
            return _tried(optimizer)
    except Exception as error:  # of any type: what optimizers of others do is not known
        return f"a trial on small weights failed with {type(error).__name__}: {error}"
    finally:
        random.setstate(before)


def _tried(optimizer: Any) -> str:
    numbers = np.random.default_rng(0)
    begin, slopes = ([numbers.normal(size=shape) for shape in _SHAPES] for _ in range(2))
    whole, *ranks = [new_like(optimizer) for _ in range(1 + _RANKS)]
    weights = [
        [keras.Variable(value, name=f"trial_{i}") for i, value in enumerate(begin)]
        for _ in range(1 + _RANKS)
    ]
    for each, held in zip((whole, *ranks), weights, strict=True):
        each.build(held)
    for rank, each in enumerate(ranks):
        _update_only(each, weights[1 + rank][rank::_RANKS])
    for _ in range(_STEPS):
        gradients = [slope + 0.1 * _random(slope.shape, numbers) for slope in slopes]
        for each, held in zip((whole, *ranks), weights, strict=True):
            sent = [
                keras.ops.convert_to_tensor(g, v.dtype)
                for g, v in zip(gradients, held, strict=True)
            ]
            each.apply(sent, held)
        for i, (expected, *theirs) in enumerate(zip(*weights, strict=True)):
            if not np.array_equal(theirs[i % _RANKS].numpy(), expected.numpy()):
                return "its update of one weight depends on others, or is random"
            for each in theirs:
                each.assign(expected)
        for v, *theirs in zip(*(each.variables for each in (whole, *ranks)), strict=True):
            if not len(v.shape) and any(each.numpy() != v.numpy() for each in theirs):
                return f"it computes {v.name!r} from all weights together"
    return ""


def _update_only(optimizer: Any, own: Sequence[Any]) -> None:
    """Leave the other weights out of an optimizer's updates."""
    update, mine = optimizer._backend_update_step, set(map(id, own))

    def update_own(grads: Sequence[Any], variables: Sequence[Any], rate: Any) -> None:
        kept = [(g, v) for g, v in zip(grads, variables, strict=True) if id(v) in mine]
        update([g for g, _ in kept], [v for _, v in kept], rate)

    optimizer._backend_update_step = update_own


def _random(shape: tuple[int, ...], numbers: np.random.Generator) -> Any:
    return numbers.normal(size=shape).astype(np.float32)
