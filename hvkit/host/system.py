"""Short commands whose output is read, locks by name on this host, and the folder of hvkit's cache.

A lock's name is an abstract Unix socket: the kernel frees it with the process that holds it, also
if that is killed, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple


class Output(NamedTuple):
    """The exit status and output of a command; empty if it ran out of time."""

    status: int | None  # negative for a signal, None if it ran out of time
    stdout: str = ""
    stderr: str = ""

    @property
    def text(self) -> str:
        """Stdout, then stderr."""
        return f"{self.stdout}\n{self.stderr}".strip()


def run(
    command: Sequence[str], timeout: float | None = 10, environ: Mapping[str, str] | None = None
) -> Output | None:
    """Run a command without input; ``None`` if the program is missing or cannot be started."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Output(None)
    except OSError:
        return None
    return Output(done.returncode, done.stdout, done.stderr)


def program(name: str) -> str | None:
    """Path of a program on PATH, else in the folder of this Python; ``None`` if there is none."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))


_sockets: dict[str, socket.socket] = {}


def claim(name: str) -> bool:
    """Hold a name from now on; return False if another process of this user holds it.

    Processes see each other's names if they share the network and process namespaces, as in a
    container. Where sockets are forbidden, every claim succeeds.
    """
    if name in _sockets:
        return True
    with contextlib.suppress(OSError):
        numbering = os.readlink("/proc/self/ns/pid")
        full_name = f"{os.getuid()} {numbering} {name}"
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(f"\0hvkit-{hashlib.sha256(full_name.encode()).hexdigest()}")
        except OSError as error:
            bound.close()
            return error.errno != errno.EADDRINUSE
        _sockets[name] = bound
    return True


def _became_child() -> None:
    """Release names in a forked child, which may outlive the process that claimed them."""
    for bound in _sockets.values():
        bound.close()
    _sockets.clear()


os.register_at_fork(after_in_child=_became_child)


def cache_dir() -> Path:
    """Folder of hvkit's per-user cache; it need not exist yet.

    ``$HVKIT_CACHE_DIR`` if set, else ``$XDG_CACHE_HOME/hvkit``, else ``~/.cache/hvkit``.
    """
    if explicit := os.environ.get("HVKIT_CACHE_DIR"):
        return Path(explicit).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hvkit"
