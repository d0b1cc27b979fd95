"""What :func:`hvkit.distribute` did to which optimizer, for those who come later: checkpoints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet


class Warmup(Protocol):
    """A warm-up that counts its steps itself."""

    steps_done: int


@dataclass(frozen=True)
class Record:
    """One distributed optimizer."""

    warmup: Warmup | None = None
    """What counts its steps; None if nothing has to, or if the optimizer itself does."""


_models: WeakSet[Any] = WeakSet()
_optimizers: WeakKeyDictionary[Any, Record] = WeakKeyDictionary()


def record(model: Any, optimizers: Iterable[tuple[Any, Record]]) -> None:
    """Remember that these were distributed."""
    _models.add(model)
    _optimizers.update(optimizers)


def is_distributed(model_or_optimizer: Any) -> bool:
    """Whether this object was passed to :func:`hvkit.distribute`."""
    return model_or_optimizer in _models or model_or_optimizer in _optimizers


def record_of(optimizer: Any) -> Record | None:
    """What was done to an optimizer; None if it was not distributed."""
    return _optimizers.get(optimizer)
