"""The learning rate of a Keras optimizer, multiplied where an update reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from keras import ops

from hvkit.learning_rate import Multiplier


def scale_rates(
    optimizers: Sequence[Any], multiplier: Multiplier
) -> list[tuple[float, Multiplier | None]]:
    """Make every update of these optimizers use multiplied rates; return the user's with it."""
    if not multiplier.changes_nothing:
        for each in optimizers:
            RateInUpdate(each, multiplier)
    return [(float(each.learning_rate), multiplier) for each in optimizers]


class RateInUpdate:
    """Multiplies the learning rate of one optimizer, only where its ``apply`` reads it.

    ``optimizer.learning_rate`` stays the user's: callbacks, loggers and saved files read and write
    it at any time. It may be a number, a ``LearningRateSchedule`` or a function.

    Args:
        optimizer: one that updates variables.
        multiplier: the factor of each step.
    """

    def __init__(self, optimizer: Any, multiplier: Multiplier) -> None:
        self._optimizer = optimizer
        self._multiplier = multiplier
        self._updating = False
        read, apply = optimizer._get_current_learning_rate, optimizer.apply

        def rate() -> Any:
            return read() * self._by() if self._updating else read()

        def apply_at_multiplied_rate(*args: Any, **kwargs: Any) -> None:
            self._updating = True
            try:
                apply(*args, **kwargs)
            finally:
                self._updating = False

        optimizer._get_current_learning_rate = rate
        optimizer.apply = apply_at_multiplied_rate

    def _by(self) -> Any:
        """The factor of this step: ``Multiplier.at``, of tensors during a warm-up."""
        full, first, steps = (
            self._multiplier.full,
            self._multiplier.first,
            self._multiplier.warmup_steps,
        )
        if not steps:
            return full
        step = ops.cast(self._optimizer.iterations, "float32")
        return ops.where(step >= steps, full, first + (full - first) * step / steps)
