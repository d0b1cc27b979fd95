"""What a pipeline does with tensors, on the backend that Keras runs on.

What Keras's own operations do on every backend is not here.
"""

from typing import Any

from hvkit.frameworks.keras.backends import ON_TENSORFLOW

if ON_TENSORFLOW:
    from hvkit.frameworks.keras.pipeline.tensorflow_tensors import (
        COMPILER,
        add_gradients,
        added,
        compiled,
        connected,
        hold,
        in_graph,
        is_dense,
        is_recording,
        norm_of,
        placeholder_of,
        recorded,
        remainder,
        unwatched,
        values_for,
        wants_gradient,
    )
else:
    from hvkit.frameworks.keras.pipeline.pytorch_tensors import (
        COMPILER,
        add_gradients,
        added,
        compiled,
        connected,
        hold,
        in_graph,
        is_dense,
        is_recording,
        norm_of,
        placeholder_of,
        recorded,
        remainder,
        unwatched,
        values_for,
        wants_gradient,
    )

__all__ = [
    "COMPILER",
    "add_gradients",
    "added",
    "compiled",
    "connected",
    "hold",
    "in_graph",
    "is_dense",
    "is_recording",
    "mask_of",
    "norm_of",
    "placeholder_of",
    "recorded",
    "remainder",
    "set_mask",
    "unwatched",
    "values_for",
    "wants_gradient",
]


def mask_of(tensor: Any) -> Any:
    """The mask that Keras's layers have set for a tensor, or None.

    Keras 3.5 has no function for it; later ones keep the mask in the same place.
    """
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Set the mask that Keras's layers read of a tensor."""
    tensor._keras_mask = mask
