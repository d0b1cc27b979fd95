"""An agent's connection to the supervisor."""

import contextlib
import json
import socket
import threading
from collections.abc import Mapping
from typing import Any

from hvkit.launch.supervision import protocol
from hvkit.launch.supervision.liveness import keep_alive
from hvkit.launch.supervision.protocol import Kind, Supervised

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
                nonce = _exactly(to, protocol.NONCE_BYTES)
            except (OSError, ConnectionLost) as error:
                errors.append(str(error) or "it did not answer")
                continue
            to.settimeout(None)
            keep_alive(to, supervised.lost_after)
            connection = cls(to)
            hello = {"rank": rank, "host": socket.gethostname()}
            hello["proof"] = protocol.proof(key, nonce)
            connection.send_json(Kind.HELLO, hello)
            return connection
        raise OSError("; ".join(errors))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a frame."""
        data = protocol.frame(kind, payload)
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_output(self, kind: Kind, payload: bytes) -> None:
        """Send a frame of what was printed; waits while the supervisor takes none."""
        size = protocol.HEADER_BYTES + len(payload)
        with self._room:
            self._room.wait_for(lambda: self._lost or self._under_way + size <= protocol.WINDOW)
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
                kind, length = protocol.header(_exactly(self._socket, protocol.HEADER_BYTES))
                number = protocol.unpacked(_exactly(self._socket, length))
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
