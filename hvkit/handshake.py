"""TCP connections whose two ends prove to each other that they know the same key.

``hvkit run`` and its agents connect this way. The proof is the challenge of
``multiprocessing.connection``, once in each direction: an HMAC over random bytes, so the key
itself never travels. Python 3.11 uses MD5, which newer versions accept from it and which is still
safe in an HMAC; two newer ones agree on SHA-256. What follows the proof is not encrypted.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import answer_challenge, deliver_challenge
from typing import Any

from hvkit import threads

# Seconds to open a TCP connection to one address, and for both ends to prove themselves after that.
_REACH = 5.0
_PROVE = 10.0
# Seconds before the next accept when one has failed.
_PAUSE = 0.5

# multiprocessing sends the length of a short message before it in this form.
_LENGTH = struct.Struct("!i")


class Listener:
    """A TCP port, any free one, at which only those who know the key are admitted.

    Args:
        address: the only address to listen on; ``None`` for all, IPv4 and IPv6.
        key: the key, any bytes.
    """

    def __init__(self, address: str | None, key: bytes) -> None:
        everywhere = address is None and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if everywhere or ":" in (address or "") else socket.AF_INET
        self.socket = socket.create_server(
            (address or "", 0), family=family, backlog=1024, dualstack_ipv6=everywhere
        )
        self.port: int = self.socket.getsockname()[1]
        self._key = key
        self._closed = threading.Event()

    def serve(self, admit: Callable[[socket.socket], None]) -> None:
        """Call ``admit(connection)`` for everyone who knows the key, until ``close``.

        Each newcomer has a thread of its own, which also calls ``admit``: a stranger who stays
        silent delays nobody.
        """
        while True:
            try:
                accepted, _ = self.socket.accept()
            except OSError:
                if self._closed.wait(_PAUSE):
                    return
                continue  # For instance, this process has too many open files.
            threads.start("hvkit-door", self._examine, accepted, admit)

    def close(self) -> None:
        """Admit nobody else; connections that were admitted stay open."""
        self._closed.set()
        with contextlib.suppress(OSError):  # It was closed before.
            self.socket.shutdown(socket.SHUT_RDWR)  # Unlike close, this wakes up accept.
        self.socket.close()

    def _examine(self, newcomer: socket.socket, admit: Callable[[socket.socket], None]) -> None:
        try:
            _prove(newcomer, self._key, deliver_challenge, answer_challenge)
        except OSError:
            newcomer.close()
            return
        admit(newcomer)


def connect(addresses: Sequence[str], port: int, key: bytes) -> socket.socket:
    """Connect to the first address at which a ``Listener`` with this key answers.

    Raises:
        OSError: there is none; the message has the reason for each address.
    """
    problems = []
    for address in addresses:
        try:
            connected = socket.create_connection((address, port), timeout=_REACH)
        except OSError as problem:
            problems.append(str(problem))
            continue
        try:
            _prove(connected, key, answer_challenge, deliver_challenge)
        except OSError as problem:
            connected.close()
            problems.append(str(problem))
        else:
            return connected
    raise OSError("; ".join(problems))


def exactly(connected: socket.socket, size: int) -> bytearray:
    """So many bytes from a connection.

    Raises:
        OSError: it has ended before.
    """
    data, have = bytearray(size), 0
    view = memoryview(data)
    while have < size:
        got = connected.recv_into(view[have:])
        if not got:
            raise ConnectionResetError("the other end has closed the connection")
        have += got
    return data


def _prove(connected: socket.socket, key: bytes, *steps: Callable[[Any, bytes], None]) -> None:
    """Take these steps of the proof, which the other end takes in the opposite order.

    Raises:
        OSError: the other end does not know the key, went away, or took too long.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    messages = _Messages(connected)
    try:
        for step in steps:
            step(messages, key)
    except OSError:
        raise
    except Exception as problem:  # a stranger may send anything, and must not end this process
        raise ConnectionError("it did not prove that it knows the key of this run") from problem
    connected.settimeout(None)


class _Messages:
    """The messages of a challenge, all within one time limit."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._deadline = time.monotonic() + _PROVE

    def send_bytes(self, message: bytes) -> None:
        self._limit_wait()
        self._socket.sendall(_LENGTH.pack(len(message)) + message)

    def recv_bytes(self, longest: int) -> bytes:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 <= length <= longest:
            raise ValueError(f"a message of {length} bytes")
        return self._exactly(length)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            self._limit_wait()
            more = self._socket.recv(count - len(data))
            if not more:
                raise EOFError
            data += more
        return data

    def _limit_wait(self) -> None:
        # Not 0, which would mean a socket that does not block.
        self._socket.settimeout(max(0.001, self._deadline - time.monotonic()))
