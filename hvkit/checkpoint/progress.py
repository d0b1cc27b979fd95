"""Where training continues: ``Progress``, and checks of the arguments of ``save``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkit.errors import RanksDisagreeError

_JSON = "extras hold what JSON can: dicts with str keys, lists, str, int, float, bool and None"


@dataclass(frozen=True)
class Progress:
    """Where training continues."""

    epoch: int = 0
    """The epoch that was passed to ``save``: the number of epochs done."""
    step: int = 0
    """The step that was passed to ``save``: the number of optimizer steps done."""
    batches: int = 0
    """Batches of the epoch that this rank must skip, because the saved run trained on them.

    If another number of ranks has saved, for batches of a rank that are as large as before.
    """
    extras: dict[str, Any] = field(default_factory=dict)
    """The extras that were passed to ``save``; tuples come back as lists."""
    size: int | None = None
    """The number of ranks that saved; None if there was no checkpoint."""
    folder: Path | None = None
    """The checkpoint's folder; None if there was no checkpoint."""
    epoch_batches: int = 0
    """Batches of a whole epoch on each rank of a ``fit`` that has saved in the middle of one."""


def batches_after(read: int, then: tuple[int, int], now: tuple[int, int]) -> int:
    """The batches of an epoch that a rank must skip, rounded down.

    A script may keep the batch of each rank on another number of ranks, or that of all together.

    Args:
        read: batches that each rank of the saved run has read.
        then, now: the number of ranks, and of a rank's batches in a whole epoch; 0 if unknown.
    """
    (ranks_then, all_then), (ranks_now, all_now) = then, now
    ratio = ranks_then / ranks_now
    as_large = abs(all_now - all_then * ratio) < max(ratio, 1)
    if ranks_then == ranks_now or not (all_then and all_now) or as_large:
        return read * ranks_then // ranks_now
    return read * all_now // all_then


def require_same_progress(everyone: Sequence[tuple[int, int]]) -> None:
    """Raise ``RanksDisagreeError`` unless all ranks pass the same epoch and step."""
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            (epoch, step), (other_epoch, other_step) = everyone[0], theirs
            raise RanksDisagreeError(
                f"save needs the same epoch and step on every rank: rank 0 passes epoch={epoch}, "
                f"step={step}, rank {rank} epoch={other_epoch}, step={other_step}; ranks that take "
                "different numbers of steps pass step=max(hvkit.allgather(step))"
            )


def checked_count(name: str, value: object) -> int:
    """The value as an int that is not negative.

    Raises:
        TypeError: it is not an integer.
        ValueError: it is negative.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):
        value = value.__index__()  # NumPy integers too
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value}")
    return value


def checked_every(every: str | int) -> int:
    """The number of steps from one save to the next.

    Raises:
        TypeError: it is no integer.
        ValueError: it is not positive.
    """
    if isinstance(every, bool) or not isinstance(every, int):
        raise TypeError(f'every must be "epoch" or a number of steps, got {every!r}')
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    return every


def checked_extras(extras: object) -> dict[str, Any]:
    """The extras as JSON returns them.

    Raises:
        TypeError: JSON cannot hold them, or would change more than tuples into lists.
    """
    if extras is None:
        return {}
    if not isinstance(extras, dict):
        raise TypeError(f"extras must be a dict, got {extras!r} of type {type(extras).__name__}")
    _require_json(extras, "extras")
    copy: dict[str, Any] = json.loads(json.dumps(extras))
    return copy


def _require_json(value: object, name: str) -> None:
    if isinstance(value, dict):
        for key, each in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r} of type {_type_of(key)}; {_JSON}")
            _require_json(each, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, each in enumerate(value):
            _require_json(each, f"{name}[{i}]")
    elif value is not None and not isinstance(value, str | int | float):
        hint = "; use .item() or .tolist()" if hasattr(value, "tolist") else ""
        raise TypeError(f"{name} is of type {_type_of(value)}; {_JSON}{hint}")


def _type_of(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
