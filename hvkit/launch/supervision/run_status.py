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
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError
from hvkit.log import logger

_ANSWERS_WITHIN = 5.0


def folder() -> Path:
    """The folder with the sockets of this user's runs on this host, from whichever shell."""
    return Path("/tmp", f"hvkit-{os.getuid()}")


async def serve(state: Callable[[], dict[str, Any]]) -> None:
    """Answer until cancelled; a host without a place for the socket has a run without ``top``."""
    path = folder() / str(os.getpid())
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _require_own(path.parent)
        path.unlink(missing_ok=True)

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                writer.write(json.dumps(state()).encode())
                async with asyncio.timeout(_ANSWERS_WITHIN):
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            except (ConnectionError, TimeoutError):
                pass  # it does not read
            finally:
                writer.transport.abort()

        server = await asyncio.start_unix_server(answer, path)
    except (OSError, HvkitError) as error:
        logger.debug("hvkit top will not find this run: %s", error)
        return
    try:
        await asyncio.Event().wait()
    finally:
        server.close()
        path.unlink(missing_ok=True)


def running() -> list[int]:
    """The processes that answer, the newest first."""
    try:
        _require_own(folder())
        found = [each for each in folder().iterdir() if each.name.isdecimal()]
    except (OSError, HvkitError):
        return []
    begun = {}
    for each in found:
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            begun[each] = each.stat().st_mtime
    return [int(each.name) for each in sorted(begun, key=lambda e: -begun[e]) if _answers(each)]


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
    except ConnectionRefusedError:  # left by a run that was killed
        path.unlink(missing_ok=True)
        return False
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
