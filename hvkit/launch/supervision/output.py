"""What ranks print: shown here, written to log files, and the last lines kept for a report.

A ``RankOutput`` turns the bytes of one rank into whole lines. The one ``Writer`` of a run
does the writing on a thread of its own, so that a slow terminal blocks the ranks that print and
nothing else.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hvkit import threads
from hvkit.launch.supervision.protocol import Kind

LAST_LINES = 20
"""Number of a rank's last lines that the report of a failure shows."""

# Bytes: a longer line is shown in parts.
_LONGEST_LINE = 1 << 16
# Bytes kept of each last line.
_KEPT_BYTES = 2000

_LOG = "rank-{}.log"

_Work = tuple[Callable[[], None], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


@dataclass(frozen=True)
class Style:
    """How to show output.

    Attributes:
        prefix: whether lines begin with rank and host.
        timestamps: whether lines begin with the time at which they arrived here.
        log_dir: folder for one log file per rank, see ``make_room``; ``None`` for none.
        ranks: the ranks whose output is shown; ``None`` for all. Output of the others goes to
            their log files, and their last lines to the report of a failure.
    """

    prefix: bool = False
    timestamps: bool = False
    log_dir: Path | None = None
    ranks: tuple[range, ...] | None = None

    def shows(self, rank: int) -> bool:
        """Whether this rank's output is shown."""
        return self.ranks is None or any(rank in some for some in self.ranks)

    @property
    def by_line(self) -> bool:
        """Whether lines get something before them, and so must be shown whole."""
        return self.prefix or self.timestamps


class RankOutput:
    """The output of one rank, shown in whole lines, so that lines of different ranks do not mix.

    The unfinished line of a progress bar is shown as far as it has come, see ``flush``. The log
    file gets both streams; on this process each keeps its own.

    Args:
        rank: its number.
        host: where it runs.
        style: how to show its output.
        show: called with the stream and the bytes to show.

    Raises:
        OSError: the log file cannot be opened.
    """

    def __init__(self, rank: int, host: str, style: Style, show: Callable[[Kind, bytes], None]):
        self._label = f"[{rank} {host}] ".encode() if style.prefix else b""
        self._style = style
        self._show = show if style.shows(rank) else _show_nothing
        self._log = _log_file(style.log_dir, rank)
        self._unfinished = {Kind.STDOUT: b"", Kind.STDERR: b""}
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._last_unfinished = b""

    def write(self, kind: Kind, data: bytes) -> None:
        """Show the lines that ``data`` completes, and keep the rest."""
        self._remember(data)
        lines, end, rest = (self._unfinished[kind] + data).rpartition(b"\n")
        if end:
            self._put(kind, self._decorated(lines) + end)
        if self._style.by_line:
            rest = _last_state(rest)
        if len(rest) > _LONGEST_LINE:
            self._put(kind, self._decorated(rest) + (b"\n" if self._style.by_line else b""))
            rest = b""
        self._unfinished[kind] = rest

    def flush(self) -> None:
        """Show unfinished lines, unless lines must be shown whole."""
        if not self._style.by_line:
            self._show_unfinished()

    def close(self) -> None:
        """Show unfinished lines, and close the log file."""
        self._show_unfinished(b"\n" if self._style.by_line else b"")
        if self._log is not None:
            self._log.close()
            self._log = None

    def last_lines(self) -> list[str]:
        """The last lines of both streams in the order in which they came, without empty ones."""
        lines = [*self._last, self._last_unfinished]
        return [line.decode(errors="replace").rstrip() for line in lines if line.strip()]

    def _show_unfinished(self, end: bytes = b"") -> None:
        for kind, rest in self._unfinished.items():
            if rest:
                self._put(kind, self._decorated(rest) + end)
                self._unfinished[kind] = b""

    def _decorated(self, lines: bytes) -> bytes:
        if not self._style.by_line:
            return lines
        time = b""
        if self._style.timestamps:
            time = datetime.now().isoformat(" ", "milliseconds").encode() + b" "
        start = time + self._label
        shown = (_last_state(line).rstrip(b"\r") for line in lines.split(b"\n"))
        return b"\n".join(start + line for line in shown)

    def _put(self, kind: Kind, data: bytes) -> None:
        self._show(kind, data)
        if self._log is not None:
            try:
                self._log.write(data)
                self._log.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._log.name) from error

    def _remember(self, data: bytes) -> None:
        *lines, self._last_unfinished = (self._last_unfinished + data).split(b"\n")
        self._last.extend(line[-_KEPT_BYTES:] for line in lines)
        # A line without an end may be as long as a file.
        self._last_unfinished = self._last_unfinished[-_KEPT_BYTES:]


def _last_state(line: bytes) -> bytes:
    """The line as a terminal shows it after the last carriage return of a progress bar."""
    state = line.rstrip(b"\r")
    return state.rpartition(b"\r")[2] + line[len(state) :]


def show(kind: Kind, data: bytes) -> None:
    """Write bytes to this process's standard output or error, unchanged."""
    file = 1 if kind is Kind.STDOUT else 2
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            select.select([], [file], [])


def _show_nothing(kind: Kind, data: bytes) -> None:
    """For a rank whose output is not shown."""


def make_room(folder: Path) -> None:
    """Create a folder for log files; move those of an earlier run to ``earlier-1``, ... below it.

    Raises:
        OSError: the folder cannot be created, or a file cannot be moved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if logs := list(folder.glob(_LOG.format("*"))):
        numbers = itertools.count(1)
        earlier = next(path for n in numbers if not (path := folder / f"earlier-{n}").exists())
        earlier.mkdir()
        for log in logs:
            log.rename(earlier / log.name)


def _log_file(folder: Path | None, rank: int) -> BinaryIO | None:
    return None if folder is None else (folder / _LOG.format(f"{rank:04}")).open("wb")


class Writer:
    """A thread that writes output in order. After an error it writes nothing more.

    It is a daemon thread, so a write that blocks for ever does not keep this process alive.

    Args:
        on_problem: called in the event loop when something cannot be written.
    """

    def __init__(self, on_problem: Callable[[], None]) -> None:
        self.problem: OSError | None = None
        self._on_problem = on_problem
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        threads.start("hvkit-output", self._run)

    async def do(self, work: Callable[[], None]) -> None:
        """Call ``work`` on the thread, after all earlier work, and wait for it."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._queue.put((work, loop, done))
        await done

    def close(self) -> None:
        """End the thread after all earlier work."""
        self._queue.put(None)

    def fail(self, problem: OSError) -> None:
        """Record that something cannot be written. Call this in the event loop."""
        if self.problem is None:
            self.problem = problem
            self._on_problem()

    def _run(self) -> None:
        while (wanted := self._queue.get()) is not None:
            work, loop, done = wanted
            try:
                if self.problem is None:
                    work()
            except OSError as problem:
                _call_in(loop, self.fail, problem)
            _call_in(loop, _finish, done)


def _call_in(
    loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object
) -> None:
    # The loop may have ended while a write was blocked.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, argument)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.set_result(None)
