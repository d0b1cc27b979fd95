"""Horovod's ``DistributedOptimizer`` for optimizers of Keras 3.

Horovod's own averages in methods that optimizers of Keras 2 call between the gradients and the
update. Those of Keras 3 have ``apply`` alone, so the gradients become means there, as under
``hvkit.distribute``: in ``fit``, in ``apply_gradients`` and in custom loops.

The optimizer stays the object it was, so a file that Keras saves of it loads without Horovod.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkit.frameworks.keras.averaged_updates import average_in_apply, skip_together
from hvkit.frameworks.keras.backends import backend_variable
from hvkit.frameworks.keras.optimizers import inner_optimizer
from hvkit.frameworks.keras.refusals import is_averaged_by_horovod, note_averaged_by_horovod


def average_in_updates(
    optimizer: Any,
    allreduce_gradients: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    scale_local_gradients: bool,
    ranks: Callable[[], Any],
    lowest: Callable[[tf.Tensor], tf.Tensor],
) -> Any:
    """Make an optimizer reduce gradients over ranks before it uses them, and return it.

    Args:
        optimizer: of Keras 3; one that scales the loss stays around its own.
        allreduce_gradients: Horovod's function that reduces gradients of these variables.
        backward_passes_per_step: calls of ``apply`` for an update, which uses the sum of the
            gradients of all of them.
        average_aggregated_gradients: whether it uses their mean instead.
        scale_local_gradients: whether gradients of local variables are divided by the number of
            ranks, as those of others are.
        ranks: returns their number.
        lowest: returns the minimum over ranks.

    Raises:
        ValueError: the optimizer averages already, or accumulates gradients in another way.
    """
    inner = inner_optimizer(optimizer)
    note_averaged_by_horovod(inner)
    if backward_passes_per_step > 1:
        _accumulate(inner, backward_passes_per_step)
    # Keras uses the mean of what it has accumulated.
    times = 1 if average_aggregated_gradients else backward_passes_per_step
    local: set[int] = set()

    def from_config(*args: Any, **kwargs: Any) -> Any:
        """A new optimizer, which averages in the same way."""
        return average_in_updates(
            type(optimizer).from_config(*args, **kwargs),
            allreduce_gradients,
            backward_passes_per_step,
            average_aggregated_gradients,
            scale_local_gradients,
            ranks,
            lowest,
        )

    def register_local_var(variable: Any) -> None:
        """Keep the gradients of a variable on this rank."""
        local.add(id(backend_variable(variable)))

    def average(
        gradients: Sequence[Any], variables: Sequence[Any], absent: Sequence[Any] | None = None
    ) -> list[Any]:
        held = [backend_variable(v) for v in variables]
        shared = [i for i, v in enumerate(held) if id(v) not in local]
        found = allreduce_gradients([gradients[i] for i in shared], [held[i] for i in shared])
        means = list(gradients)
        for i, mean in zip(shared, found, strict=True):
            means[i] = mean
        if scale_local_gradients:
            for i, v in enumerate(held):
                if id(v) in local:
                    means[i] = _of_values(lambda g: g / tf.cast(ranks(), g.dtype), means[i])
        return [_of_values(lambda g: g * times, mean) for mean in means] if times > 1 else means

    average_in_apply(inner, average, lambda _: None)
    skip_together(inner, lambda finite: tf.cast(lowest(tf.cast(finite, tf.int32)), tf.bool))
    inner.register_local_var = optimizer.register_local_var = register_local_var
    optimizer.from_config = from_config
    return optimizer


def averages(optimizer: Any) -> bool:
    """Whether an optimizer of Keras 3, or the one inside it, reduces its gradients already."""
    return is_averaged_by_horovod(inner_optimizer(optimizer))


def _accumulate(optimizer: Any, passes: int) -> None:
    """Have Keras accumulate gradients, of which it uses the mean."""
    if (given := optimizer.gradient_accumulation_steps) not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes}, but the optimizer has "
            f"gradient_accumulation_steps={given}: leave one of the two out"
        )
    if given is None:
        optimizer.gradient_accumulation_steps = passes
        if optimizer.built:
            optimizer._accumulated_gradients = [
                optimizer.add_variable_from_reference(v, name="gradient_accumulator")
                for v in optimizer._trainable_variables
            ]


def _of_values(function: Callable[[tf.Tensor], tf.Tensor], gradient: Any) -> Any:
    """A gradient with another scale; None where there is none."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = function(gradient.values)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return function(gradient)
