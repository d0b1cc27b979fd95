"""Where the ranks' Gloo finds the others: a store of addresses that only these ranks can use.

Horovod's Gloo reads and writes the store by HTTP, without any proof of who it is. So each task
answers the HTTP of its own rank, on the loopback interface and for processes of its own user only,
and passes it on to the store in rank 0's task, over a connection on which both ends have proven
that they know a key (``hvkit.connections``)::

    rank ── HTTP, loopback ── Front ── TCP, authenticated ── Store, in rank 0's task
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from hvkit import threads
from hvkit.communication.encoding import decode, encode
from hvkit.connections import Connection, Listener, connect

_LOOPBACK = "127.0.0.1"


class Store:
    """Values by path, which ``Front`` reads and writes.

    Args:
        address: of this host, on which to listen.
        key: that both ends have to know.
    """

    def __init__(self, address: str, key: bytes) -> None:
        self._values: dict[str, bytes] = {}
        self._listener = Listener(address, key)
        self.port = self._listener.port
        threads.start("hvkit-store", self._listener.serve, self._serve)

    def close(self) -> None:
        """Admit nobody else."""
        self._listener.close()

    def _serve(self, connected: socket.socket) -> None:
        connection = Connection(connected)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            while True:
                method, path, value = decode(connection.receive()[1])
                if method == "PUT":
                    self._values[path] = value
                elif method == "DELETE":
                    self._values.pop(path, None)
                connection.send(0, encode(self._values.get(path)))


class Front:
    """Answers the HTTP of the ranks of this process.

    Args:
        place: address and port of the store.
        key: as for ``Store``.

    Raises:
        OSError: the store cannot be reached.
    """

    def __init__(self, place: tuple[str, int], key: bytes) -> None:
        address, port = place
        self._store = Connection(connect([address], port, key))
        self._one = threading.Lock()
        self._server = ThreadingHTTPServer((_LOOPBACK, 0), _handler_for(self))
        self.port: int = self._server.server_address[1]
        threads.start("hvkit-rendezvous", self._server.serve_forever)

    def close(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
        self._store.close()

    def request(self, method: str, path: str, value: bytes) -> bytes | None:
        """Pass a request on; the value of the path after it, None if there is none."""
        with self._one:
            self._store.send(0, encode((method, path, value)))
            found: bytes | None = decode(self._store.receive()[1])
            return found


def _handler_for(front: Front) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            if not _is_of_this_user(self.client_address[1], front.port):
                self.send_error(403)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = front.request(self.command, self.path, body)
            known = found is not None or self.command != "GET"
            self.send_response(200 if known else 404)
            content = found if found is not None and self.command == "GET" else b""
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing: Gloo asks a hundred times a second."""

    return Handler


def _is_of_this_user(port: int, server: int) -> bool:
    """Whether a connection from this port of the loopback interface belongs to this user.

    /proc/net/tcp has a line for each socket: its own address, the other one, and in the eighth
    field the number of its user.
    """
    wanted = _in_proc(port), _in_proc(server)
    fields = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return any((each[1], each[2]) == wanted and int(each[7]) == os.getuid() for each in fields)


def _in_proc(port: int) -> str:
    """A port of 127.0.0.1 as /proc/net/tcp writes it: the address in the host's byte order."""
    (number,) = struct.unpack("=I", socket.inet_aton(_LOOPBACK))
    return f"{number:08X}:{port:04X}"
