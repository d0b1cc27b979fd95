"""Refuses updates of a distributed model that cannot work.

Those by an optimizer that averages nothing: ``compile`` may be given another optimizer than
``distribute``, a second phase of training may make a new one, a ``train_step`` may have one of its
own. The ranks would then train apart without a word, so the base class's ``apply``, which all of
them come through, looks who calls. And those that XLA compiles, which has no kernel for Horovod's
operations.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

_models: WeakSet[Any] = WeakSet()
_averaged: WeakSet[Any] = WeakSet()


def refuse_xla(call: str) -> None:
    """Raise if what is traced now will be compiled by XLA, also through an outer function.

    Args:
        call: what needs the other ranks and cannot be compiled.

    Raises:
        ValueError: it will.
    """
    if tf.executing_eagerly():
        return
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"{call} is inside a tf.function with jit_compile=True, but XLA cannot compile the "
            "communication between ranks: leave jit_compile=True away from the tf.function that "
            f"contains {call}. The forward and backward pass may be in a tf.function of their own "
            "that has it"
        )


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

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
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
