"""Standard output and error of this process: ranks' output, the launcher's, lines of ``hvkit run``.

A progress bar has no end of line until it is full. Meanwhile another rank, the launcher and
``hvkit run`` itself begin a new line for their output. Other output is written to files and pipes
byte for byte: it may be cut anywhere, and need not be text.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, BinaryIO

from hvkit import threads
from hvkit.launching.supervision.protocol import Frame

LAUNCHER_LOG = "launcher.log"
"""Name of the log file of the launcher's own output."""

# Progress bars begin so, to draw over what is there.
_DRAWS_OVER = re.compile(rb"[\b]*\r")
_FAILURE = "\x1b[1;31m{}\x1b[0m"
# Bytes of the launcher's output that are read at once, and that are kept back.
_READ = _KEPT = 1 << 16


class Screen:
    """Standard output and error of this process; several threads may write."""

    def __init__(self) -> None:
        # On a terminal, and with `2>&1`, both streams are one target: a line that one leaves
        # unfinished is there for the other, too.
        self._one = _same_file(1, 2)
        self._locks = {1: threading.Lock(), 2: threading.Lock()}
        # By target: the writer of its unfinished line, and the stream.
        self._open: dict[int, tuple[object, int]] = {}
        # Of these, targets where what is unfinished is a progress bar.
        self._bars: set[int] = set()

    def show(self, stream: Frame, data: bytes, writer: object = None) -> None:
        """Write bytes to a stream.

        The writer identifies the source. An unfinished line of another writer is ended before, on a
        terminal or if it is a progress bar. None is this process, which always begins a new line.
        """
        file = 1 if stream is Frame.STDOUT else 2
        target = self._target(file)
        with self._locks[target]:
            of_another = self._open.get(target) not in (None, (writer, file))
            if of_another and self._stands_apart(target, file, writer, data):
                self._end_line(target)
            _write(file, data)
            if data:
                self._note_end(target, (writer, file), data)

    def end_line(self) -> None:
        """Begin a line of this process's own on standard error."""
        target = self._target(2)
        with self._locks[target]:
            self._end_line(target)

    def say(self, text: str, *, failed: bool = False) -> None:
        """Write lines to standard error; on a terminal, a failure's first line is in colour."""
        first, *rest = text.split("\n")
        lines = [_FAILURE.format(first) if failed and in_colour() else first, *rest]
        with contextlib.suppress(BrokenPipeError):
            self.show(Frame.STDERR, "".join(f"{line}\n" for line in lines).encode())

    def _stands_apart(self, target: int, file: int, writer: object, data: bytes) -> bool:
        """Whether data begins a new line after the unfinished line of another writer."""
        apart = writer is None or target in self._bars or os.isatty(file)
        return apart and not _DRAWS_OVER.match(data)

    def _note_end(self, target: int, whose: tuple[object, int], data: bytes) -> None:
        """Note what the written bytes have left unfinished."""
        _, end_of_line, rest = data.rpartition(b"\n")
        if end_of_line or self._open.get(target) != whose:
            self._open.pop(target, None)
            self._bars.discard(target)
        if rest:
            self._open[target] = whose
            if b"\r" in rest:
                self._bars.add(target)

    def _end_line(self, target: int) -> None:
        if target in self._open:
            _write(self._open.pop(target)[1], b"\n")
            self._bars.discard(target)

    def _target(self, file: int) -> int:
        return 1 if self._one else file


def in_colour() -> bool:
    """Whether standard error takes colours: a terminal, unless NO_COLOR or FORCE_COLOR is set."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and sys.stderr is not None and sys.stderr.isatty()


def _same_file(one: int, other: int) -> bool:
    try:
        return os.path.samestat(os.fstat(one), os.fstat(other))
    except OSError:  # this process was started without one of them
        return False


def _write(file: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(file, data) :]
        except BlockingIOError:
            select.select([], [file], [])


class LauncherOutput:
    """The launcher's own output, with what ssh and agents print, which it passes on.

    When a rank fails, mpirun describes that in ten lines, and ``hvkit run`` in one. So what arrives
    while the run ends is kept back, and shown only if the launcher is to blame. The log file has
    all.
    """

    def __init__(
        self,
        write: Callable[..., None],
        show: Callable[..., None],
        ends: Callable[[], bool],
        log_dir: Path | None,
    ) -> None:
        self._write = write
        self._show = functools.partial(show, writer="launcher")
        self._ends = ends
        self._log_dir = log_dir
        self._log: BinaryIO | None = None
        self._kept: list[tuple[Frame, bytes]] = []
        self._readers: list[threading.Thread] = []

    def read(self, stream: Frame, pipe: IO[bytes]) -> None:
        """Read a stream of the launcher to its end, in a thread."""
        self._readers.append(threads.start("hvkit-launcher-output", self._read, stream, pipe))

    def finish(self, seconds: float) -> None:
        """Wait for the end of both streams, for a limited time: ssh may keep them open."""
        deadline = time.monotonic() + seconds
        for reader in self._readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if self._log is not None:
            self._write(self._log.close)

    def show_kept(self) -> None:
        """Show what was kept back: the launcher is to blame."""
        kept, self._kept = self._kept, []
        for each in kept:
            self._write(self._show, *each)

    def _read(self, stream: Frame, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _READ):
                self._write(self._write_log, data)
                if not self._ends():
                    self._write(self._show, stream, data)
                elif sum(len(each) for _, each in self._kept) < _KEPT:
                    self._kept.append((stream, data))

    def _write_log(self, data: bytes) -> None:
        if self._log_dir is None:
            return
        if self._log is None:
            self._log = (self._log_dir / LAUNCHER_LOG).open("wb")
        if not self._log.closed:  # by ``finish``
            write_log(self._log, data)


def write_log(log: BinaryIO, data: bytes) -> None:
    """Write to a log file, which an error names."""
    try:
        log.write(data)
        log.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, log.name) from error
