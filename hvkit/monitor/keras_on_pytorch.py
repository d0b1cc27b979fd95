"""Keras on PyTorch: steps of ``fit``, the rate, and the norm of the gradients of an update."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import torch

from hvkit.frameworks.keras.optimizers import inner_optimizer, is_overwritten, parts_of
from hvkit.monitor.keras import FitRecorder
from hvkit.monitor.records import length_of

if TYPE_CHECKING:
    from hvkit.monitor.monitor import Monitor


class TrainStepRecorder(FitRecorder):
    """Records each step of ``fit``, around the model's ``train_step``."""

    def __init__(self, monitor: Monitor, model: keras.Model) -> None:
        super().__init__(monitor, model)
        train_step = model.train_step

        @functools.wraps(train_step)
        def counted(data: Any) -> Any:
            if monitor.closed:
                return train_step(data)
            monitor.loaded()
            logs = train_step(data)
            with self.metrics_of(logs) as metrics:
                monitor.step(samples=length_of(data), **metrics)
            return logs

        model.train_step = counted


class UpdateNorms:
    """Measures the norm of the gradients in updates that end with a record.

    Args:
        monitor: knows which steps those are.
        optimizers: those that update the models.
    """

    def __init__(self, monitor: Monitor, optimizers: Sequence[Any]) -> None:
        self._optimizers = [inner_optimizer(each) for each in optimizers]
        self._norms: dict[int, torch.Tensor] = {}
        self._record_pending = monitor.record_pending
        for number, each in enumerate(self._optimizers):
            self._measure_in_apply(number, each)

    def blocked(self) -> float:
        """Seconds in collectives of graphs: there are none."""
        return 0.0

    def expect(self, pending: bool) -> None:
        """Prepare for the next step; ``pending``: it ends with a record."""
        self._record_pending = pending
        self._norms.clear()

    def read(self) -> dict[str, float]:
        """``learning_rate``, of the first optimizer, and ``gradient_norm`` of all updated here."""
        values = {"learning_rate": float(parts_of(self._optimizers[0])[0].learning_rate)}
        if self._norms:
            values["gradient_norm"] = sum(float(n) ** 2 for n in self._norms.values()) ** 0.5
        return values

    def _measure_in_apply(self, number: int, optimizer: Any) -> None:
        apply = optimizer.apply

        def measured(grads: Sequence[Any], trainable_variables: Any = None) -> None:
            grads = list(grads)
            if trainable_variables is not None:
                trainable_variables = list(trainable_variables)
            held = trainable_variables or getattr(optimizer, "_trainable_variables", ())
            if self._record_pending:
                pairs = zip(grads, held, strict=False)  # Keras itself says if there are too few
                found = [g for g, v in pairs if g is not None and not is_overwritten(v)]
                self._norms[number] = torch.nn.utils.get_total_norm(found)
            apply(grads, trainable_variables)

        optimizer.apply = measured
