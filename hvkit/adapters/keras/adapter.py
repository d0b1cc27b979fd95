"""What ``distribute`` does to a Keras model and its optimizers.

Everything is attached to the instances: methods of the optimizer, and for a model that has no
weights yet its ``call``. The classes stay Keras's own, so saved files name nothing of hvkit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import keras

from hvkit import runtime
from hvkit.adapters import Options
from hvkit.adapters.keras.loss_scale import inner_optimizer, skip_together
from hvkit.adapters.keras.optimizer import AveragedOptimizer
from hvkit.adapters.keras.state import is_built, synchronise

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
        self.synchronised = False

    def facts(self) -> list[str]:
        return [type(each).__name__ for each in self.optimizers]

    def synchronise(self) -> None:
        if all(runtime.allgather(is_built(self.model))):
            self._synchronise()
        else:
            self._synchronise_before_first_call()

    def _synchronise(self) -> None:
        self.synchronised = True
        synchronise(self.model, self.optimizers)

    def _synchronise_before_first_call(self) -> None:
        """For a model that only its first batch builds: between building and computing."""
        from keras.src.backend import in_stateless_scope

        call = self.model.call

        def synchronise_and_call(*args: Any, **kwargs: Any) -> Any:
            if is_built(self.model) and not in_stateless_scope():
                del self.model.call
                if not self.synchronised:
                    self._synchronise()
            return call(*args, **kwargs)

        self.model.call = synchronise_and_call

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

    def _before_update(self) -> None:
        """For models whose ``call`` is never called: at the latest, before the first update."""
        if not self.synchronised:
            self._synchronise()


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
    if inner.built and is_built(model) and model.trainable_variables:
        held = {id(v) for v in inner._trainable_variables}
        if not any(id(v) in held for v in model.trainable_variables):
            raise ValueError(
                f"optimizer {inner.name!r} was built for {len(held)} other variables than those "
                f"of model {model.name!r}: make a new optimizer for this model"
            )
    return optimizer
