"""Scripts that fail or end, started as users start them, in less time."""

from quick_start import quick_start  # noqa: F401
