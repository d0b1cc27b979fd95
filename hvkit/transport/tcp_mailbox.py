"""Messages between ranks that run without MPI, as Horovod does on Gloo: over TCP.

Two ranks that send each other messages have a connection, which the first of them to send opens.
Both ends prove that they know a key that rank 0 has sent to all ranks (``hvkit.connections``).
For each connection one thread reads and another one writes.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit import threads
from hvkit.connections import Connection, Listener, connect
from hvkit.errors import LaunchError, RanksDisagreeError
from hvkit.host.network import addresses_for_others
from hvkit.transport.mailbox import Envelope, Mailbox, Sending
from hvkit.transport.traffic import count
from hvkit.watch import calls, rank_errors

# The tag of the last message of a rank.
_BYE = -1
# Seconds between two checks of whether the run goes on.
_TICK = 0.2


class _Request:
    """A message that is being sent."""

    def __init__(self, tag: int, data: NDArray[np.uint8]) -> None:
        self.tag = tag
        self.data = data
        self.sent = threading.Event()


class TcpMailbox(Mailbox):
    """Sends over TCP.

    Args:
        rank: this rank.
        key: of this run.
        one_host: whether all ranks are on this host.
        run_ends: whether the run ends, so that every wait must end.

    Attributes:
        address: the network addresses and the port at which other ranks connect to this one.
        addresses: of all ranks, by rank; to be set before anything is sent.
    """

    def __init__(self, rank: int, key: bytes, one_host: bool, run_ends: Callable[[], bool]) -> None:
        self._rank = rank
        self._key = key
        self._run_ends = run_ends
        self._listener = Listener("127.0.0.1" if one_host else None, key)
        here = ["127.0.0.1"] if one_host else list(addresses_for_others())
        self.address: tuple[list[str], int] = (here, self._listener.port)
        self.addresses: Sequence[tuple[list[str], int]] = ()
        # Guards everything below; notified when a message has come, or a rank has ended.
        self._changed = threading.Condition()
        self._arrived: dict[tuple[int, int], deque[bytearray]] = {}
        # The same messages in the order in which they came.
        self._order: deque[tuple[int, int]] = deque()
        self._outboxes: dict[int, queue.SimpleQueue[_Request]] = {}
        self._left: set[int] = set()
        self._lost = False
        threads.start("hvkit-mailbox", self._listener.serve, self._admit)

    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> Sending:
        count(purpose, array.nbytes)
        return self.post(array, to, tag)

    def post(self, array: NDArray[Any], to: int, tag: int) -> Sending:
        """``start_to_send`` of bytes that ``hvkit.traffic`` has counted already."""
        self.require_ranks()
        request = _Request(tag, array.view(np.uint8))
        self._outbox(to).put(request)
        return Sending(array, [request])

    def finish(self, sending: Sending) -> None:
        for request in sending.requests:
            while not request.sent.wait(_TICK):
                self.require_ranks()

    def receive(self, into: NDArray[Any], source: int, tag: int) -> None:
        with self._changed:
            while not (waiting := self._arrived.get((source, tag))):
                self.require_ranks()
                self._changed.wait(_TICK)
            data = waiting.popleft()
            self._order.remove((source, tag))
        if len(data) != into.nbytes:  # NumPy would repeat a single byte
            raise RanksDisagreeError(
                f"rank {source} has sent {len(data)} bytes where rank {self._rank} expects "
                f"{into.nbytes}: {rank_errors.SAME_CALLS}"
            )
        into.view(np.uint8)[:] = np.frombuffer(data, np.uint8)

    def look(self) -> Envelope | None:
        with self._changed:
            if self._order:
                source, tag = self._order[0]
                return Envelope(source, tag, len(self._arrived[source, tag][0]))
        self.require_ranks()
        return None

    def require_ranks(self) -> None:
        if self._lost or self._run_ends():
            raise rank_errors.lost(calls.current_call())

    def close(self) -> None:
        """Send all ranks a last message, and wait until it was sent."""
        self._listener.close()
        last = [_Request(_BYE, np.empty(0, np.uint8)) for _ in self._outboxes]
        for outbox, request in zip(self._outboxes.values(), last, strict=True):
            outbox.put(request)
        for request in last:
            while not request.sent.wait(_TICK) and not self._lost:
                pass

    def _outbox(self, to: int) -> queue.SimpleQueue[_Request]:
        """The queue of messages to a rank; the first use opens a connection."""
        with self._changed:
            if to not in self._outboxes:
                self._begin(to, self._connected(to))
            return self._outboxes[to]

    def _connected(self, to: int) -> Connection:
        addresses, port = self.addresses[to]
        try:
            connection = Connection(connect(addresses, port, self._key))
            connection.send(self._rank)
        except OSError as problem:
            self.require_ranks()
            raise LaunchError(
                f"rank {self._rank} cannot connect to rank {to} at {' or '.join(addresses)}, port "
                f"{port} ({problem}): that rank has ended, or a firewall between the hosts does "
                "not let ranks connect to any port"
            ) from problem
        return connection

    def _admit(self, connected: socket.socket) -> None:
        connection = Connection(connected)
        try:
            rank, _ = connection.receive()
        except OSError:  # it has ended at once
            connection.close()
            return
        with self._changed:
            self._begin(rank, connection)

    def _begin(self, rank: int, connection: Connection) -> None:
        """Read from a rank; write to it over its first connection, so that messages stay in order.

        If both ends have opened one at the same time, each writes over its own.
        """
        if rank not in self._outboxes:
            self._outboxes[rank] = queue.SimpleQueue()
            threads.start("hvkit-outbox", self._write, connection, self._outboxes[rank])
        threads.start("hvkit-inbox", self._read, rank, connection)

    def _read(self, rank: int, connection: Connection) -> None:
        try:
            while True:
                tag, data = connection.receive()
                with self._changed:
                    if tag == _BYE:
                        self._left.add(rank)
                        continue
                    self._arrived.setdefault((rank, tag), deque()).append(data)
                    self._order.append((rank, tag))
                    self._changed.notify_all()
        except OSError:
            with self._changed:
                self._lost |= rank not in self._left
                self._changed.notify_all()

    def _write(self, connection: Connection, outbox: queue.SimpleQueue[_Request]) -> None:
        try:
            while True:
                request = outbox.get()
                connection.send(request.tag, memoryview(request.data))  # type: ignore[arg-type]
                request.sent.set()
        except OSError:
            with self._changed:
                self._lost = True
                self._changed.notify_all()
