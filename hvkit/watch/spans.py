"""Spans of time in the threads of a script: calls of hvkit, waits, loaded batches.

``calls`` and the frameworks' ports mark spans; a monitor and the timeline of a run observe them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Span(NamedTuple):
    """A span of time in a thread of the script.

    Attributes:
        name: of the user's call, or one of the names below.
        begun: as of ``time.monotonic``.
        ended: as of ``time.monotonic``.
        step: the optimizer step, counted from 1, if it belongs to one.
    """

    name: str
    begun: float
    ended: float
    step: int | None = None


WAITING = "waiting"
"""A wait for other ranks."""

REDUCTION = "averaging gradients"
"""The rest of averaging, after a backward pass of PyTorch has computed its gradients."""

PASS = "the model's forward or backward pass"
"""Of a model of which each rank has a part."""

DATA = "data"
"""Loading a batch, from its request on."""

observers: list[Callable[[Span], None]] = []
"""Called with each span; most runs have none."""


def observe(observer: Callable[[Span], None], on: bool = True) -> None:
    """Call a function after each span, in the span's thread; with ``on=False``, no longer."""
    if on:
        observers.append(observer)
    else:
        observers.remove(observer)


def mark(name: str, begun: float, ended: float, step: int | None = None) -> None:
    """Show a span to all observers."""
    span = Span(name, begun, ended, step)
    for observer in observers:
        observer(span)
