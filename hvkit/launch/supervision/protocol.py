"""What supervisor and agents say to each other: frames of a kind, a length and bytes.

The supervisor speaks first, with a nonce. The agent answers with a HELLO that proves, by an HMAC
over the nonce, that it knows the key of this run.

Of output an agent sends no more than ``WINDOW`` bytes ahead of what the supervisor tells to have
taken: no more than the supervisor's kernel can hold while its process is stopped or its terminal.

Whether the other end of a connection is there: asked of the kernels, not of the processes.

A process that waits for a disk or for its core is alive, and its kernel says so. One that has ended
closes the connection. What is left is a host or a network that is gone.

All this holds while both ends have room for what is sent: a kernel that has none is asked more and
more rarely. So output is sent only as fast as it is taken, see :mod:`.protocol`.

An agent's connection to the supervisor.
"""

import contextlib
import hashlib
import hmac
import json
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

KEY_VARIABLE = "HVKIT_RUN_KEY"
"""Environment variable with the key of the run, in hexadecimal."""

SUPERVISOR_VARIABLE = "HVKIT_RUN"
"""Environment variable with what agents have to know: a :class:`Supervised` in JSON."""

NONCE_BYTES = 16
_HEADER = struct.Struct("!BI")
_NUMBER = struct.Struct("!I")
HEADER_BYTES = _HEADER.size
LONGEST_FRAME = 1 << 16
"""Bytes after the header; what is longer was not sent by an agent."""

LONGEST_HELLO = 1 << 12
"""Bytes; so much is read of who has not proved yet to be an agent."""

WINDOW = 1 << 16
"""Bytes of output, with headers, that may be under way."""

RECEIVE_BUFFER = 4 * WINDOW
"""Bytes to ask the supervisor's kernel for; it counts more than what was sent."""


class Kind(IntEnum):
    """What a frame is."""

    HELLO = 1
    """Of an agent: who it is, in JSON."""
    STDOUT = 2
    STDERR = 3
    ASKED = 4
    """Of an agent: it was told to end its command, by something else than the supervisor."""
    ENDED = 5
    """Of an agent: how its command ended, in JSON."""
    TAKEN = 6
    """Of the supervisor: a number of bytes of output that were taken."""
    SIGNAL = 7
    """Of the supervisor: the number of a signal for the command."""
    STOP = 8
    """Of the supervisor: end the command, within a number of milliseconds."""
    INTERRUPT = 9
    """Of the supervisor: send the command what Ctrl-C sends; a STOP follows if it does not end."""


@dataclass(frozen=True)
class Supervised:
    """What an agent is told in the environment.

    Attributes:
        host: the name of the supervisor's host.
        addresses: where the supervisor may be reached, in the order to try.
        port: its TCP port.
        lost_after: seconds without a sign of life after which the other host is given up; ``None``
            on one host.
        grace: seconds that a command has to end when its launcher asks for that.
        bind: whether each rank keeps to its share of the host's cores.
        variables: environment variables for the commands on the supervisor's host alone.
    """

    host: str
    addresses: tuple[str, ...]
    port: int
    lost_after: float | None
    grace: float
    bind: bool
    variables: Mapping[str, str]

    def to_json(self) -> str:
        """For ``SUPERVISOR_VARIABLE``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Supervised":
        """The contents of ``SUPERVISOR_VARIABLE``."""
        values = json.loads(text)
        return cls(**{**values, "addresses": tuple(values["addresses"])})


def frame(kind: Kind, payload: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return _HEADER.pack(kind, len(payload)) + payload


def header(data: bytes, longest: int = LONGEST_FRAME) -> tuple[Kind, int]:
    """Kind and length of the frame that begins with ``data``.

    Raises:
        ValueError: that is no header of ours.
    """
    kind, length = _HEADER.unpack(data)
    if length > longest:
        raise ValueError(f"a frame of {length} bytes")
    return Kind(kind), length


def packed(value: int) -> bytes:
    """A number as a payload."""
    return _NUMBER.pack(value)


def unpacked(payload: bytes) -> int:
    """The number that a payload is."""
    value: int = _NUMBER.unpack(payload)[0]
    return value


def proof(key: str, nonce: bytes) -> str:
    """What only who knows the key can answer to a nonce, in hexadecimal."""
    return hmac.new(bytes.fromhex(key), nonce, hashlib.sha256).hexdigest()


# In struct tcp_info of Linux: milliseconds since the last acknowledgement.
_TCP_INFO_BYTES = 60
_LAST_ACK = 56
# Linux allows 127 questions without an answer.
_QUESTIONS = 50


def keep_alive(connection: socket.socket, lost_after: float | None) -> None:
    """Have the kernel ask for answers, and break the connection after a time without any.

    Args:
        connection: a TCP connection.
        lost_after: seconds; ``None`` for a connection within this host.
    """
    if lost_after is None:
        return
    every = asked_every(lost_after)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, every),
        (socket.TCP_KEEPINTVL, every),
        (socket.TCP_KEEPCNT, max(1, round(lost_after / every) - 1)),
        # For what was sent and not acknowledged, in milliseconds.
        (socket.TCP_USER_TIMEOUT, round(lost_after * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def asked_every(lost_after: float) -> int:
    """Seconds between the questions."""
    return max(1, int(lost_after / _QUESTIONS))


def silent_for(connection: socket.socket) -> float:
    """Seconds since the other end's kernel last answered, on a connection that is kept alive."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    (milliseconds,) = struct.unpack_from("=I", info, _LAST_ACK)
    return float(milliseconds) / 1000


# Seconds for each address that the supervisor may have.
_CONNECT = 5.0


class ConnectionLost(Exception):
    """The supervisor has ended, or cannot be reached any more."""


class Connection:
    """Frames to and from the supervisor; several threads may send, one receives.

    Once the connection is lost, what is sent is dropped: whoever receives learns about it.
    """

    def __init__(self, to: socket.socket) -> None:
        self._socket = to
        self._sending = threading.Lock()
        self._room = threading.Condition()
        self._under_way = 0
        self._lost = False

    @classmethod
    def to_supervisor(cls, supervised: Supervised, key: str, rank: int) -> "Connection":
        """Connect to the first of the addresses that answers, and say which rank this is.

        Raises:
            OSError: none of them answers as a supervisor does.
        """
        errors = []
        for address in supervised.addresses:
            try:
                to = socket.create_connection((address, supervised.port), timeout=_CONNECT)
                nonce = _exactly(to, NONCE_BYTES)
            except (OSError, ConnectionLost) as error:
                errors.append(str(error) or "it did not answer")
                continue
            to.settimeout(None)
            keep_alive(to, supervised.lost_after)
            connection = cls(to)
            hello = {"rank": rank, "host": socket.gethostname()}
            hello["proof"] = proof(key, nonce)
            connection.send_json(Kind.HELLO, hello)
            return connection
        raise OSError("; ".join(errors))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame."""
        data = frame(kind, payload)
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_output(self, kind: Kind, payload: bytes) -> None:
        """Send a frame of what was printed; waits while the supervisor takes none."""
        size = HEADER_BYTES + len(payload)
        with self._room:
            self._room.wait_for(lambda: self._lost or self._under_way + size <= WINDOW)
            self._under_way += size
        self.send(kind, payload)

    def send_json(self, kind: Kind, values: Mapping[str, Any]) -> None:
        """Send a frame with JSON in it."""
        self.send(kind, json.dumps(values).encode())

    def receive(self) -> tuple[Kind, int]:
        """Wait for the next word of the supervisor, and the number that it has.

        Raises:
            ConnectionLost: there will be none.
        """
        try:
            while True:
                kind, length = header(_exactly(self._socket, HEADER_BYTES))
                number = unpacked(_exactly(self._socket, length))
                if kind is not Kind.TAKEN:
                    return kind, number
                with self._room:
                    self._under_way -= number
                    self._room.notify_all()
        except ConnectionLost:
            with self._room:
                self._lost = True
                self._room.notify_all()
            raise

    def finish(self) -> None:
        """Send nothing more. The supervisor then closes the connection.

        To close it here would throw away what is under way, if a word has come in meanwhile.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)


def _exactly(of: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        try:
            more = of.recv(count - len(data))
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not more:
            raise ConnectionLost("it closed the connection")
        data += more
    return data
