"""Keras's optimizers: facts about them, the learning rate of their updates, and loss scales.

A ``LossScaleOptimizer`` multiplies the loss by a scale, and skips a step whose gradients overflow.
Ranks skip the steps that one process with all samples would skip. With the same scale on each of N
ranks, backward would compute with numbers that are N times those of one process, since each rank's
loss is a mean over 1/N of the samples. So each rank uses 1/N of the scale; ``dynamic_scale`` is
that, and files have the whole. And one process has sums over all samples in float16, which overflow
where no rank's own sum does. Ranks add theirs in float32, and skip where float16 would not hold the
result.

``compile`` makes the ``LossScaleOptimizer`` under the ``mixed_float16`` policy, so hvkit replaces
methods of its class; they change nothing for other optimizers.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import keras
import numpy as np
from keras import ops

from hvkit.frameworks.keras.backends import not_converted, tensorflow_not_imported
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
    """Whether an update overwrites the variable with its gradient, as the scales of float8.

    Of several gradients Keras then takes the largest, so that a scale covers all values.
    """
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


_BEYOND_HALF = 65520.0
"""From here on, float16 rounds to infinity."""

Agree = Callable[[Any, Sequence[tuple[Any, Any]]], Any]
"""From whether this rank's gradients are finite, and those that float16 has computed, each with its
variable and None for none: whether the step counts, the same on all ranks."""


@dataclass(frozen=True)
class SharedScale:
    """How ranks whose losses are averaged share a loss scale; one rank alone uses all of it."""

    agree: Agree
    ranks: int = 1
    models: Sequence[ref[Any]] = ()

    def halves(self, grads: Sequence[Any], variables: Sequence[Any]) -> list[tuple[Any, Any]]:
        """The gradients that are computed in float16, with their variables; None if row-sparse."""
        if len(grads) != len(variables):
            return []
        models = [model for each in self.models if (model := each()) is not None]
        in_half = {
            id(v)
            for model in models
            for layer in model._flatten_layers()
            if layer.compute_dtype == "float16"
            for v in layer._trainable_variables
        }
        return [
            (None if hasattr(g, "dense_shape") else g, v)
            for g, v in zip(grads, variables, strict=True)
            if id(v) in in_half
        ]


_of_ranks: WeakKeyDictionary[Any, SharedScale] = WeakKeyDictionary()


def share_scale(optimizer: Any, agree: Agree, ranks: int = 1, models: Sequence[Any] = ()) -> None:
    """Skip a step on all ranks or on none; the models' ``compile`` may have made the scale."""
    _adapt_class()
    inner = inner_optimizer(optimizer)
    _of_ranks[inner] = SharedScale(agree, ranks, [ref(model) for model in models])
    around = {id(o): o for o in (optimizer, *(getattr(m, "optimizer", None) for m in models))}
    for each in around.values():
        if each is not inner and inner_optimizer(each) is inner and each.built:
            each.dynamic_scale.assign(each.dynamic_scale / ranks)


def ranks_of_scale(optimizer: Any) -> int:
    """How many ranks share the scale of a ``LossScaleOptimizer``; 1 for other optimizers."""
    inner = inner_optimizer(optimizer)
    found = _of_ranks.get(inner) if inner is not optimizer else None
    return found.ranks if found else 1


@functools.cache
def _adapt_class() -> None:
    scaler = keras.optimizers.LossScaleOptimizer
    build, scale_loss, check_finite = scaler.build, scaler.scale_loss, scaler.check_finite

    def build_with_part(self: Any, var_list: Any) -> None:
        whole = self.initial_scale
        self.initial_scale = whole / ranks_of_scale(self)
        try:
            build(self, var_list)
        finally:
            self.initial_scale = whole

    def scale_by_part(self: Any, loss: Any) -> Any:
        return scale_loss(self, loss if self.built else loss / ranks_of_scale(self))

    def check_on_all_ranks(self: Any, grads: Any) -> Any:
        finite = check_finite(self, grads)
        if (found := _of_ranks.get(inner_optimizer(self))) is None:
            return finite
        return found.agree(finite, found.halves(grads, self._trainable_variables))

    save, load = scaler.save_own_variables, scaler.load_own_variables

    def key_of_scale(self: Any) -> str:
        return str(next(i for i, v in enumerate(self.variables) if v is self.dynamic_scale))

    def save_whole(self: Any, store: Any) -> None:
        if not self.built or (ranks := ranks_of_scale(self)) == 1:
            save(self, store)
            return
        kept: dict[str, Any] = {}
        save(self, kept)
        kept[key_of_scale(self)] *= ranks
        for key, value in kept.items():
            store[key] = value

    def load_part(self: Any, store: Any) -> None:
        if self.built and (ranks := ranks_of_scale(self)) > 1:
            store = {key: np.array(store[key]) for key in store.keys()}  # noqa: SIM118
            if (key := key_of_scale(self)) in store:
                store[key] = store[key] / ranks
        load(self, store)

    scaler.save_own_variables, scaler.load_own_variables = save_whole, load_part
    scaler.build, scaler.scale_loss = not_converted(build_with_part), not_converted(scale_by_part)
    scaler.check_finite = not_converted(check_on_all_ranks)


def fit_half(tensors: Sequence[Any], ranks: int = 1) -> Any:
    """Whether float16 holds the sums of the tensors of so many ranks, if none has larger ones."""
    limit = _BEYOND_HALF / ranks
    fit = [ops.all(ops.abs(each) < limit) for each in tensors]
    return ops.all(ops.convert_to_tensor(fit)) if fit else ops.convert_to_tensor(True)
