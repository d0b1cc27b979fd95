"""Reports every second to ``hvkit run`` where this rank is, and what it has done since.

``hvkit top`` shows the one, ``hvkit run --timeline`` draws the other.
"""

from __future__ import annotations

import threading

from hvkit.host.run_reports import listened_to, report
from hvkit.watch import calls
from hvkit.watch.timeline import Recorder, wanted

_EVERY = 1.0
# Characters of a call and a line.
_TEXT = 200


def begin() -> None:
    """Report from now on, in a thread, if ``hvkit run`` has started this rank."""
    if listened_to():
        recorder = Recorder() if wanted() else None
        threading.Thread(target=_run, args=(recorder,), name="hvkit pulse", daemon=True).start()


def _run(recorder: Recorder | None) -> None:
    never = threading.Event()
    while not never.wait(_EVERY):
        if recorder is not None:
            recorder.send()
        now = calls.status()
        report(
            now={
                "call": now.call[:_TEXT],
                "waits": round(now.seconds, 1) if now.waits else 0,
                "where": now.where[-_TEXT:],
                "step": calls.last_step(),
            }
        )
