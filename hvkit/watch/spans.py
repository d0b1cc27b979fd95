"""What has passed in the threads of a script: calls of hvkit, waits, loaded batches.

``calls`` and adapters mark spans; a monitor and the timeline of a run observe them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Span(NamedTuple):
    """Something that has passed in a thread of the script.

    Attributes:
        name: of the user's call; ``WAITING`` for a wait for other ranks.
        begun: as of ``time.monotonic``.
        ended: as of ``time.monotonic``.
        step: the optimizer step, counted from 1, if it belongs to one.
    """

    name: str
    begun: float
    ended: float
    step: int | None = None


WAITING = "waiting"

_observers: list[Callable[[Span], None]] = []


def observe(observer: Callable[[Span], None], on: bool = True) -> None:
    """Call a function after each span, in the span's thread; or no more."""
    if on:
        _observers.append(observer)
    else:
        _observers.remove(observer)


def mark(name: str, begun: float, ended: float, step: int | None = None) -> None:
    """Show a span to all observers."""
    if _observers:
        span = Span(name, begun, ended, step)
        for observer in _observers:
            observer(span)
