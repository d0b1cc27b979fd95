"""Locks by name on this host, which a process holds until it ends or is killed.

A name is an abstract Unix socket: the kernel frees it with the process, and leaves no file behind.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket

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
        own = f"{os.getuid()} {numbering} {name}"
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            bound.bind(f"\0hvkit-{hashlib.sha256(own.encode()).hexdigest()}")
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
