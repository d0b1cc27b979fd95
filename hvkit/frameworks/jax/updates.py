"""Optax transformations that keep what is divided among the ranks divided, step by step.

XLA chooses where the results of a compiled function are, and might gather what an update has read
in parts. So the update of each step says where its results belong: ``ShardedOptimizer`` divides the
optimizer's state (Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
parameter models", 2020, stage 1), ``FullyShard`` and meshes the weights as well (stage 3). Of the
mean of gradients XLA then makes a reduce-scatter, and it gathers weights where a layer needs them.
"""

from __future__ import annotations

import copy
from typing import Any

from hvkit.frameworks.jax.arrays import constrained
from hvkit.frameworks.jax.places import Place


def is_transformation(thing: object) -> bool:
    """Whether this is a transformation of Optax: it has ``init`` and ``update``, and no arrays."""
    return callable(getattr(thing, "init", None)) and callable(getattr(thing, "update", None))


def divided_updates(transformation: Any, of_weights: Place, of_state: Place) -> Any:
    """The same transformation, whose results are at these places.

    Args:
        transformation: of Optax.
        of_weights: where weights are, and so the changes of them.
        of_state: where its state is.
    """
    import optax

    # Others are classes with methods of their own, such as optax.MultiSteps.
    is_plain = isinstance(transformation, optax.GradientTransformation)
    inner = optax.with_extra_args_support(transformation) if is_plain else transformation

    def init(params: Any) -> Any:
        return constrained(inner.init(params), of_state)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        changes, state = inner.update(gradients, state, params, **extra)
        return constrained(changes, of_weights), constrained(state, of_state)

    if is_plain:
        return optax.GradientTransformationExtraArgs(init, update)
    result = copy.copy(transformation)
    vars(result).update(init=init, update=update)
    return result
