"""Sockets between rank 0 and the other ranks, for a few small messages.

They are not MPI's: MPI ends when the first rank does, and Horovod's gloo has no MPI at all. Both
ends prove that they know a secret which rank 0 has broadcast over Horovod; strangers on the port
learn nothing and can send nothing. Messages are JSON.
"""

from __future__ import annotations

import json
import secrets
import socket
import struct
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from hvkit.launch.network import interfaces, within_host

# Seconds for one try to connect, and for the other end to prove itself.
_PATIENCE = 5.0


@dataclass(frozen=True)
class Meeting:
    """Where and how ranks reach rank 0's socket.

    Attributes:
        addresses: of rank 0's host, likely ones first.
        port: the same for all addresses.
        secret: what both ends have to know.
    """

    addresses: tuple[str, ...]
    port: int
    secret: bytes


class Listener:
    """Rank 0's end: a port at which the other ranks introduce themselves.

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
        port = self._socket.getsockname()[1]
        self.meeting = Meeting(addresses, port, secrets.token_bytes(32))

    def accept(self) -> tuple[int, Connection] | None:
        """The rank and the connection of the next that knows the secret; None once closed."""
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError:
                return None
            try:
                connection = _proven(accepted, self.meeting.secret, first=True)
                return int(receive(connection)["rank"]), connection
            except (OSError, EOFError, AuthenticationError, ValueError, KeyError, TypeError):
                continue  # a stranger; it has been hung up on

    def close(self) -> None:
        """Let nobody else in."""
        self._socket.close()


def connect(meeting: Meeting, rank: int) -> Connection | None:
    """Reach rank 0; None where no address of its host leads there."""
    for address in meeting.addresses:
        try:
            reached = socket.create_connection((address, meeting.port), timeout=_PATIENCE)
            connection = _proven(reached, meeting.secret, first=False)
            send(connection, {"rank": rank})
            return connection
        except (OSError, EOFError, AuthenticationError):
            continue  # the next address may lead there
    return None


def send(connection: Connection, message: dict[str, Any]) -> None:
    """Send one message.

    Raises:
        OSError: the other end has gone.
    """
    connection.send_bytes(json.dumps(message).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for one message.

    Raises:
        OSError, EOFError: the other end has gone.
        ValueError: it is no message.
    """
    message = json.loads(connection.recv_bytes(1 << 20))
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, got {type(message).__name__}")
    return message


def _proven(open_socket: socket.socket, secret: bytes, *, first: bool) -> Connection:
    """The socket as a connection whose other end knows the secret; closed if it does not."""
    open_socket.setblocking(True)
    open_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        open_socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_PATIENCE), 0))
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
    """Addresses at which other hosts may reach this one."""
    inside = set(within_host())
    usable = [each for each in interfaces() if not each.loopback and not each.link_local]
    usable.sort(key=lambda each: (each.name in inside, each.version))
    return tuple(each.address for each in usable) or ("127.0.0.1",)
