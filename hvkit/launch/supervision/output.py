"""What ranks print: shown here, written to log files, and the last lines kept for a report.

A ``RankOutput`` turns the bytes of one rank into whole lines and whole tracebacks. The one
``Writer`` of a run does the writing on a thread of its own, so that a slow terminal blocks the
ranks that print and nothing else.
"""

import asyncio
import contextlib
import itertools
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from hvkit import threads
from hvkit.launch.supervision.last_lines import LastLines, last_state
from hvkit.launch.supervision.protocol import Kind
from hvkit.launch.supervision.tracebacks import (
    beginning,
    interrupted_at,
    is_of_traceback,
    separated,
    starts_a_line,
)
from hvkit.wording import interrupted

# Bytes: a longer line is shown in parts, and with more a traceback is not held back.
_LONGEST_LINE = 1 << 16
# Seconds to hold a traceback back, and what follows it: a rank that ends with it gets it into the
# report, once.
_HELD = 5.0

_LOG = "rank-{}.log"
LAUNCHER_LOG = "launcher.log"
"""Name of the log file with what the launcher itself prints."""

_Work = tuple[Callable[[], None], asyncio.AbstractEventLoop, "asyncio.Future[None]"]


@dataclass(frozen=True)
class Style:
    """How to show output.

    Attributes:
        prefix: whether lines begin with rank and host.
        timestamps: whether lines begin with the time at which they arrived here.
        log_dir: folder for one log file per rank, and one of the launcher, see ``make_room``;
            ``None`` for none.
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

    A traceback, with all that follows, is held back for some seconds: if the rank ends with it,
    the report of the run's failure shows it, or ``close`` does.

    Args:
        rank: its number.
        host: where it runs.
        style: how to show its output.
        show: called with the stream and the bytes to show.

    Raises:
        OSError: the log file cannot be opened.
    """

    def __init__(self, rank: int, host: str, style: Style, show: Callable[[Kind, bytes], None]):
        self._rank = rank
        self._label = f"[{rank} {host}] ".encode() if style.prefix else b""
        self._style = style
        self._show = show if style.shows(rank) else _show_nothing
        self._log = _log_file(style.log_dir, rank)
        self._unfinished = {Kind.STDOUT: b"", Kind.STDERR: b""}
        self._last = LastLines()
        # The streams whose unfinished line has been shown.
        self._begun: set[Kind] = set()
        # What is held back: the output as it came, and as it is shown.
        self._held: list[tuple[Kind, bytes, bytes]] = []
        self._held_since = 0.0

    def write(self, kind: Kind, data: bytes) -> None:
        """Show the lines that ``data`` completes, and keep the rest."""
        self._last.add(data)
        if kind in self._begun and not self._unfinished[kind] and starts_a_line(data):
            data = b"\n" + data
        lines, end, rest = separated(self._unfinished[kind] + data).rpartition(b"\n")
        if end:
            self._take(kind, lines + end)
            self._begun.discard(kind)
        if self._style.by_line:
            rest = last_state(rest)
        if len(rest) > _LONGEST_LINE:
            self._put(kind, rest, b"\n" if self._style.by_line else b"")
            rest = b""
        self._unfinished[kind] = rest
        if sum(len(raw) for _, raw, _ in self._held) > _LONGEST_LINE:
            self._release()

    def flush(self) -> None:
        """Show unfinished lines, unless lines must be shown whole, and what was held too long."""
        if self._held and time.monotonic() - self._held_since > _HELD:
            self._release()
        if not self._style.by_line:
            self._show_unfinished()

    def close(self, *, drop: bool = False) -> None:
        """Show unfinished lines and what is held back, and close the log file.

        Args:
            drop: whether to show no traceback that is held back: a report has it.
        """
        self._show_unfinished(b"\n" if self._style.by_line else b"")
        if drop:
            self._held = []
        self._release()
        if self._log is not None:
            self._log.close()
            self._log = None

    def close_interrupted(self) -> None:
        """As ``close``, after Ctrl-C: one line stands for the tracebacks that it has left."""
        where = interrupted_at(self._held_lines())
        if where is None:
            self.close()
            return
        held = self._held
        self.close(drop=True)
        for kind, raw, shown in held:
            for line, as_shown in zip(raw.split(b"\n"), shown.split(b"\n"), strict=True):
                if not is_of_traceback(line.decode(errors="replace")):
                    self._show(kind, as_shown + b"\n")
        said = f"hvkit: {interrupted(self._rank, where)}"
        if not any(line.startswith(said.partition(" (")[0]) for line in self._last.all()):
            self._show(Kind.STDERR, self._decorated(said.encode()) + b"\n")

    def last_lines(self) -> list[str]:
        """The last lines of both streams that say why the rank ends: a traceback is whole."""
        return [line for line in self._held_lines() if line] or self._last.telling()

    def all_last_lines(self) -> list[str]:
        """The last lines of both streams in the order in which they came, without empty ones."""
        return self._last.all()

    def _held_lines(self) -> list[str]:
        """The lines that are held back, beginning with a traceback."""
        if not self._held:
            return []
        came = b"".join([*(raw for _, raw, _ in self._held), *self._unfinished.values()])
        return [line.rstrip() for line in came.decode(errors="replace").split("\n")]

    def _take(self, kind: Kind, lines: bytes) -> None:
        """Show whole lines, or hold them back from the beginning of a traceback on."""
        begins = None if self._held else beginning(lines)
        if begins is None:
            self._put(kind, lines)
            return
        if begins:
            self._put(kind, lines[:begins])
        self._held_since = time.monotonic()
        self._put(kind, lines[begins:], hold=True)

    def _show_unfinished(self, end: bytes = b"") -> None:
        for kind, rest in self._unfinished.items():
            if rest:
                self._put(kind, rest, end)
                self._unfinished[kind] = b""
                self._begun.add(kind)

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

    def _put(self, kind: Kind, raw: bytes, end: bytes = b"", *, hold: bool = False) -> None:
        data = self._decorated(raw) + end
        if self._held or hold:
            self._held.append((kind, raw + end, data))
        else:
            self._show(kind, data)
        if self._log is not None:
            try:
                self._log.write(data)
                self._log.flush()
            except OSError as error:
                raise OSError(error.errno, error.strerror, self._log.name) from error

    def _release(self) -> None:
        held, self._held = self._held, []
        for kind, _, shown in held:
            self._show(kind, shown)


def _show_nothing(kind: Kind, data: bytes) -> None:
    """For a rank whose output is not shown."""


def make_room(folder: Path) -> None:
    """Create a folder for log files; move those of an earlier run to ``earlier-1``, ... below it.

    Raises:
        OSError: the folder cannot be created, or a file cannot be moved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if logs := [*folder.glob(_LOG.format("*")), *folder.glob(LAUNCHER_LOG)]:
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
