"""What ranks print, on its way to the terminal and into files.

Writes what ranks print, apart from everything else.
"""

import asyncio
import contextlib
import itertools
import os
import queue
import select
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hvkit.launch.supervision.protocol import Kind

LAST_LINES = 20
"""How many of a rank's last lines are kept for the report of a failure."""

_LONGEST_LINE = 1 << 16
"""Bytes; what is longer without an end is shown as if it had one."""

_LOG = "rank-{}.log"

# Of what is kept of a line: one without an end may be as long as a file.
_KEPT_BYTES = 2000


@dataclass(frozen=True)
class Style:
    """How output is shown.

    Attributes:
        prefix: whether lines begin with rank and host.
        timestamps: whether lines begin with the time at which they arrived here.
        log_dir: folder for a file of each rank's output, see :func:`make_room`; ``None`` for none.
        ranks: the ranks whose output is shown; ``None`` for all. What the others print goes to
            their log files, and the last of it into the report of a failure.
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
        """Whether lines have to be shown as a whole."""
        return self.prefix or self.timestamps


class RankOutput:
    """The output of one rank, shown in whole lines, so that those of ranks do not mix.

    A line that goes on for long, as a progress bar does, is shown as far as it has come. Both
    streams go to the same log file; each goes to its own stream here.
    """

    def __init__(self, rank: int, host: str, style: Style, show: Callable[[Kind, bytes], None]):
        self._label = f"[{rank} {host}] ".encode() if style.prefix else b""
        self._style = style
        self._show = show if style.shows(rank) else _leave_out
        self._log = _log_file(style.log_dir, rank)
        self._begun = {Kind.STDOUT: b"", Kind.STDERR: b""}
        self._last: deque[bytes] = deque(maxlen=LAST_LINES)
        self._unended = b""

    def write(self, kind: Kind, data: bytes) -> None:
        """Show and keep what the rank has printed."""
        self._remember(data)
        lines, end, begun = (self._begun[kind] + data).rpartition(b"\n")
        if end:
            self._put(kind, self._decorated(lines) + end)
        if self._style.by_line:
            begun = _last_state(begun)
        if len(begun) > _LONGEST_LINE:
            self._put(kind, self._decorated(begun) + (b"\n" if self._style.by_line else b""))
            begun = b""
        self._begun[kind] = begun

    def flush(self) -> None:
        """Show lines that were begun, where lines are shown as they are."""
        if not self._style.by_line:
            self._show_begun()

    def close(self) -> None:
        """Show what was begun, and close the log file."""
        self._show_begun(b"\n" if self._style.by_line else b"")
        if self._log is not None:
            self._log.close()
            self._log = None

    def last_lines(self) -> list[str]:
        """The last lines of both streams, in the order in which they came, without empty ends."""
        lines = [*self._last, self._unended]
        return [line.decode(errors="replace").rstrip() for line in lines if line.strip()]

    def _show_begun(self, end: bytes = b"") -> None:
        for kind, begun in self._begun.items():
            if begun:
                self._put(kind, self._decorated(begun) + end)
                self._begun[kind] = b""

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
        *lines, self._unended = (self._unended + data).split(b"\n")
        self._last.extend(line[-_KEPT_BYTES:] for line in lines)
        self._unended = self._unended[-_KEPT_BYTES:]


def _last_state(line: bytes) -> bytes:
    """What is left of a line in which a progress bar went back to the start again and again."""
    state = line.rstrip(b"\r")
    return state.rpartition(b"\r")[2] + line[len(state) :]


def show(kind: Kind, data: bytes) -> None:
    """Write bytes to this process's standard output or error, as they are."""
    file = 1 if kind is Kind.STDOUT else 2
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            select.select([], [file], [])


def _leave_out(kind: Kind, data: bytes) -> None:
    """Show nothing of a rank."""


def make_room(folder: Path) -> None:
    """Make a folder for log files. What an earlier run has left there moves to ``earlier-1``, ...

    Raises:
        OSError: that cannot be done.
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


_Work = tuple[Callable[[], None], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Writer:
    """A thread that writes, so that a slow terminal holds up its ranks and nothing else.

    A daemon: one that takes nothing any more does not hold up the end of this process.

    Args:
        on_problem: called in the event loop when something cannot be written.
    """

    def __init__(self, on_problem: Callable[[], None]) -> None:
        self.problem: OSError | None = None
        self._on_problem = on_problem
        self._waiting: queue.SimpleQueue[_Work] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def do(self, work: Callable[[], None]) -> None:
        """Do it after all that was asked for before; nothing more is done after a problem."""
        loop = asyncio.get_running_loop()
        done = loop.create_future()
        self._waiting.put((work, loop, done))
        await done

    def fail(self, problem: OSError) -> None:
        """Note that something cannot be written; in the event loop."""
        if self.problem is None:
            self.problem = problem
            self._on_problem()

    def _run(self) -> None:
        while True:
            work, loop, done = self._waiting.get()
            try:
                if self.problem is None:
                    work()
            except OSError as problem:
                self._tell(loop, self.fail, problem)
            self._tell(loop, _finish, done)

    def _tell(
        self, loop: asyncio.AbstractEventLoop, what: Callable[..., None], about: object
    ) -> None:
        # The loop may have ended while this thread was in a write that took long.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(what, about)


def _finish(done: "asyncio.Future[None]") -> None:
    if not done.cancelled():
        done.set_result(None)
