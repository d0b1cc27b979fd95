"""What ``distribute`` does to a Keras model and its optimizers.

Everything is attached to the instances: methods of the optimizer, and for a model that has no
weights yet its ``call``. The classes stay Keras's own, so saved files name nothing of hvkit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras
from keras.src.backend import in_stateless_scope

from hvkit import runtime
from hvkit.adapters import Options
from hvkit.adapters.keras.loss_scale import inner_optimizer, skip_together
from hvkit.adapters.keras.optimizer import AveragedOptimizer
from hvkit.adapters.keras.state import (
    has_weights,
    have_values,
    synchronise,
    synchronise_optimizers,
    tf_variable,
)

# Tells the optimizers apart; ranks call distribute in the same order.
_serial = itertools.count()


class KerasAdapter:
    """One model and the optimizers that update it."""

    framework = "tensorflow"

    def __init__(self, model: Any, optimizers: Sequence[Any], options: Options) -> None:
        backend = keras.backend.backend()
        if backend != "tensorflow":
            raise ValueError(
                f"Keras runs on the {backend!r} backend, hvkit needs 'tensorflow': set "
                "KERAS_BACKEND=tensorflow before Keras is imported"
            )
        if options.accumulate != 1:
            raise ValueError(
                f"accumulate={options.accumulate} is for PyTorch: with Keras, give the optimizer "
                f"gradient_accumulation_steps={options.accumulate}"
            )
        self.model = model
        self.options = options
        self.optimizers = [_checked(each, model) for each in optimizers]
        self.wrapped = [AveragedOptimizer(inner_optimizer(each)) for each in self.optimizers]
        self._synchronised: dict[int, Any] = {}

    def facts(self) -> list[str]:
        return [type(each).__name__ for each in self.optimizers]

    def synchronise(self) -> None:
        if all(runtime.allgather(has_weights(self.model))):
            self._synchronise(self.model.weights)
        else:
            self._synchronise_before_first_call()

    def _synchronise(self, weights: Sequence[Any]) -> None:
        first = not self._synchronised
        self._synchronised.update((id(tf_variable(w)), w) for w in weights)
        synchronise(weights)
        if first:
            synchronise_optimizers(self.optimizers, self.model.trainable_variables)

    def _synchronise_before_first_call(self) -> None:
        """For a model that only its first batch builds: between building and computing."""
        call = self.model.call

        def synchronise_and_call(*args: Any, **kwargs: Any) -> Any:
            if not in_stateless_scope() and has_weights(self.model):
                del self.model.call
                if not self._synchronised:
                    self._synchronise(self.model.weights)
            return call(*args, **kwargs)

        self.model.call = synchronise_and_call

    def _before_update(self, variables: Sequence[Any]) -> None:
        """What was not synchronised in a call of the model is so at the latest now.

        That is so for models whose ``train_step`` calls their parts only, and for layers that
        come into use later.
        """
        if not self._synchronised and have_values(self.model.weights):
            self._synchronise(self.model.weights)
        new = [v for v in variables if id(tf_variable(v)) not in self._synchronised]
        if new and have_values(new):
            self._synchronise(new)

    def scale_learning_rate(self, factor: float) -> list[tuple[float, float]]:
        return [each.scale_learning_rate(factor) for each in self.wrapped]

    def average_gradients(self) -> None:
        # XLA cannot compile Horovod's operations.
        self.model.supports_jit = False
        if getattr(self.model, "compiled", False) and self.model.jit_compile:
            self.model.jit_compile = False
            self.model.make_train_function(force=True)
        skip_together()
        for each in self.wrapped:
            each.attach(f"hvkit.{next(_serial)}", self.options.warmup_steps, self._before_update)


def _checked(optimizer: Any, model: Any) -> Any:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        hint = ""
        if isinstance(optimizer, str):
            hint = f"; make the object with keras.optimizers.get({optimizer!r})"
        raise TypeError(
            "optimizer of a Keras model must be a keras.optimizers.Optimizer, or a list of them, "
            f"got {optimizer!r} of type {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}{hint}"
        )
    inner = inner_optimizer(optimizer)
    if inner.built and has_weights(model) and model.trainable_variables:
        held = {id(v) for v in inner._trainable_variables}
        if not any(id(v) in held for v in model.trainable_variables):
            raise ValueError(
                f"optimizer {inner.name!r} was built for {len(held)} other variables than those "
                f"of model {model.name!r}: make a new optimizer for this model"
            )
    return optimizer
