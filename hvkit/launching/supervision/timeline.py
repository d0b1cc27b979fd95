"""``hvkit run --timeline``: the spans of all ranks in one Chrome trace, with aligned clocks.

The format is the JSON array of Chrome's trace events, which Perfetto (ui.perfetto.dev) and
``chrome://tracing`` open, also if the end of the file is missing. A rank is shown as a process, and
the threads of its script as threads.

**Clocks.** Monotonic clocks of hosts start at different times. The supervisor requests each agent's
clock every few seconds. The reply shows a time between request and reply. If the middle is taken
for it, the error is at most half of the round trip (Cristian, "Probabilistic clock
synchronization", 1989). The fastest of the last replies is used, so a drift is followed.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from pathlib import Path
from typing import Any, TextIO

from hvkit.errors import LaunchError
from hvkit.log import logger

# Replies that are kept.
_ANSWERS = 30
# Lines of spans of a rank that are kept before the first reply.
_WAITING = 1000
# Microseconds of a span: JSON's numbers are exact up to here.
_LONGEST = 1 << 53


class HostClock:
    """How far another host's clock is ahead of this one's; a thread asks, another takes replies."""

    def __init__(self) -> None:
        self._asked = (0, 0.0)  # the last request's number and time
        self._answered = 0  # the number of the last request that has a reply
        self._answers: deque[tuple[float, float]] = deque(maxlen=_ANSWERS)

    def ask(self, now: float) -> int:
        """Note the time of a request; return its number."""
        self._asked = (self._asked[0] + 1, now)
        return self._asked[0]

    def answered(self, number: int, clock: float, now: float) -> None:
        """Use a reply: the time on the other clock, and on this one when it arrived."""
        last, asked = self._asked
        if self._answered < number == last and asked <= now:
            self._answers.append((now - asked, clock - (asked + now) / 2))
            self._answered = number

    @property
    def ahead(self) -> float | None:
        """Seconds; None before the first reply."""
        return min(self._answers)[1] if self._answers else None


class Timeline:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise LaunchError(
                f"--timeline {path} cannot be written ({error.strerror}): name another file"
            ) from None
        self._begun = time.monotonic()
        self._named: set[tuple[int, int, str]] = set()
        self._waiting: dict[tuple[int, str], list[bytes]] = {}
        self._write("[\n")

    def take(self, rank: int, host: str, ahead: float | None, line: bytes) -> None:
        waiting = self._waiting.setdefault((rank, host), [])
        if ahead is None:
            if len(waiting) < _WAITING:
                waiting.append(line)
            return
        events = [each for one in [*waiting, line] for each in self._events(rank, host, ahead, one)]
        waiting.clear()
        self._write("".join(json.dumps(each, separators=(",", ":")) + ",\n" for each in events))

    def note(self, text: str) -> None:
        """Mark this moment in the whole trace, for a restart."""
        now = round(1e6 * (time.monotonic() - self._begun))
        event = {"name": text, "ph": "i", "s": "g", "ts": now, "pid": 0, "tid": 0}
        self._write(json.dumps(event) + ",\n")

    def close(self) -> None:
        # Each event ends with a comma, which JSON does not allow after the last one.
        self._write(json.dumps({"name": "end", "ph": "M", "pid": 0, "args": {}}) + "\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None
            logger.info("timeline: %s opens in ui.perfetto.dev", self._path)

    def _events(self, rank: int, host: str, ahead: float, line: bytes) -> list[dict[str, Any]]:
        try:
            spans = json.loads(line)["spans"]
            events = []
            for name, step, thread, begun, length in spans:
                if not (math.isfinite(begun) and 0 <= length < _LONGEST):
                    raise ValueError("no time")
                event = {
                    "name": str(name),
                    "ph": "X",
                    "pid": rank,
                    "tid": int(thread),
                    "ts": round(1e6 * (float(begun) - ahead - self._begun), 1),
                    "dur": int(length),
                }
                if step is not None:
                    event["args"] = {"step": int(step) % _LONGEST}
                events += [*self._names(rank, host, int(thread)), event]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            logger.warning("a rank's spans are no JSON: %r", line[:80])
            return []
        return events

    def _names(self, rank: int, host: str, thread: int) -> list[dict[str, Any]]:
        """The events that name a rank and a thread, before their first span."""
        if (rank, thread, host) in self._named:
            return []
        self._named.add((rank, thread, host))
        of = {"ph": "M", "pid": rank, "tid": thread}
        shown = "script" if thread == 0 else f"thread {thread}"
        return [
            {"name": "process_name", "args": {"name": f"rank {rank} on {host}"}, **of},
            {"name": "process_sort_index", "args": {"sort_index": rank}, **of},
            {"name": "thread_name", "args": {"name": shown}, **of},
        ]

    def _write(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            logger.warning("timeline: %s cannot be written any more: %s", self._path, error)
            self._file = None
