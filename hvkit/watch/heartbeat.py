"""Reports at every full second to ``hvkit run`` where this rank is, and its spans since the last.

``hvkit top`` shows where ranks are, ``hvkit run --timeline`` draws the spans. Both are sent through
the pipe of ``hvkit.host.run_reports``. If a rank is killed, only its last second is lost.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from typing import Any

from hvkit import threads
from hvkit.host.run_reports import LONGEST, listened_to, report, timeline_wanted
from hvkit.watch import calls
from hvkit.watch.spans import Span, observe

_EVERY = 1.0
# Characters of a call, and of a line of the script.
_TEXT = 200
# Spans after which they are sent before the second is over.
_SPANS = 200
# Bytes of a report in addition to its spans.
_AROUND = 32


def begin() -> None:
    """Report from now on, in a thread, if ``hvkit run`` has started this rank."""
    if listened_to():
        recorder = Recorder() if timeline_wanted() else None
        threads.start("hvkit-heartbeat", _run, recorder)


def _run(recorder: Recorder | None) -> None:
    never = threading.Event()
    while not never.wait(_until_next(time.time())):
        report_now(calls.status())
        if recorder is not None:
            recorder.send()


def _until_next(now: float) -> float:
    """Seconds until the clock's next full second, at which all ranks report."""
    return _EVERY - now % _EVERY


def report_now(now: calls.Status) -> None:
    """Report where this rank is; also called before it ends, so that the last step is known."""
    report(
        now={
            "call": now.call[:_TEXT],
            "waits": round(now.seconds, 1) if now.waits else 0,
            "where": now.where[-_TEXT:],
            "step": calls.last_step(),
            "made": round(time.time(), 3),
        }
    )


class Recorder:
    """Collects this rank's spans from now on, and sends them; the rest at the end of the script."""

    def __init__(self) -> None:
        self._spans: list[list[Any]] = []
        observe(self.take)
        atexit.register(self.send)
        self._threads: dict[int, int] = {threading.main_thread().ident or 0: 0}
        self._one_sends = threading.Lock()

    def take(self, span: Span) -> None:
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
