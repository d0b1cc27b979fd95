"""Names of Keras 2 that Horovod scripts use, and that Keras 3 has renamed or dropped.

Where a name can mean the same, hvkit accepts it, and a ``DeprecationWarning`` says how to change
the line. Otherwise an error says so.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvkit.horovod_names.keras_optimizer import averages


class _CallableList(list[Any]):
    """A list that a call returns, too."""

    def __call__(self) -> _CallableList:
        return self


@functools.cache
def accept() -> None:
    """Let scripts use some names of Keras 2 from now on.

    These are ``optimizer.variables()``, ``optimizer.lr``, ``lr=`` of optimizers, ``get_value`` and
    ``set_value`` of Keras's backend, ``reset_states`` of models and metrics,
    ``ModelCheckpoint(period=1)``, and ``compile(experimental_run_tf_function=False)``.
    With an optimizer that averages, ``compile`` does not choose XLA by itself, as it otherwise does
    on GPUs: that has no kernels for Horovod's operations.
    """
    base = keras.optimizers.Optimizer
    known: set[Any] = {e for e in vars(keras.optimizers).values() if isinstance(e, type)}
    for optimizer in {each for each in known if issubclass(each, base)}:
        if init := vars(optimizer).get("__init__"):
            optimizer.__init__ = _changed(init, _rename_lr)
    for optimizer in {*known, *base.__mro__}:
        if variables := vars(optimizer).get("variables"):
            optimizer.variables = property(_callable(variables.fget))
    base.lr = property(_rate, _set_rate)
    for name, instead in _OF_LOSS_SCALES.items():
        setattr(keras.optimizers.LossScaleOptimizer, name, property(_dropped(name, instead)))
    keras.Model.reset_states, keras.Metric.reset_states = _reset_layers, _reset_metric
    checkpoint: Any = keras.callbacks.ModelCheckpoint
    checkpoint.__init__ = _changed(checkpoint.__init__, _drop_period)
    for backend in (keras.backend, tf.keras.backend):
        backend.get_value, backend.set_value = _get_value, _set_value
    trainer = next(each for each in keras.Model.__mro__ if "compile" in vars(each))
    trainer.compile = _changed(trainer.compile, _drop_tf_function)
    trainer._resolve_auto_jit_compile = _without_xla(trainer._resolve_auto_jit_compile)


_OF_LOSS_SCALES = {
    "get_scaled_loss": "write optimizer.scale_loss(loss)",
    "get_unscaled_gradients": "leave it out: optimizer.apply_gradients unscales",
}


def _dropped(name: str, instead: str) -> Callable[[Any], None]:
    def refuse(self: Any) -> None:
        raise AttributeError(f"Keras 3 has dropped {type(self).__name__}.{name}: {instead}")

    return refuse


def _reset_layers(model: Any) -> None:
    _warn("model.reset_states(): call reset_state() of its stateful layers")
    for layer in model._flatten_layers(include_self=False):
        if getattr(layer, "stateful", False):
            layer.reset_state()


def _reset_metric(metric: Any) -> None:
    _warn("metric.reset_states(): write metric.reset_state()")
    metric.reset_state()


def _changed(
    function: Callable[..., None], change: Callable[[Any, dict[str, Any]], None]
) -> Callable[..., None]:
    """The function, with arguments by name that ``change`` has changed."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        change(self, kwargs)
        function(self, *args, **kwargs)

    return call


def _drop_period(_: Any, kwargs: dict[str, Any]) -> None:
    period = kwargs.pop("period", None)
    if period == 1:
        _warn("ModelCheckpoint(period=1): leave it out; it has no effect", 4)
    elif period is not None:
        raise ValueError(
            f"Keras 3 has dropped ModelCheckpoint(period={period!r}): write "
            f"save_freq={period!r} * steps_per_epoch, a number of batches"
        )


def _callable(variables: Callable[[Any], list[Any]]) -> Callable[[Any], _CallableList]:
    return lambda optimizer: _CallableList(variables(optimizer))


def _rename_lr(optimizer: Any, kwargs: dict[str, Any]) -> None:
    name = type(optimizer).__name__
    if "lr" in kwargs and "learning_rate" in kwargs:
        lr, rate = kwargs["lr"], kwargs["learning_rate"]
        raise ValueError(f"{name} got {lr=!r} and learning_rate={rate!r}: leave lr out")
    if "lr" in kwargs:
        _warn(f"{name}(lr=...): write learning_rate=...", 4)
        kwargs["learning_rate"] = kwargs.pop("lr")


def _rate(optimizer: Any) -> Any:
    if "lr" in vars(optimizer):
        return vars(optimizer)["lr"]
    _warn("optimizer.lr: write optimizer.learning_rate")
    return optimizer.learning_rate


def _set_rate(optimizer: Any, rate: Any) -> None:
    if not type(optimizer).__module__.startswith("keras."):  # an attribute of the script's own
        vars(optimizer)["lr"] = rate
        return
    _warn("optimizer.lr = ...: write optimizer.learning_rate = ...")
    optimizer.learning_rate = rate


def _get_value(variable: Any) -> Any:
    _warn("backend.get_value(variable): write variable.numpy()")
    return variable.numpy() if hasattr(variable, "numpy") else variable


def _set_value(variable: Any, value: Any) -> None:
    _warn("backend.set_value(variable, value): write variable.assign(value)")
    variable.assign(value)


def _drop_tf_function(_: Any, kwargs: dict[str, Any]) -> None:
    if kwargs.pop("experimental_run_tf_function", None) is not None:
        _warn("compile(experimental_run_tf_function=...): leave it out; it has no effect", 4)


def _without_xla(chooses: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def chooses_if_possible(model: Any) -> bool:
        optimizer = getattr(model, "optimizer", None)  # none before compile
        return chooses(model) and (optimizer is None or not averages(optimizer))

    return chooses_if_possible


def _warn(text: str, stacklevel: int = 3) -> None:
    warnings.warn(f"Keras 3 has dropped {text}", DeprecationWarning, stacklevel=stacklevel)
