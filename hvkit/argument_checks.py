"""Checks of arguments that users pass."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from numbers import Integral, Real
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def advise_on_extra_arguments(advice: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator of a function: too many arguments without a name are an error with this advice."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        kinds = [each.kind for each in inspect.signature(function).parameters.values()]
        most = kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            if len(args) > most:
                extra = ", ".join(type(each).__name__ for each in args[most:])
                raise TypeError(f"{advice}; got also {extra}")
            return function(*args, **kwargs)

        return checked

    return decorate


def check_path(name: str, value: object, example: str) -> Path:
    """The value as a path; the error ends with an example of a call that is right."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} must be a path, got {value!r}: {example}")
    return Path(value)


def check_count(name: str, value: object, least: int = 1) -> int:
    """The value as an int; TypeError if it is none, ValueError if it is smaller than ``least``."""
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
    """The value as a float; TypeError if no number, ValueError unless finite and within limits."""
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


def check_one_of(name: str, value: object, accepted: tuple[str, ...]) -> str:
    """The value, or ValueError unless it is one of some words."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(accepted)}; got {value!r}")
    return str(value)
