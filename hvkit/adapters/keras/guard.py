"""Refuses updates of a distributed model by an optimizer that averages nothing.

``compile`` may be given another optimizer than ``distribute``, a second phase of training may make
a new one, a ``train_step`` may have one of its own. The ranks would then train apart without a
word, so the base class's ``apply``, which all of them come through, looks who calls.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras

_models: WeakSet[Any] = WeakSet()
_averaged: WeakSet[Any] = WeakSet()


def refuse_other_optimizers(model: Any, optimizers: Sequence[Any]) -> None:
    """From now on, only these optimizers and those of earlier calls may update the model."""
    _models.add(model)
    _averaged.update(optimizers)
    _look_who_calls()


def is_averaged(optimizer: Any) -> bool:
    """Whether this optimizer, not one that scales the loss, was passed to ``distribute``."""
    return optimizer in _averaged


def weights_of_distributed() -> set[int]:
    """The ids of all weights of the models that were distributed."""
    return {id(w) for model in _models for w in model.weights}


@functools.cache
def _look_who_calls() -> None:
    base = keras.optimizers.Optimizer
    apply = base.apply

    def apply_if_averaged(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        if self not in _averaged:
            variables = trainable_variables or getattr(self, "_trainable_variables", ())
            updated = {id(v) for v in variables}
            for model in _models:
                if any(id(w) in updated for w in model.trainable_variables):
                    raise ValueError(
                        f"optimizer {self.name!r} ({type(self).__name__}) updates model "
                        f"{model.name!r}, but was not passed to hvkit.distribute, so the ranks "
                        "would train apart: use the optimizer that was, and pass those of later "
                        "phases in the same call: distribute(model, [first, second])"
                    )
        return apply(self, grads, trainable_variables)

    base.apply = apply_if_averaged
