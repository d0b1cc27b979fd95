"""Reports every second to ``hvkit run`` where this rank is, for ``hvkit top``."""

from __future__ import annotations

import threading

from hvkit.host.run_reports import listened_to, report
from hvkit.watch import calls

_EVERY = 1.0
# Characters of a call and a line.
_TEXT = 200


def begin() -> None:
    """Report from now on, in a thread, if ``hvkit run`` has started this rank."""
    if listened_to():
        threading.Thread(target=_run, name="hvkit pulse", daemon=True).start()


def _run() -> None:
    never = threading.Event()
    while not never.wait(_EVERY):
        now = calls.status()
        report(
            now={
                "call": now.call[:_TEXT],
                "waits": round(now.seconds, 1) if now.waits else 0,
                "where": now.where[-_TEXT:],
                "step": calls.last_step(),
            }
        )
