"""How far a run had come, and what else the user keeps in a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_HOLDS = "extras hold what JSON can: dicts with str keys, lists, str, int, float, bool and None"


@dataclass(frozen=True)
class Progress:
    """Where training goes on."""

    epoch: int = 0
    """Epochs done, as it was passed to ``save``."""
    step: int = 0
    """Optimizer steps done, as it was passed to ``save``."""
    batches: int = 0
    """Batches of the epoch that this rank has to leave out, since they were trained on."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What was passed to ``save``; tuples come back as lists."""
    size: int | None = None
    """The number of ranks that saved; None if there was no checkpoint."""
    folder: Path | None = None
    """The checkpoint's folder; None if there was no checkpoint."""


def checked_count(name: str, value: object) -> int:
    """The value as an int that is not negative.

    Raises:
        TypeError: it is no int.
        ValueError: it is negative.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):
        value = value.__index__()  # NumPy's integers, too
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def checked_extras(extras: object) -> dict[str, Any]:
    """The extras as JSON gives them back.

    Raises:
        TypeError: JSON cannot hold them, or would change more than tuples into lists.
    """
    if extras is None:
        return {}
    if not isinstance(extras, dict):
        raise TypeError(f"extras must be a dict, got {extras!r} of type {type(extras).__name__}")
    _check(extras, "extras")
    copy: dict[str, Any] = json.loads(json.dumps(extras))
    return copy


def _check(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r} of type {_type(key)}; {_HOLDS}")
            _check(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _check(each, f"{name}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        hint = "; use .item() or .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{name} is of type {_type(value)}; {_HOLDS}{hint}")


def _type(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
