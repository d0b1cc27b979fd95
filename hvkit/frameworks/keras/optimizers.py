"""Facts about Keras's optimizers, and the learning rate of their updates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import keras
from keras import ops

from hvkit.frameworks.keras.backends import tensorflow_not_imported
from hvkit.learning_rate import Multiplier

_leaving_out: WeakSet[Any] = WeakSet()


def inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the update: the innermost, inside any ``LossScaleOptimizer``."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def parts_of(optimizer: Any) -> list[Any]:
    """The optimizers that have a learning rate: several in a ``MultiOptimizer``, else this one."""
    multi = getattr(keras.optimizers, "MultiOptimizer", None)
    return optimizer.optimizers if multi and isinstance(optimizer, multi) else [optimizer]


def updating(optimizers: Sequence[Any]) -> list[Any]:
    """The optimizers that update variables, without those that hold them."""
    return [part for each in optimizers for part in parts_of(inner_optimizer(each))]


def variables_of(optimizer: Any, given: Any) -> Any:
    """The variables that ``apply`` will change, of which it gets some or None; None if unknown."""
    if given is not None:
        return list(given)
    return optimizer._trainable_variables if optimizer.built else None


def calls_of_apply(optimizer: Any) -> int:
    """How often ``apply`` was called, also to accumulate; ``iterations`` counts updates only."""
    return int(optimizer._iterations.value)


def more_than_sgd(optimizers: Sequence[Any]) -> list[str]:
    return [
        type(each).__name__
        for each in updating(optimizers)
        if not isinstance(each, keras.optimizers.SGD) or each.momentum
    ]


def settings_of(optimizer: Any) -> str:
    """The optimizer's configuration, without its name, which holds a counter, and its rate."""
    with tensorflow_not_imported():
        config = optimizer.get_config()
    if isinstance(config.get("learning_rate"), float):
        del config["learning_rate"]
    config.pop("name", None)
    if "inner_optimizer" in config:
        config["inner_optimizer"] = settings_of(optimizer.inner_optimizer)
    text = json.dumps(config, sort_keys=True, default=lambda value: type(value).__name__)
    return f"optimizer {type(optimizer).__name__}: {text}"


def new_like(optimizer: Any) -> Any:
    with tensorflow_not_imported():
        return type(optimizer).from_config(optimizer.get_config())


def is_overwritten(variable: Any) -> bool:
    """Whether an update sets the variable to its gradient, the largest of several: float8."""
    return getattr(variable, "overwrite_with_gradient", False)


def let_leave_out_updates(optimizer: Any) -> None:
    _leaving_out.add(optimizer)


def leaves_out_updates(optimizer: Any) -> bool:
    """Whether the optimizer may leave out an update, which its ``iterations`` do not count then."""
    return optimizer in _leaving_out


def scale_rates(
    optimizers: Sequence[Any], multiplier: Multiplier
) -> list[tuple[float, Multiplier | None]]:
    """Make every update of these optimizers use multiplied rates; return the user's with it."""
    if not multiplier.changes_nothing:
        for each in optimizers:
            _scale_rate(each, multiplier)
    return [(float(each.learning_rate), multiplier) for each in optimizers]


def _scale_rate(optimizer: Any, multiplier: Multiplier) -> None:
    """Multiply the learning rate of an optimizer, only where its ``apply`` reads it.

    ``optimizer.learning_rate`` stays the user's: callbacks, loggers and saved files read and write
    it at any time. It may be a number, a ``LearningRateSchedule`` or a function.
    """
    read, apply = optimizer._get_current_learning_rate, optimizer.apply
    full, first, steps = multiplier.full, multiplier.first, multiplier.warmup_steps
    in_update = False

    def rate() -> Any:
        if not in_update:
            return read()
        if not steps:
            return read() * full
        # ``Multiplier.at``, of tensors
        step = ops.cast(optimizer.iterations, "float32")
        return read() * ops.where(step >= steps, full, first + (full - first) * step / steps)

    def apply_at_multiplied_rate(*args: Any, **kwargs: Any) -> None:
        nonlocal in_update
        in_update = True
        try:
            apply(*args, **kwargs)
        finally:
            in_update = False

    optimizer._get_current_learning_rate = rate
    optimizer.apply = apply_at_multiplied_rate
