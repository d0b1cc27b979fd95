"""TCP connections between the processes of a run: who may use them, frames, and their loss.

Both ends prove to each other that they know the same key, by the challenge of
``multiprocessing.connection``: an HMAC over random bytes, so the key itself never travels. Python
3.11 uses MD5, which is still safe in an HMAC. What follows the proof is not encrypted: frames of a
number for their kind, a length, and that many bytes.

Keep-alive in the kernels detects a lost connection. While a process waits for a disk or a core, its
kernel still acknowledges packets; when it ends, its kernel closes the connection. If neither
happens, the host or the network is lost.
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

_HEADER = struct.Struct("!iQ")
HEADER_BYTES = _HEADER.size
# Bytes of a payload up to which it is sent in one piece with its header.
_COPIED = 1 << 16

# In Linux' struct tcp_info: milliseconds since the last acknowledgement.
_TCP_INFO_BYTES = 60
_LAST_ACK = 56
# Keep-alive probes within the time limit; Linux allows 127.
_PROBES = 50


class Listener:
    """Any free TCP port, of one address or of all, which admits who knows the key."""

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
        """Call ``admit(connection)`` for every process that knows the key, until ``close``.

        Each newcomer has its own thread, which also calls ``admit``: a stranger that stays silent
        delays nobody.
        """
        while True:
            try:
                accepted, _ = self.socket.accept()
            except OSError:
                if self._closed.wait(_PAUSE):
                    return
                continue  # For instance, this process has too many open files.
            threads.start("hvkit-newcomer", self._examine, accepted, admit)

    def close(self) -> None:
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
    """Connect to the first address with a ``Listener`` of this key; OSError if there is none."""
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


class ConnectionLost(ConnectionError):
    """The other end is gone, or sends what is no frame."""


class Connection:
    """Sends and receives frames of up to ``longest`` bytes. Only one thread may receive."""

    def __init__(self, connected: socket.socket, longest: int | None = None) -> None:
        self._socket = connected
        self._longest = longest
        self._sending = threading.Lock()

    def send(self, kind: int, payload: bytes | memoryview = b"") -> None:
        with self._sending:
            if len(payload) <= _COPIED:
                self._socket.sendall(frame(kind, bytes(payload)))
                return
            self._socket.sendall(_HEADER.pack(kind, len(payload)))
            self._socket.sendall(payload)

    def receive(self) -> tuple[int, bytearray]:
        """Wait for a frame; return its kind and payload, or raise ConnectionLost."""
        try:
            kind, size = _HEADER.unpack(self._exactly(HEADER_BYTES))
            if self._longest is not None and size > self._longest:
                raise ValueError(f"a frame of {size} bytes")
            return kind, self._exactly(size)
        except (OSError, ValueError) as problem:
            raise ConnectionLost(str(problem)) from problem

    def finish(self) -> None:
        """Send nothing more; what was sent still arrives, and the other end closes the connection.

        Closing it here, with a frame of the other end unread, would discard data that is still
        being sent.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def silent_for(self) -> float:
        """Seconds since the last acknowledgement, with ``keep_alive``; 0 once it is closed."""
        try:
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except OSError:
            return 0.0
        (milliseconds,) = struct.unpack_from("=I", info, _LAST_ACK)
        return float(milliseconds) / 1000

    def _exactly(self, size: int) -> bytearray:
        data, have = bytearray(size), 0
        view = memoryview(data)
        while have < size:
            got = self._socket.recv_into(view[have:])
            if not got:
                raise ConnectionResetError("the other end has closed the connection")
            have += got
        return data


def frame(kind: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


def keep_alive(connection: socket.socket, lost_after: float | None) -> None:
    """Have the kernel end the connection after seconds of silence; None within one host."""
    if lost_after is None:
        return
    interval = probe_interval(lost_after)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, interval),
        (socket.TCP_KEEPINTVL, interval),
        (socket.TCP_KEEPCNT, max(1, round(lost_after / interval) - 1)),
        # The limit for data that was sent and not acknowledged, in milliseconds.
        (socket.TCP_USER_TIMEOUT, round(lost_after * 1000)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def probe_interval(lost_after: float) -> int:
    return max(1, int(lost_after / _PROBES))


def _prove(connected: socket.socket, key: bytes, *steps: Callable[[Any, bytes], None]) -> None:
    """Take these steps of the proof, the other end the opposite ones; OSError if it fails."""
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
