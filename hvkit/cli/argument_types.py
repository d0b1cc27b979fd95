"""Types of arguments that several subcommands take."""

import argparse
from collections.abc import Callable


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def seconds_between(least: float, most: float) -> Callable[[str], float]:
    """A number of seconds between these two, or one of them."""

    def seconds(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a number of seconds from {least:g} to {most:g}, got {text!r}"
            )
        return value

    return seconds
