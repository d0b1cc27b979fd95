"""Sockets between rank 0 and the other ranks, and the few small messages that watchers send.

They cannot use MPI, which ends with the first rank, and which Horovod over Gloo does not have. Rank
0 broadcasts a secret over Horovod, and both ends of a connection prove that they have it
(``hvkit.connections``), so a stranger on the port can neither read nor send anything.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import socket
import struct
import termios
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, get_args

from hvkit import connections
from hvkit.host.network import addresses_for_others
from hvkit.watch.calls import Status

PATIENCE = 5
"""Seconds for the rest of a message, and for a rank that ends at once to reach rank 0."""


@dataclass(frozen=True)
class StatusRequest:
    """Rank 0 requests a rank's ``Status``, which is the answer."""


@dataclass(frozen=True)
class RankEnded:
    """Sent by the rank that has ended to rank 0, and by rank 0 to the others."""

    rank: int
    how: str  # ``has ended its script``, ``failed with ValueError: x``
    shown_by: int = 1  # the rank that prints this


@dataclass(frozen=True)
class EndRun:
    """Rank 0 ends the run."""

    diagnosis: str
    within: float  # seconds in which a rank has to end by itself


@dataclass(frozen=True)
class GotSigterm:
    """All ranks are to save a checkpoint and end."""


@dataclass(frozen=True)
class HoldStep:
    """From rank 0: stop at the end of the current step, and answer ``StepHeld``."""


@dataclass(frozen=True)
class StepHeld:
    """How many steps the sender has completed."""

    step: int


@dataclass(frozen=True)
class LeaveAt:
    """From rank 0: the last step; None if not all ranks have answered, so that all go on."""

    step: int | None


@dataclass(frozen=True)
class HostLost:
    """A rank's host is lost, so that no step will be completed any more."""


FromRank0 = StatusRequest | EndRun | HoldStep | LeaveAt | HostLost
Message = FromRank0 | RankEnded | Status | GotSigterm | StepHeld
_TYPES = {each.__name__: each for each in get_args(Message)}


class Endpoint(NamedTuple):
    """How ranks reach rank 0's socket."""

    addresses: Sequence[str]  # of rank 0's host, likely ones first
    port: int
    secret: str

    def to_json(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Endpoint:
        return cls(*json.loads(text))


class RankListener:
    """Rank 0's end: the port to which the other ranks connect."""

    def __init__(self, *, one_host: bool, patience: int = PATIENCE) -> None:
        self._patience = patience
        secret = secrets.token_hex(32)
        self._listener = connections.Listener("127.0.0.1" if one_host else None, secret.encode())
        addresses = ("127.0.0.1",) if one_host else addresses_for_others()
        self.endpoint = Endpoint(addresses, self._listener.port, secret)

    def serve(self, admit: Callable[[int, Connection], None]) -> None:
        """Until closed, call ``admit(rank, connection)``, in a thread, for each that connects."""

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
        self._listener.close()


def connect(endpoint: Endpoint, rank: int, patience: int = PATIENCE) -> Connection | None:
    """Connect to rank 0; None if none of its addresses can be reached."""
    try:
        key = endpoint.secret.encode()
        connected = connections.connect(endpoint.addresses, endpoint.port, key)
        connection = _connection(connected, patience)
        send(connection, {"rank": rank})
    except OSError:
        return None
    return connection


def send_message(connection: Connection, message: Message) -> None:
    send(connection, {"type": type(message).__name__, **asdict(message)})


def receive_message(connection: Connection) -> Message:
    """Wait for a message; raises OSError or EOFError if the other end is gone, else ValueError."""
    values = receive(connection)
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}
    try:
        message: Message = _TYPES[values.pop("type")](**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"no message of a watcher: {error}") from None
    return message


def send(connection: Connection, values: dict[str, Any]) -> None:
    """Send a JSON object."""
    connection.send_bytes(json.dumps(values).encode())


def receive(connection: Connection) -> dict[str, Any]:
    """Wait for a JSON object."""
    values = json.loads(connection.recv_bytes(1 << 20))
    if not isinstance(values, dict):
        raise ValueError(f"a message must be an object, got {type(values).__name__}")
    return values


def is_acknowledged(connection: Connection) -> bool:
    """Whether the other host has acknowledged everything that was sent, read or not."""
    (left,) = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))
    return bool(left == 0)


def _connection(connected: socket.socket, patience: int) -> Connection:
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", patience, 0))
    return Connection(connected.detach())
