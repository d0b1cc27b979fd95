"""Checks of numbers that users pass."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_count(name: str, value: object, least: int = 1) -> int:
    """The value as an int.

    Raises:
        TypeError: it is no integer.
        ValueError: it is smaller than ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if (count := int(value)) < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return count


def check_number(
    name: str,
    value: object,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    up_to: float = math.inf,
    below: float = math.inf,
) -> float:
    """The value as a float.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite, or outside of the limits that were passed.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    number = float(value)
    limits = {
        f"at least {least:g}": least <= number,
        f"above {above:g}": above < number,
        f"at most {up_to:g}": number <= up_to,
        f"below {below:g}": number < below,
        "finite": math.isfinite(number),
    }
    if not all(limits.values()):
        wanted = [limit for limit in limits if not limit.endswith("inf")]
        if len(wanted) > 2:  # two limits say that it is finite
            wanted.remove("finite")
        raise ValueError(f"{name} must be {' and '.join(wanted)}, got {value}")
    return number
