"""The contents of a record, and the means over steps that it holds."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hvkit.monitor.step_times import StepShares

RESERVED = frozenset((
    *("step", "time", "epoch", "steps", "skipped", "seconds", "sent", "host", "samples_per_second"),
    *("slowest", "fastest", "ranks", "learning_rate", "start", "end", "logged"),
    *("gradient_norm", "applied_gradient_norm"),
))  # fmt: skip
"""Names in records that a script cannot use for its metrics."""


class Means:
    """Means of the script's metrics over some steps; summed on their own device, such as a GPU."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}
        self._counts: dict[str, int] = {}

    def add(self, name: str, value: Any) -> None:
        """Add a step's value.

        Raises:
            TypeError: it is no number.
            ValueError: the name is one of hvkit's own.
        """
        if name in RESERVED:
            raise ValueError(f"{name!r} is a name that hvkit uses in records: choose another one")
        value = detached(name, value)
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def read(self) -> dict[str, float]:
        """The means by name; waits for a GPU."""
        return {name: float(total) / self._counts[name] for name, total in self._sums.items()}

    def clear(self) -> None:
        """Drop all values."""
        self._sums.clear()
        self._counts.clear()


# Norms that differ by less are the same up to rounding.
_ROUNDING = 1e-5


def of_whole_model(everyone: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The learning rate, and norms of a model's gradients from those of the ranks' parts.

    ``applied_gradient_norm`` is left out where it is that before the script changed gradients.

    Args:
        everyone: by rank, what it knows of its optimizers.
    """
    found = {name: everyone[0][name] for name in ("learning_rate",) if name in everyone[0]}
    for name in ("gradient_norm", "applied_gradient_norm"):
        parts = [each[name] for each in everyone if name in each]
        if parts:
            found[name] = math.hypot(*parts)
    if (applied := found.get("applied_gradient_norm")) is not None:
        norm = found["gradient_norm"]
        if abs(norm - applied) <= _ROUNDING * max(norm, applied):
            del found["applied_gradient_norm"]
    return found


def described(
    about: Mapping[str, Any],
    found: StepShares,
    metrics: Sequence[Mapping[str, float]],
    optimizer: Mapping[str, float],
    sent: Mapping[str, int],
    loads: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The record of some steps of all ranks, as ``metrics.jsonl`` holds it.

    Args:
        about: step, time, epoch, and the number of skipped steps; None values are left out.
        found: where the time went.
        metrics: by rank, the script's numbers: means over the steps.
        optimizer: learning rate and gradient norm.
        sent: bytes of a rank by purpose, in all of these steps.
        loads: by host.
    """
    speeds = found.samples_per_second
    record = {name: value for name, value in about.items() if value is not None}
    for name in dict.fromkeys(name for each in metrics for name in each):
        values = [each[name] for each in metrics if name in each]
        record[name] = sum(values) / len(values)
    record |= optimizer
    record["steps"] = found.steps
    record["samples_per_second"] = sum(speeds)
    if len(speeds) > 1:
        slow, fast = speeds.index(min(speeds)), speeds.index(max(speeds))
        record["slowest"] = {"samples_per_second": speeds[slow], "rank": slow}
        record["fastest"] = {"samples_per_second": speeds[fast], "rank": fast}
        record["ranks"] = {"samples_per_second": speeds, "last": found.last.tolist()}
    record["seconds"] = {"step": found.seconds, **found.parts}
    record["sent"] = {purpose: size / max(found.steps, 1) for purpose, size in sent.items()}
    record["host"] = dict(loads)
    return record


def detached(name: str, value: Any) -> Any:
    """A copy of the value in 32 bits or more, without autograd's graph, still on its device."""
    if isinstance(value, int | float):
        return float(value)
    if math.prod(getattr(value, "shape", (0,))) != 1:
        raise TypeError(
            f"metrics are numbers or tensors with one value, got {value!r} of type "
            f"{type(value).__name__} for {name!r}"
        )
    if hasattr(value, "detach"):
        return value.detach().float().clone().reshape(())
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(value, tensorflow.Tensor | tensorflow.Variable):
        return tensorflow.reshape(tensorflow.cast(value, "float32"), ())
    return float(value)


def length_of(batch: Any, parts: int = 1) -> float:
    """Samples in a rank's batch: the length of its first array or tensor; 0 if there is none.

    Args:
        batch: an array or tensor, or a tuple, list or mapping of them.
        parts: in how many of these a batch is divided among the ranks. In JAX an array may be the
            batch of all ranks; then its length is divided by this number.
    """
    if getattr(batch, "shape", None):
        whole = not getattr(batch, "is_fully_addressable", True)
        return int(batch.shape[0]) / parts if whole else int(batch.shape[0])
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for each in batch:
            with suppress(TypeError, ValueError):
                if found := length_of(each, parts):
                    return found
    return 0
