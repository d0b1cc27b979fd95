"""One run at a time saves in a directory."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from pathlib import Path

# Held until the process ends. A record lock belongs to the process: it goes with it, however it
# ends, and the processes that data loaders fork do not keep it.
_held: dict[Path, int] = {}

# File systems without locks; there, keeping two runs apart is the user's part.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def lock(directory: Path) -> None:
    """Take the directory for this process, until it ends; a second call does nothing.

    Raises:
        BlockingIOError: another process has it.
        OSError: the lock's file cannot be made.
    """
    path = directory.resolve() / ".lock"
    if path in _held and _is_open_as(path, _held[path]):
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 200).decode(errors="replace") or "another process"
        os.close(handle)
        if error.errno in _WITHOUT_LOCKS:
            return
        raise BlockingIOError(
            errno.EAGAIN,
            f"{owner} saves its checkpoints in this directory: give every run its own, or end "
            "the other one first",
            str(directory),
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[path] = handle


def _is_open_as(path: Path, handle: int) -> bool:
    """Not so when the directory was deleted and made again."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False
