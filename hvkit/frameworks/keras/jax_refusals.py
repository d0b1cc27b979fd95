"""Refuses training in which each rank would train a Keras model on JAX on its own.

On other backends the optimizer that was passed to ``distribute`` averages, whatever it updates. On
JAX nothing does but a batch of all ranks, which only the methods of the models that were passed
make. So the methods of a model around one of these, or of a copy, would train a local model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import jax

from hvkit.frameworks.keras import refusals
from hvkit.frameworks.keras.optimizers import inner_optimizer, updating
from hvkit.sync.port import warn_of_own_models

_optimizers: WeakSet[Any] = WeakSet()
# Models whose optimizers have their rates multiplied.
_scaled: WeakSet[Any] = WeakSet()


def refuse_others(models: Sequence[Any], optimizers: Sequence[Any], scaled: bool) -> None:
    """Let only these models, and models of earlier calls, train the weights of all ranks."""
    for model in models:
        refusals.note_distributed(model)
    _optimizers.update(updating(optimizers))
    if scaled:
        _scaled.update(models)
    for name in ("fit", "train_on_batch"):
        refusals.call_before(name, _require_passed)
    for name in ("evaluate", "predict", "test_on_batch", "predict_on_batch"):
        refusals.call_before(name, _require_whole)
    watch_updates()


def _require_passed(model: Any, name: str) -> None:
    """Raise if a model would train weights of all ranks, or with their optimizer, on its own."""
    used = updating([model.optimizer]) if getattr(model, "optimizer", None) else []
    others = [each for each in used if each not in _optimizers]
    if refusals.was_passed(model):
        if others and model in _scaled:
            raise ValueError(
                f"optimizer {others[0].name!r} ({type(others[0]).__name__}) updates model "
                f"{model.name!r}, but was not passed to hvkit.distribute, so that lr_scaling and "
                "warmup_steps do not reach it: use the optimizer that was passed"
            )
        return
    _require_whole(model, name)
    names = refusals.names_of_distributed(model, model.trainable_variables)
    if not names and len(others) == len(used):
        return  # a local model, of which the first update warns
    what = f"would train {names}" if names else f"uses optimizer {used[0].name!r}"
    raise ValueError(
        f"{name} of model {model.name!r} {what}, passed to hvkit.distribute, but {model.name!r} "
        "was not passed: each rank would train it apart, with its own batches. Pass the model "
        "that fits, with all optimizers, in place of its parts, or of one that it is a copy of: "
        "hvkit.distribute(gan, [g_optimizer, d_optimizer])"
    )


def _require_whole(model: Any, name: str) -> None:
    """Raise if a model that was not passed would compute with weights that ranks have divided."""
    if refusals.was_passed(model):
        return
    for variable in model.variables:
        value = getattr(variable, "_value", None)
        if isinstance(value, jax.Array) and not value.is_fully_replicated:
            raise ValueError(
                f"{name} of model {model.name!r} would compute with {variable.path}, which the "
                f"ranks have divided, but {model.name!r} was not passed to hvkit.distribute: each "
                "rank would use its own rows as if they were those of all. Pass this model, in "
                "place of its parts"
            )


def watch_updates() -> None:
    refusals.call_before_updates(_require_together)


def _require_together(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise if an update mixes weights of all ranks with others, warn if it has none of them."""
    of_layers = refusals.of_layers(variables)
    apart = [v for v in of_layers if not _is_of_all_ranks(v)]
    if not apart:
        return
    passed = inner_optimizer(optimizer) in _optimizers
    known = refusals.weights_of_models()
    if passed:  # a model without weights in ``distribute`` gets them just now
        apart = [v for v in apart if id(v) not in known]
    elif len(apart) == len(of_layers) and not any(id(v) in known for v in apart):
        warn_of_own_models(f"{optimizer.name!r} ({type(optimizer).__name__})")
        return
    if apart:
        raise ValueError(
            f"optimizer {optimizer.name!r} ({type(optimizer).__name__}) updates {apart[0].path}, "
            f"but {'the optimizer' if id(apart[0]) in known else 'its model'} was not passed to "
            "hvkit.distribute, so each rank would train it apart: pass all models and all "
            "optimizers in one call, hvkit.distribute([encoder, decoder], [first, second])"
        )


def _is_of_all_ranks(variable: Any) -> bool:
    layout = getattr(variable, "_layout", None)
    return isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_addressable
