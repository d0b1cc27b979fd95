"""The examples, started as users start them, in less time."""

from quick_start import without_compiler  # noqa: F401
