"""The learning rate of one Keras optimizer on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf


class ScaledRate:
    """Multiplies the learning rate, and lowers it again in the first steps.

    A rate that is held in a variable is multiplied there. One that is computed (a
    ``LearningRateSchedule`` or a function) is left as it is, and so is saved as it is; what the
    optimizer reads from it is multiplied.
    """

    def __init__(self, optimizer: Any, factor: float, warmup_steps: int) -> None:
        self._optimizer = optimizer
        self._factor = factor
        self._warmup_steps = warmup_steps
        self._updating = False
        self.before = float(optimizer.learning_rate)
        rate = optimizer._learning_rate
        self._computed = None if isinstance(rate, keras.Variable) else rate
        if self._computed is None:
            rate.assign(self.before * factor)
        if self._computed is not None or warmup_steps:
            read = optimizer._get_current_learning_rate
            optimizer._get_current_learning_rate = lambda: self._read(read())
        if warmup_steps:
            optimizer.apply = self._updating_during(optimizer.apply)
        self.after = float(optimizer.learning_rate)

    def _read(self, rate: Any) -> Any:
        if self._computed is not None and self._optimizer._learning_rate is self._computed:
            rate = rate * self._factor
        if self._updating:
            rate = rate * self._warmup()
        return rate

    def _updating_during(self, apply: Callable[..., None]) -> Callable[..., None]:
        """Let only the update itself read the lowered rate.

        Callbacks that read the rate and write a changed one back must not see it.
        """

        def apply_with_warmup(*args: Any, **kwargs: Any) -> None:
            self._updating = True
            try:
                apply(*args, **kwargs)
            finally:
                self._updating = False

        return apply_with_warmup

    def _warmup(self) -> tf.Tensor:
        """:func:`hvkit.learning_rate.warmup_multiplier` as a tensor."""
        step = tf.cast(tf.convert_to_tensor(self._optimizer.iterations), tf.float32)
        done = tf.minimum(step / self._warmup_steps, 1.0)
        return (1.0 + (self._factor - 1.0) * done) / self._factor
