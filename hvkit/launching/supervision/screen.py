"""Standard output and error of this process: ranks' output, the launcher's, lines of ``hvkit run``.

A progress bar has no end of line until it is full. Meanwhile another rank, the launcher and
``hvkit run`` itself begin a new line for their output. Other output is written to files and pipes
byte for byte: it may be cut anywhere, and need not be text.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO

from hvkit import threads
from hvkit.launching.supervision.protocol import Frame

LAUNCHER_LOG = "launcher.log"  # name of the log file of the launcher's own output

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
        # By target: the writer of its unfinished line, the stream, whether it is a progress bar.
        self._open: dict[int, tuple[object, int, bool]] = {}

    def show(self, stream: Frame, data: bytes, writer: object = None) -> None:
        """Write bytes to a stream.

        The writer identifies the source. An unfinished line of another writer is ended before, on a
        terminal or if it is a progress bar. None is this process, which always begins a new line.
        """
        file = 1 if stream is Frame.STDOUT else 2
        target = self._target(file)
        with self._locks[target]:
            before = self._open.get(target)
            if before is not None and before[:2] != (writer, file):
                apart = writer is None or before[2] or os.isatty(file)
                if apart and not _DRAWS_OVER.match(data):
                    self._end_line(target)
                before = None
            _write(file, data)
            _, end_of_line, rest = data.rpartition(b"\n")
            if rest:
                in_bar = before is not None and before[2] and not end_of_line
                self._open[target] = (writer, file, in_bar or b"\r" in rest)
            elif data:
                self._open.pop(target, None)

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

    def _end_line(self, target: int) -> None:
        if target in self._open:
            _write(self._open.pop(target)[1], b"\n")

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


@dataclass
class LauncherOutput:
    """The launcher's own output, with what ssh and agents print, which it passes on.

    When a rank fails, mpirun describes that in ten lines, and ``hvkit run`` in one. So what arrives
    while the run ends is kept back, and shown only if the launcher is to blame. The log file has
    all.
    """

    write: Callable[..., None]  # calls what writes, in order with the output of ranks
    show: Callable[..., None]  # called with the stream, the bytes and the writer
    ends: Callable[[], bool]  # whether the run ends, so that further output is kept back
    log_dir: Path | None
    log: BinaryIO | None = None
    kept: list[tuple[Frame, bytes]] = field(default_factory=list)
    readers: list[threading.Thread] = field(default_factory=list)

    def read(self, stream: Frame, pipe: IO[bytes]) -> None:
        """Read a stream of the launcher to its end, in a thread."""
        self.readers.append(threads.start("hvkit-launcher-output", self._read, stream, pipe))

    def finish(self, seconds: float) -> None:
        """Wait for the end of both streams, for a limited time: ssh may keep them open."""
        deadline = time.monotonic() + seconds
        for reader in self.readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        if self.log is not None:
            self.write(self.log.close)

    def show_kept(self) -> None:
        """Show what was kept back: the launcher is to blame."""
        kept, self.kept = self.kept, []
        for each in kept:
            self.write(self.show, *each, "launcher")

    def _read(self, stream: Frame, pipe: IO[bytes]) -> None:
        with pipe:
            while data := os.read(pipe.fileno(), _READ):
                self.write(self._write_log, data)
                if not self.ends():
                    self.write(self.show, stream, data, "launcher")
                elif sum(len(each) for _, each in self.kept) < _KEPT:
                    self.kept.append((stream, data))

    def _write_log(self, data: bytes) -> None:
        if self.log_dir is None:
            return
        if self.log is None:
            self.log = (self.log_dir / LAUNCHER_LOG).open("wb")
        if not self.log.closed:  # by ``finish``
            write_log(self.log, data)


def write_log(log: BinaryIO, data: bytes) -> None:
    """Write to a log file, which an error names."""
    try:
        log.write(data)
        log.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, log.name) from error
