"""Spans of time in the threads of a script: calls of hvkit, waits, loaded batches.

``calls`` and the frameworks' ports mark spans. A monitor observes them, and a ``Recorder``, which
sends them to ``hvkit run --timeline`` through the pipe of ``hvkit.host.run_reports``.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from hvkit.host.run_reports import LONGEST, report

# Spans after which a recorder sends them.
_SPANS = 200
# Bytes of a report in addition to its spans.
_AROUND = 32


class Span(NamedTuple):
    """Some time in a thread of the script, from ``begun`` to ``ended`` of ``time.monotonic``."""

    name: str  # of the user's call, or one of the names below
    begun: float
    ended: float
    step: int | None = None  # the optimizer step, counted from 1, if it belongs to one


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
    (observers.append if on else observers.remove)(observer)


def mark(name: str, begun: float, ended: float, step: int | None = None) -> None:
    """Show a span to all observers."""
    span = Span(name, begun, ended, step)
    for observer in observers:
        observer(span)


class Recorder:
    """Collects this rank's spans from now on, and sends them; the rest at the end of the script.

    If the rank is killed, what it has collected since the last ``send`` is lost.
    """

    def __init__(self) -> None:
        self._spans: list[list[Any]] = []
        observe(self.take)
        atexit.register(self.send)
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._one_sends = threading.Lock()

    def take(self, span: Span) -> None:
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        length = round(1e6 * (span.ended - span.begun))
        self._spans.append([span.name, span.step, thread, round(span.begun, 6), length])
        if len(self._spans) >= _SPANS:
            self.send()

    def send(self) -> None:
        """Send all spans, in lines that the pipe takes as a whole."""
        with self._one_sends:
            spans, self._spans = self._spans, []
            line: list[list[Any]] = []
            size = _AROUND
            for span in spans:
                length = len(json.dumps(span)) + 2
                if line and size + length > LONGEST:
                    report(spans=line)
                    line, size = [], _AROUND
                line.append(span)
                size += length
            if line:
                report(spans=line)
