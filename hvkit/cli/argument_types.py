"""Types of arguments that several subcommands take."""

import argparse
from collections.abc import Callable, Sequence


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def ranks(text: str) -> tuple[range, ...]:
    """Numbers of ranks and ranges of them, with commas between."""
    found = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        # Longer numbers than any count of ranks are refused without a conversion.
        if not all(
            word.isascii() and word.isdecimal() and len(word) < 10 for word in (first, last)
        ):
            raise argparse.ArgumentTypeError(f"must be ranks, such as 0 or 0,4-7, got {text!r}")
        if int(last) < int(first):
            raise argparse.ArgumentTypeError(f"a range begins with its smaller rank, got {part!r}")
        found.append(range(int(first), int(last) + 1))
    return tuple(found)


def ranks_text(found: Sequence[range]) -> str:
    """What :func:`ranks` reads as these."""
    return ",".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in found)


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
