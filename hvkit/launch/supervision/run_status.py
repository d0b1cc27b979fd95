"""What ``hvkit top`` shows of a running ``hvkit run``: a Unix socket with the newest state.

The socket is ``PID`` in a folder that only this user can enter. Whoever connects gets the state as
JSON, and the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError
from hvkit.log import logger

_ANSWERS_WITHIN = 5.0


def folder() -> Path:
    """The folder with the sockets of this user's runs on this host."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (
        Path(runtime, "hvkit") if runtime else Path(tempfile.gettempdir(), f"hvkit-{os.getuid()}")
    )


async def serve(state: Callable[[], dict[str, Any]]) -> None:
    """Answer until cancelled; a host without a place for the socket has a run without ``top``."""
    path = folder() / str(os.getpid())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(path.parent)
        path.unlink(missing_ok=True)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(json.dumps(state()).encode())
                await writer.drain()
            writer.close()

        server = await asyncio.start_unix_server(answer, path)
    except (OSError, HvkitError) as error:
        logger.debug("hvkit top will not find this run: %s", error)
        return
    try:
        async with server:
            await server.serve_forever()
    finally:
        path.unlink(missing_ok=True)


def running() -> list[int]:
    """The processes that answer, the newest first."""
    try:
        names = sorted(folder().iterdir(), key=lambda each: -each.stat().st_mtime)
    except OSError:
        return []
    return [int(each.name) for each in names if each.name.isdecimal() and _answers(each)]


def read(process: int) -> dict[str, Any]:
    """The state of a run.

    Args:
        process: the id of its ``hvkit run``.

    Raises:
        HvkitError: it has ended, or belongs to another user.
    """
    path = folder() / str(process)
    try:
        _require_own(path.parent)
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWERS_WITHIN)
            connection.connect(str(path))
            answer = b""
            while more := connection.recv(1 << 16):
                answer += more
        state = json.loads(answer)
    except (OSError, ValueError) as error:
        raise HvkitError(
            f"no `hvkit run` of yours with process id {process} answers on this host ({error}): "
            "name another one, or none to see the newest"
        ) from None
    if not isinstance(state, dict):
        raise HvkitError(f"process {process} answers with something else than a run's state")
    return state


def _answers(path: Path) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWERS_WITHIN)
            connection.connect(str(path))
    except OSError:
        return False
    return True


def _require_own(path: Path) -> None:
    """Refuse a folder that someone else has made under that name.

    Raises:
        HvkitError: it is no folder of this user's alone.
        OSError: there is none.
    """
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise HvkitError(f"{path} must be a folder of this user's that nobody else can enter")
