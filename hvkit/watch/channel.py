"""Sockets between rank 0 and the other ranks, for a few small JSON messages.

MPI cannot carry them: it ends with the first rank, and Horovod over Gloo has none. Rank 0
broadcasts a secret over Horovod, and both ends of a connection prove that they hold it
(``hvkit.handshake``), so a stranger on the port can neither read nor send anything.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import socket
import struct
import termios
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from hvkit import handshake
from hvkit.host.network import addresses_for_others

PATIENCE = 5
"""Seconds for the rest of a message to arrive, and for a rank that ends at once to reach rank 0."""


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

    def to_json(self) -> str:
        """As rank 0 sends it to the others."""
        return json.dumps([self.addresses, self.port, self.secret.hex()])

    @classmethod
    def from_json(cls, text: str) -> Meeting:
        """The inverse of ``to_json``."""
        addresses, port, secret = json.loads(text)
        return cls(tuple(addresses), port, bytes.fromhex(secret))


class RankListener:
    """Rank 0's end: the port to which the other ranks connect.

    Args:
        one_host: whether all ranks are on this host; other hosts then cannot reach the port.
        patience: seconds for the rest of a message.
    """

    def __init__(self, *, one_host: bool, patience: int = PATIENCE) -> None:
        self._patience = patience
        secret = secrets.token_bytes(32)
        self._listener = handshake.Listener("127.0.0.1" if one_host else None, secret)
        addresses = ("127.0.0.1",) if one_host else addresses_for_others()
        self.meeting = Meeting(addresses, self._listener.port, secret)

    def serve(self, admit: Callable[[int, Connection], None]) -> None:
        """Until closed, call ``admit(rank, connection)`` for each rank that holds the secret.

        Each newcomer gets a thread of its own, which also calls ``admit``, so that a silent
        stranger delays nobody.
        """

        def introduce(connected: socket.socket) -> None:
            connection = _connection(connected, self._patience)
            try:
                rank = int(receive(connection)["rank"])
            except (OSError, EOFError, ValueError, KeyError, TypeError):
                connection.close()
                return
            admit(rank, connection)

        self._listener.serve(introduce)

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()


def connect(meeting: Meeting, rank: int, patience: int = PATIENCE) -> Connection | None:
    """Connect to rank 0; None if none of its addresses can be reached."""
    try:
        connected = handshake.connect(meeting.addresses, meeting.port, meeting.secret)
        connection = _connection(connected, patience)
        send(connection, {"rank": rank})
    except OSError:
        return None
    return connection


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


def is_acknowledged(connection: Connection) -> bool:
    """Whether the other end's host has everything that was sent, however busy its process is."""
    (left,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    return bool(left == 0)


def _connection(connected: socket.socket, patience: int) -> Connection:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience, 0))
    return Connection(connected.detach())
