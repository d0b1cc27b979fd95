"""The interface between ``hvkit.distribute`` and the frameworks.

``distribute`` makes an adapter for each call. Afterwards ``record`` remembers the model and its
optimizers, so that a second call is refused, and checkpoints find the step count of a warm-up.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from hvkit.learning_rate import Multiplier

BATCH_NORMS = ("average", "local", "sync")


@dataclass(frozen=True)
class Options:
    """The keyword arguments of ``hvkit.distribute`` that adapters act on."""

    accumulate: int
    warmup_steps: int
    compression: str
    batch_norm: str
    check_every: int | None


class Warmup(Protocol):
    """A warm-up that counts optimizer steps itself."""

    steps_done: int


@dataclass(frozen=True)
class Record:
    """What ``distribute`` attached to one optimizer."""

    warmup: Warmup | None = None
    """The step counter of its warm-up; None without a warm-up, or if the optimizer counts steps."""


class Adapter(Protocol):
    """The steps of ``hvkit.distribute`` that depend on the framework, in calling order.

    The constructor checks its arguments and raises TypeError or ValueError; it uses no collective.
    """

    framework: str
    """``"torch"`` or ``"tensorflow"``: the engine it runs on."""

    def facts(self) -> Sequence[str]:
        """One line for each parameter and optimizer; they must be equal on all ranks."""

    def synchronise(self) -> None:
        """Copy rank 0's weights and optimizer state to every rank, bit for bit."""

    def scale_learning_rate(self, multiplier: Multiplier) -> list[tuple[float, Multiplier | None]]:
        """Make every update from now on use multiplied learning rates.

        Returns the user's rates, each with its multiplier, or with None for a step length.
        """

    def average_gradients(self) -> list[tuple[Any, Record]]:
        """Make every update from now on use the mean of the gradients over ranks.

        Returns each optimizer with its record.
        """


def framework_of(model: object) -> str | None:
    """``"torch"`` or ``"tensorflow"`` for one of their models, None for any other object."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        return "tensorflow"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        return "torch"
    return None


_models: WeakSet[Any] = WeakSet()
_optimizers: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()


def record(model: Any, optimizers: Iterable[tuple[Any, Record]]) -> None:
    """Remember a model and its optimizers as distributed."""
    _models.add(model)
    _optimizers.update(optimizers)


def is_distributed(model_or_optimizer: Any) -> bool:
    """Whether this object was passed to ``hvkit.distribute``."""
    return model_or_optimizer in _models or model_or_optimizer in _optimizers


def record_of(optimizer: Any) -> Record | None:
    """The record of an optimizer; None if it was not distributed."""
    return _optimizers.get(optimizer)
