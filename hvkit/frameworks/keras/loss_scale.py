"""Loss scales on several ranks: they skip the steps that one process with all samples would skip.

A ``LossScaleOptimizer`` multiplies the loss by a scale, and skips a step whose gradients overflow.
With the same scale on each of N ranks, backward would compute with numbers that are N times those
of one process, since each rank's loss is a mean over 1/N of the samples. So each rank uses 1/N of
the scale; ``dynamic_scale`` is that, and files have the whole. And one process has sums over all
samples in float16, which overflow where no rank's own sum does. Ranks add theirs in float32, and
skip where float16 would not hold the result.

``compile`` makes the ``LossScaleOptimizer`` under the ``mixed_float16`` policy, so hvkit replaces
methods of its class; they change nothing for other optimizers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import keras
import numpy as np
from keras import ops

from hvkit.frameworks.keras.backends import not_converted
from hvkit.frameworks.keras.optimizers import inner_optimizer

BEYOND_HALF = 65520.0
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
    limit = BEYOND_HALF / ranks
    fit = [ops.all(ops.abs(each) < limit) for each in tensors]
    return ops.all(ops.convert_to_tensor(fit)) if fit else ops.convert_to_tensor(True)
