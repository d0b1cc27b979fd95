"""Shows the launcher's own output, with that of ssh and agents that it passes on, except at the
end.

When a rank fails, mpirun describes that in ten lines, and ``hvkit run`` in one. So what arrives
while the run ends is kept back, and shown only if the launcher is to blame. The log file has all.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from hvkit.launching.supervision.protocol import Kind
from hvkit.launching.supervision.rank_output import LAUNCHER_LOG, OutputWriter

_READ = 1 << 16
# Bytes of output that are kept back.
_KEPT = 1 << 16

_NAME = "launcher"


class LauncherOutput:
    """Reads both streams of the launcher.

    Args:
        writer: writes in order with the output of ranks.
        show: called with the stream, the bytes and ``writer="launcher"``.
        ends: returns whether the run is ending, so that further output is kept back.
        log_dir: folder for a log file; None for none.
    """

    def __init__(
        self,
        writer: OutputWriter,
        show: Callable[..., None],
        ends: Callable[[], bool],
        log_dir: Path | None,
    ) -> None:
        self._writer = writer
        self._show = functools.partial(show, writer=_NAME)
        self._ends = ends
        self._log_dir = log_dir
        self._log: BinaryIO | None = None
        self._kept: list[tuple[Kind, bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pipes: list[asyncio.ReadTransport] = []

    async def pipe(self, kind: Kind) -> int:
        """Read from a new pipe; return its other end, for the launcher, which the caller closes."""
        reader, writer = os.pipe()
        stream = asyncio.StreamReader()
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(reader, "rb")
        )
        self._pipes.append(pipe)
        self._tasks.append(asyncio.create_task(self._read(kind, stream)))
        return writer

    async def finish(self, seconds: float) -> None:
        """Wait for the end of both streams, for a limited time: ssh may keep them open."""
        await asyncio.wait(self._tasks, timeout=seconds)
        for task in self._tasks:
            task.cancel()
        for pipe in self._pipes:
            pipe.close()
        if self._log is not None:
            self._log.close()

    async def show_kept(self) -> None:
        """Show what was kept back: the launcher is to blame."""
        kept, self._kept = self._kept, []
        for kind, data in kept:
            await self._writer.do(functools.partial(self._show, kind, data))

    async def _read(self, kind: Kind, stream: asyncio.StreamReader) -> None:
        while data := await stream.read(_READ):
            await self._writer.do(functools.partial(self._write_log, data))
            if not self._ends():
                await self._writer.do(functools.partial(self._show, kind, data))
            elif sum(len(each) for _, each in self._kept) < _KEPT:
                self._kept.append((kind, data))

    def _write_log(self, data: bytes) -> None:
        if self._log_dir is None:
            return
        if self._log is None:
            self._log = (self._log_dir / LAUNCHER_LOG).open("wb")
        try:
            self._log.write(data)
            self._log.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._log.name) from error
