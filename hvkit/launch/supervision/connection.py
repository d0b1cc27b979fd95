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
    """Frames to and from the supervisor; several threads may send.

    Once the connection is lost, what is sent is dropped: whoever receives learns about it.
    """

    def __init__(self, to: socket.socket) -> None:
        self._socket = to
        self._sending = threading.Lock()

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
        """Send a frame; waits while the supervisor is slow to read."""
        data = protocol.frame(kind, payload)
        with self._sending:
            try:
                self._socket.sendall(data)
            except OSError:
                return

    def send_json(self, kind: Kind, values: Mapping[str, Any]) -> None:
        """Send a frame with JSON in it."""
        self.send(kind, json.dumps(values).encode())

    def receive(self) -> Kind:
        """Wait for the next frame of the supervisor, which has no more than a kind.

        Raises:
            ConnectionLost: there will be none.
        """
        kind, _ = protocol.header(_exactly(self._socket, protocol.HEADER_BYTES))
        return kind

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
