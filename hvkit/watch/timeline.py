"""Sends to ``hvkit run --timeline`` what this rank does: its calls of hvkit, and its waits.

Spans go through the pipe of ``hvkit.host.run_reports``, some at a time, so that a rank that is
killed loses the last second only.
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from typing import Any

from hvkit.host.run_reports import LONGEST, report
from hvkit.watch import calls

VARIABLE = "HVKIT_TIMELINE"
"""Environment variable of ranks whose run has a timeline."""

_EVERY = 1.0
_SPANS = 200
# Bytes of a line around its spans.
_AROUND = 32


def wanted() -> bool:
    """Whether the run has a timeline."""
    return os.environ.get(VARIABLE) == "1"


def begin() -> None:
    """Send spans from now on, to the end of the script."""
    recorder = _Recorder()
    calls.observe(recorder.take)
    atexit.register(recorder.send)


class _Recorder:
    def __init__(self) -> None:
        self._spans: list[list[Any]] = []
        self._sent = time.monotonic()
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._one_sends = threading.Lock()

    def take(self, span: calls.Span) -> None:
        """Keep a span; send what is there from time to time."""
        thread = self._threads.setdefault(threading.get_ident(), len(self._threads))
        length = round(1e6 * (span.ended - span.begun))
        self._spans.append([span.name, span.step, thread, round(span.begun, 6), length])
        if len(self._spans) >= _SPANS or span.ended - self._sent > _EVERY:
            self.send()

    def send(self) -> None:
        """Send all spans, in lines that the pipe takes as a whole."""
        with self._one_sends:
            spans, self._spans = self._spans, []
            self._sent = time.monotonic()
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
