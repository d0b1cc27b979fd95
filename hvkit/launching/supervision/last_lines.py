"""The last lines of a rank, which the report of a failure reads and shows."""

from __future__ import annotations

import re
import time
from collections import deque

from hvkit.launching.supervision.protocol import Kind
from hvkit.launching.supervision.tracebacks import separated

LAST_LINES = 20
"""Number of a rank's last lines that are kept."""

# Seconds: an older line does not explain why a rank has ended.
_OLD = 60.0
# Bytes kept of each last line.
_KEPT_BYTES = 2000

# Output that begins so draws over a progress bar, or ends its line.
_DRAWS = re.compile(rb"[\r\n\b\x1b]|$")
# Lines that libraries print when they are loaded.
_GREETING = re.compile(
    r"[IW]\d{4} \d\d:\d\d:\d\d|[IWE]0000 00:00:\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] "
    r"|WARNING: All log messages before absl|To enable the following instructions|NCCL version "
)
# One of Python's warnings begins so, and ends with the line of code.
_WARNING = re.compile(r"\S+:\d+: \w*Warning: ")
_WARNING_ENDS = re.compile(r"  \S")


class LastLines:
    """Keeps the last lines of both streams of a rank in the order in which they come."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, bytes]] = deque(maxlen=LAST_LINES)
        # By stream: its unfinished line, and the progress bar in front of that.
        self._unfinished = dict.fromkeys((Kind.STDOUT, Kind.STDERR), b"")
        self._bars = dict.fromkeys((Kind.STDOUT, Kind.STDERR), b"")
        self._changed = 0.0

    def add(self, kind: Kind, data: bytes) -> None:
        """Keep what the rank has printed."""
        self._changed = time.monotonic()
        before = self._unfinished[kind]
        if _is_bar(before) and not _DRAWS.match(data):
            self._bars[kind], before = before, b""
        lines = separated(before + data).split(b"\n")
        if bar := self._bars[kind]:
            drawn_over = b"\r" in lines[0].rstrip(b"\r")
            if drawn_over or len(lines) > 1:
                self._bars[kind] = b""
            if not drawn_over and len(lines) > 1:
                lines.insert(0, bar)
        *whole, rest = lines
        self._lines.extend((self._changed, line[-_KEPT_BYTES:]) for line in whole)
        # A line without an end may be as long as a file.
        self._unfinished[kind] = rest[-_KEPT_BYTES:]

    def all(self) -> list[str]:
        """The lines as a terminal shows them, without empty ones."""
        return [text for _, text in self._texts()]

    def telling(self) -> list[str]:
        """The lines that may explain why the rank ends: no old ones, no greetings, no warnings."""
        recent = time.monotonic() - _OLD
        return _without_chatter([text for at, text in self._texts() if at > recent])

    def _texts(self) -> list[tuple[float, str]]:
        rest = [self._bars[kind] + line for kind, line in self._unfinished.items()]
        lines = [*self._lines, *((self._changed, line) for line in rest)]
        return [(at, text) for at, line in lines if (text := as_kept(line)).strip()]


def as_kept(line: bytes) -> str:
    """The line as a terminal shows it, cut to its end if it is very long."""
    return last_state(line[-_KEPT_BYTES:]).decode(errors="replace").rstrip()


def last_state(line: bytes) -> bytes:
    """The line as a terminal shows it after the last carriage return of a progress bar."""
    state = line.rstrip(b"\r")
    return state.rpartition(b"\r")[2] + line[len(state) :]


def _is_bar(line: bytes) -> bool:
    return b"\r" in line and bool(last_state(line).strip())


def _without_chatter(lines: list[str]) -> list[str]:
    kept: list[str] = []
    warning: list[str] = []
    for line in lines:
        if _WARNING.match(line):
            kept += warning
            warning = [line]
        elif warning:
            warning.append(line)
            if _WARNING_ENDS.match(line):
                warning = []
        elif not _GREETING.match(line):
            kept.append(line)
    return kept + warning[1:]
