"""Sends to ``hvkit run --timeline`` what this rank does: its calls of hvkit, and its waits.

Spans go through the pipe of ``hvkit.host.run_reports``. ``hvkit.watch.pulse`` has them sent every
second, so a rank that is killed loses no more.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
from typing import Any

from hvkit.host.run_reports import LONGEST, TIMELINE, report
from hvkit.watch import calls

_SPANS = 200
# Bytes of a line around its spans.
_AROUND = 32


def wanted() -> bool:
    """Whether the run has a timeline."""
    return os.environ.get(TIMELINE) == "1"


class Recorder:
    """Keeps this rank's spans from now on; sends many at once, and the rest at the script's end."""

    def __init__(self) -> None:
        self._spans: list[list[Any]] = []
        calls.observe(self.take)
        atexit.register(self.send)
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._one_sends = threading.Lock()

    def take(self, span: calls.Span) -> None:
        """Keep a span."""
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
