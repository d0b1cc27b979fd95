"""Types of arguments that several subcommands take."""

import argparse


def positive(text: str) -> int:
    """A positive integer."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)
