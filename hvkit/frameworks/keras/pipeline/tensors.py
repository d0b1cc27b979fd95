"""What a pipeline does with tensors, on the backend that Keras runs on.

What Keras's own operations do on every backend is not here.
"""

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
    "norm_of",
    "placeholder_of",
    "recorded",
    "remainder",
    "unwatched",
    "values_for",
    "wants_gradient",
]
