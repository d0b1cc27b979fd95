"""Sockets between rank 0 and the other ranks, for a few small JSON messages.

MPI cannot carry them: it ends with the first rank, and Horovod over Gloo has none. Rank 0
broadcasts a secret over Horovod, and both ends of a connection prove that they hold it, so a
stranger on the port can neither read nor send anything.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from hvkit.host.network import interfaces, within_host

PATIENCE = 5.0
"""Seconds for an attempt to connect, and for the other end to authenticate itself."""

# Seconds between attempts to accept a connection.
_PAUSE = 0.5


@dataclass(frozen=True)
class Meeting:
    """How ranks reach rank 0's socket.

    Attributes:
        addresses: those of rank 0's host, likely ones first.
        port: the same for all addresses.
        secret: the key that both ends must hold.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes


class Listener:
    """Rank 0's end: the port to which the other ranks connect.

    Args:
        one_host: whether all ranks are on this host; other hosts then cannot reach the port.
    """

    def __init__(self, *, one_host: bool) -> None:
        if one_host:
            addresses: tuple[str, ...] = ("127.0.0.1",)
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        else:
            addresses = _addresses()
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            self._socket = socket.create_server(
                ("", 0), family=family, backlog=1024, dualstack_ipv6=dual
            )
        self._closed = threading.Event()
        port = self._socket.getsockname()[1]
        self.meeting = Meeting(addresses, port, secrets.token_bytes(32))

    def serve(self, admit: Callable[[int, Connection], None]) -> None:
        """Until closed, call ``admit(rank, connection)`` for each rank that holds the secret.

        Each newcomer gets a thread of its own, which also calls ``admit``, so that a silent
        stranger delays nobody.
        """
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                if self._closed.wait(_PAUSE):
                    return
                continue  # for instance, this process has too many open files
            arguments = (accepted, self.meeting.secret, admit)
            threading.Thread(target=_receive_newcomer, args=arguments, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        with contextlib.suppress(OSError):  # closed before
            self._socket.shutdown(socket.SHUT_RDWR)  # ends a wait in accept; close does not
        self._socket.close()


def connect(meeting: Meeting, rank: int) -> Connection | None:
    """Connect to rank 0; None if none of its addresses can be reached."""
    for address in meeting.addresses:
        try:
            reached = socket.create_connection((address, meeting.port), timeout=PATIENCE)
            connection = _proven(reached, meeting.secret, first=False)
            send(connection, {"rank": rank})
            return connection
        except (OSError, EOFError, AuthenticationError):
            continue  # try the next address
    return None


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the other end is gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        OSError, EOFError: the other end is gone.
        ValueError: it sent something else.
    """
    message = json.loads(connection.recv_bytes(1 << 20))
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, got {type(message).__name__}")
    return message


def _receive_newcomer(
    accepted: socket.socket, secret: bytes, admit: Callable[[int, Connection], None]
) -> None:
    try:
        connection = _proven(accepted, secret, first=True)
        rank = int(receive(connection)["rank"])
    except (OSError, EOFError, AuthenticationError, ValueError, KeyError, TypeError):
        return  # a stranger, whose connection is closed
    admit(rank, connection)


def _proven(open_socket: socket.socket, secret: bytes, *, first: bool) -> Connection:
    """The socket as a connection whose other end holds the secret; closed if it does not."""
    open_socket.setblocking(True)
    open_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        open_socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(PATIENCE), 0))
    connection = Connection(open_socket.detach())
    try:
        steps = [deliver_challenge, answer_challenge]
        for step in steps if first else steps[::-1]:
            step(connection, secret)
    except BaseException:
        connection.close()
        raise
    return connection


def _addresses() -> tuple[str, ...]:
    """This host's addresses that other hosts may reach, likely ones first."""
    inside = set(within_host())
    usable = [each for each in interfaces() if not each.loopback and not each.link_local]
    usable.sort(key=lambda each: (each.name in inside, each.version))
    return tuple(each.address for each in usable) or ("127.0.0.1",)
