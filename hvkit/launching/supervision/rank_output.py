"""Shows a rank's output in whole lines and tracebacks, logs it, and keeps the last lines."""

import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hvkit.launching.supervision.protocol import Frame
from hvkit.launching.supervision.screen import LAUNCHER_LOG, write_log
from hvkit.launching.supervision.tracebacks import (
    Traceback,
    beginning,
    interrupted_at,
    separated,
    starts_a_line,
)
from hvkit.log import interrupted

# Bytes: a longer line is shown in parts, and a longer traceback is shown at once.
_LONGEST_LINE = 1 << 16
# Seconds to hold a traceback back: if the rank then ends, only the report shows it.
_HELD = 3.0

_LOG = "rank-{}.log"

LAST_LINES = 20  # number of a rank's last lines that are kept

# Seconds: an older line does not explain why a rank has ended.
_OLD = 60.0
# Bytes kept of each last line.
_KEPT_BYTES = 2000

# Output that begins so draws over a progress bar, or ends its line.
_DRAWS = re.compile(rb"[\r\n\b\x1b]|$")
# Lines that libraries print when they are loaded.
_CHATTER = re.compile(
    r"[IW]\d{4} \d\d:\d\d:\d\d|[IWE]0000 00:00:\d|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [IW] "
    r"|WARNING: All log messages before absl|To enable the following instructions|NCCL version "
)
# One of Python's warnings, which ends with the line of code if there is one.
_WARNING = re.compile(r"^\S+:\d+: \w*Warning: .*\n(?:(?:.*\n)*?  \S.*\n)?", re.MULTILINE)

# Lines that TensorFlow and JAX print on each rank though nothing is wrong: level INFO of their C++
# files, in the form of TensorFlow 2.20, which names no folder, and in the older one; warnings and
# errors that are known to mean nothing; and Gloo's count of connections, if there are as many as it
# expects. Other programs use these forms, too. A line of gpu_device.cc names the GPU.
_GREETING = re.compile(
    rb"^(?:I0000 00:00:\d+\.\d+ +\d+ (?:"
    rb"(?:cpu_feature_guard|computation_placer|cuda_(?:executor|dnn|fft|blas|solvers)|cudart_stub"
    rb"|mlir_graph_optimization_pass|generator_dataset_op|shuffle_dataset_op|local_rendezvous"
    rb"|subprocess_compilation|coordination_service(?:_agent)?|pjrt_\w+)\.cc:\d+\] "
    rb"|port\.cc:\d+\] oneDNN |device_compiler\.h:\d+\] |service\.cc:\d+\] (?:XLA s|  StreamEx))"
    rb"|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: I (?:tensorflow|(?:external/(?:local_)?)?(?:xla|tsl))/"
    rb"(?:(?!gpu_device\.cc:)\S)+:\d+\] "
    rb"|WARNING: All log messages before absl::InitializeLog\(\) is called "
    rb"|To enable the following instructions: [^\n]+ rebuild TensorFlow "
    rb"|(?:[EW]\d{4} \d\d:\d\d:\d+\.\d+ +\d+ |\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: [EW] )"
    rb"(?:[\w/]*cuda_\w+\.cc:\d+\] Unable to register cu\w+ factory: "
    rb"|[\w/]*computation_placer\.cc:\d+\] computation placer already registered"
    rb"|[\w/]*py_utils\.cc:\d+\] TF-TRT Warning: Could not find TensorRT"
    rb"|coordination_service\.cc:\d+\] (?:\[\d+\] )?Using experimental recoverable task feature)"
    rb"|\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. [\w ]+ is : \1\r?$)[^\n]*\n?",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Style:
    prefix: bool = False  # rank and host
    timestamps: bool = False  # when lines arrived here
    log_dir: Path | None = None  # with a file for each rank and the launcher, see ``make_room``
    # Those whose output is shown; log files, and the report of a failure, are of all.
    ranks: tuple[range, ...] | None = None
    greetings: bool = False  # that TensorFlow and JAX print though nothing is wrong

    def shows(self, rank: int) -> bool:
        return self.ranks is None or any(rank in some for some in self.ranks)

    @property
    def by_line(self) -> bool:
        """Whether lines get a prefix, and so must be shown whole."""
        return self.prefix or self.timestamps


@dataclass
class _Unfinished:
    text: bytes = b""
    begun: bool = False  # a part was shown
    waits: bool = False  # it has not grown since the last flush
    since: float = math.inf


class RankOutput:
    """The output of one rank, shown in whole lines, so that lines of different ranks do not mix.

    The unfinished line of a progress bar is shown in its current state, and so is any other one
    that has not grown for a second or ended for three, see ``flush``. The log file gets both
    streams; this process writes each to its own.

    Standard output is shown at once. On standard error a traceback is held back until something
    else follows there, for three seconds at most: if the rank ends with it, the report of the run's
    failure shows it, or ``close`` does.
    """

    def __init__(self, rank: int, host: str, style: Style, show: Callable[[Frame, bytes], None]):
        self._rank = rank
        self._label = f"[{rank} {host}] ".encode() if style.prefix else b""
        self._style = style
        self._show = show if style.shows(rank) else lambda *_: None
        self._log: BinaryIO | None = None
        if style.log_dir is not None:
            self._log = (style.log_dir / _LOG.format(f"{rank:04}")).open("wb")
        self._unfinished = {Frame.STDOUT: _Unfinished(), Frame.STDERR: _Unfinished()}
        self._last = LastLines()
        # The last traceback on standard error, and whether nothing has followed it there.
        self._traceback = Traceback()
        self._in_traceback = False
        # The part of it that is held back, with its prefixes.
        self._held = b""
        self._held_since = 0.0
        # Whether Ctrl-C has ended the run: one line then replaces its tracebacks.
        self.interrupted = False
        self._interrupted_at: str | None = None

    def write(self, stream: Frame, data: bytes) -> None:
        """Show the lines that ``data`` completes, and keep the rest."""
        self._last.add(stream, data)
        unfinished = self._unfinished[stream]
        unfinished.waits = False
        if unfinished.begun and not unfinished.text and starts_a_line(data):
            data = b"\n" + data
        lines, end, rest = separated(unfinished.text + data).rpartition(b"\n")
        if end:
            if stream is Frame.STDERR:
                self._take_errors(lines + end)
            else:
                self._put(stream, lines + end)
            unfinished.begun, unfinished.since = False, math.inf
        if stream is Frame.STDERR and self._in_traceback:
            if b"\r" in rest or len(rest) + len(self._traceback.text) > _LONGEST_LINE:
                self._end_traceback()
            elif not rest:
                self._traceback.end_piece()
        if self._style.by_line:
            rest = last_state(rest)
        if len(rest) > _LONGEST_LINE:
            self._put(stream, rest, b"\n" if self._style.by_line else b"")
            rest = b""
        unfinished.text = rest
        if rest:
            unfinished.since = min(unfinished.since, time.monotonic())

    def flush(self, *, failed: bool = False) -> None:
        """Show unfinished lines, unless lines must be shown whole, and what was held too long.

        Python's ``print`` writes each of its arguments apart if output is not buffered. So a line
        that has grown since the last call is not shown, unless it is a progress bar, or began three
        seconds ago, as a line of dots for steps.
        """
        now = time.monotonic()
        if self._held and not failed and now - self._held_since > _HELD:
            self._release()
        if not self._style.by_line:
            for stream, each in self._unfinished.items():
                if each.waits or b"\r" in each.text or now - each.since > _HELD:
                    self._show_unfinished(stream)
                each.waits = bool(each.text)

    def close(self, *, drop: bool = False) -> None:
        """Show unfinished lines and what is held back, and close the log file.

        ``drop`` drops a traceback that is held back, since the report shows it. After Ctrl-C one
        line replaces the tracebacks that Ctrl-C has caused.
        """
        if drop and not self.interrupted:
            self._held = b""
        self._release()
        for stream in self._unfinished:
            self._show_unfinished(stream, b"\n" if self._style.by_line else b"")
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._interrupted_at is not None:
            said = f"hvkit: {interrupted(self._rank, self._interrupted_at)}"
            if not any(line.startswith(said.partition(" (")[0]) for line in self._last.all()):
                self._show(Frame.STDERR, self._decorated(said.encode()) + b"\n")

    def last_lines(self) -> list[str]:
        """The last lines of both streams that explain why the rank ends; a traceback is whole."""
        lines, whole = self._last.relevant(), self._lines_of_traceback()
        if not whole or whole[-1] not in lines:
            return lines
        behind = lines[::-1].index(whole[-1])
        return [*whole, *lines[len(lines) - behind :]]

    def all_last_lines(self) -> list[str]:
        """The last lines of both streams in the order in which they came, without empty ones."""
        return self._last.all()

    def last_traceback(self) -> list[str]:
        """The traceback at the end of standard error; empty if something else follows it."""
        return self._lines_of_traceback() if self._in_traceback else []

    def _lines_of_traceback(self) -> list[str]:
        lines = map(as_kept, self._traceback.text.split(b"\n"))
        return [line for line in lines if line.strip()]

    def _take_errors(self, lines: bytes) -> None:
        """Show whole lines of standard error; hold back a traceback's."""
        while lines:
            if not self._in_traceback:
                begins = beginning(lines)
                if begins != 0:
                    self._put(Frame.STDERR, lines[:begins])
                if begins is None:
                    return
                lines = lines[begins:]
                self._traceback, self._in_traceback = Traceback(), True
            taken = self._traceback.take(lines)
            if taken:
                self._put(Frame.STDERR, lines[:taken], hold=True)
            lines = lines[taken:]
            if lines:
                self._end_traceback()

    def _end_traceback(self) -> None:
        self._in_traceback = False
        self._release()

    def _show_unfinished(self, stream: Frame, end: bytes = b"") -> None:
        unfinished = self._unfinished[stream]
        if unfinished.text and not (self._held and stream is Frame.STDERR):
            self._put(stream, unfinished.text, end)
            unfinished.text, unfinished.begun = b"", True

    def _decorated(self, lines: bytes) -> bytes:
        if not self._style.by_line:
            return lines
        now = b""
        if self._style.timestamps:
            now = datetime.now().isoformat(" ", "milliseconds").encode() + b" "
        start = now + self._label
        *whole, rest = lines.split(b"\n")
        shown = [start + last_state(line).rstrip(b"\r") + b"\n" for line in whole]
        return b"".join([*shown, start + last_state(rest).rstrip(b"\r")] if rest else shown)

    def _put(self, stream: Frame, raw: bytes, end: bytes = b"", *, hold: bool = False) -> None:
        data = self._decorated(raw) + end
        if hold:
            self._held_since = self._held_since if self._held else time.monotonic()
            self._held += data
        elif self._style.greetings or (kept := _GREETING.sub(b"", raw)) == raw:
            self._show(stream, data)
        elif kept:
            self._show(stream, self._decorated(kept) + end)
        if self._log is not None:
            write_log(self._log, data)

    def _release(self) -> None:
        held, self._held = self._held, b""
        if not held:
            return
        where = interrupted_at(self._lines_of_traceback()) if self.interrupted else None
        if where is None:
            self._show(Frame.STDERR, held)
        else:
            self._interrupted_at = where


class LastLines:
    """Keeps the last lines of both streams of a rank in the order in which they come."""

    def __init__(self) -> None:
        self._lines: deque[tuple[float, bytes]] = deque(maxlen=LAST_LINES)
        # By stream: its unfinished line, and the progress bar in front of that.
        self._unfinished = dict.fromkeys((Frame.STDOUT, Frame.STDERR), b"")
        self._bars = dict.fromkeys((Frame.STDOUT, Frame.STDERR), b"")
        self._changed = 0.0

    def add(self, stream: Frame, data: bytes) -> None:
        self._changed = time.monotonic()
        before = self._unfinished[stream]
        if b"\r" in before and last_state(before).strip() and not _DRAWS.match(data):
            self._bars[stream], before = before, b""
        lines = separated(before + data).split(b"\n")
        if bar := self._bars[stream]:
            drawn_over = b"\r" in lines[0].rstrip(b"\r")
            if drawn_over or len(lines) > 1:
                self._bars[stream] = b""
            if not drawn_over and len(lines) > 1:
                lines.insert(0, bar)
        *whole, rest = lines
        self._lines.extend((self._changed, line[-_KEPT_BYTES:]) for line in whole)
        # A line without an end may be as long as a file.
        self._unfinished[stream] = rest[-_KEPT_BYTES:]

    def all(self) -> list[str]:
        """The lines as a terminal shows them, without empty ones."""
        return [text for _, text in self._texts()]

    def relevant(self) -> list[str]:
        """The lines that may explain why the rank ends: no old ones, no greetings, no warnings."""
        recent = time.monotonic() - _OLD
        text = "".join(f"{line}\n" for at, line in self._texts() if at > recent)
        lines = _WARNING.sub("", text).split("\n")[:-1]
        return [line for line in lines if not _CHATTER.match(line)]

    def _texts(self) -> list[tuple[float, str]]:
        rest = [self._bars[stream] + line for stream, line in self._unfinished.items()]
        lines = [*self._lines, *((self._changed, line) for line in rest)]
        return [(at, text) for at, line in lines if (text := as_kept(line)).strip()]


def as_kept(line: bytes) -> str:
    """The line as a terminal shows it, cut to its end if it is very long."""
    return last_state(line[-_KEPT_BYTES:]).decode(errors="replace").rstrip()


def last_state(line: bytes) -> bytes:
    """The line as a terminal shows it after the last carriage return of a progress bar."""
    state = line.rstrip(b"\r")
    return state.rpartition(b"\r")[2] + line[len(state) :]


def make_room(folder: Path) -> None:
    """Create a folder for log files; move an earlier run's to ``earlier-1``, ... below it."""
    folder.mkdir(parents=True, exist_ok=True)
    if logs := [*folder.glob(_LOG.format("*")), *folder.glob(LAUNCHER_LOG)]:
        numbers = itertools.count(1)
        earlier = next(path for n in numbers if not (path := folder / f"earlier-{n}").exists())
        earlier.mkdir()
        for log in logs:
            log.rename(earlier / log.name)
