"""What cannot be in a pipeline of a Keras model, with the reason and what to use instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras.src.models.functional import Functional

from hvkit.frameworks.keras.optimizers import updating
from hvkit.frameworks.keras.synchronised_norm import made_synchronised
from hvkit.frameworks.keras.trials import why_not_by_variable
from hvkit.sync.port import Options


def refuse_in_pipeline(models: Sequence[Any], optimizers: Sequence[Any], options: Options) -> None:
    """Raise for models that cannot be cut, or compute something else in micro-batches.

    And for optimizers that do not update each weight on its own.

    Raises:
        ValueError: with the reason.
    """
    assert options.mesh is not None
    if len(models) > 1:
        raise ValueError(
            f"mesh={options.mesh.mesh} takes one model, got {len(models)}: pass one Functional "
            "model that contains them"
        )
    (model,) = models
    _refuse_own_call(model)
    if layers := made_synchronised(model):
        raise ValueError(
            f"layer {layers[0].name!r} has synchronized=True, but in micro-batches batch norm "
            "cannot use all samples of a batch: leave synchronized out"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is not None:
            raise ValueError(
                f"layer {layer.name!r} has an activity_regularizer, a sum over the samples of a "
                "micro-batch and not of the batch: leave it out, or return what it needs as an "
                "output of the model and compute it in the loss"
            )
    for each in updating(optimizers):
        kind = type(each).__name__
        if kind == "ScheduleFreeAdamW" or (reason := why_not_by_variable(each)):
            why = (
                "it changes all weights when it is built" if kind == "ScheduleFreeAdamW" else reason
            )
            raise ValueError(
                f"optimizer {kind} cannot update a model whose layers are on several ranks: {why}. "
                "Use an optimizer such as keras.optimizers.AdamW"
            )


def _refuse_own_call(model: Any) -> None:
    """Raise for a model whose layers Keras does not know as a graph."""
    kind = type(model)
    known = (isinstance(model, keras.Sequential) and kind.call is keras.Sequential.call) or (
        isinstance(model, Functional) and kind.call is Functional.call
    )
    if not known:
        raise ValueError(
            f"{kind.__name__} {model.name!r} has a call() of its own, in which Keras cannot see "
            "where it can be cut: a pipeline of Keras takes Sequential models and Functional "
            "ones, keras.Model(inputs, outputs). Make one of its layers, or write it as a "
            "torch.nn.Module, which a pipeline cuts as it is"
        )
