"""Messages from one rank to another, by MPI or over TCP: the one place that imports mpi4py.

Where Horovod runs on MPI, messages use the same MPI, which Horovod starts and finalises, with
communicators of their own to keep them apart from Horovod's. A wait inside MPI would keep a core
busy, so all waits here poll, and sleep in between.

Where Horovod runs on Gloo, messages go over TCP. Two ranks have a connection, which the first of
them to send opens. Both ends prove that they know a key that rank 0 has sent to all ranks
(``hvkit.connections``). For each connection one thread reads and another one writes.
"""

from __future__ import annotations

import functools
import queue
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvkit import threads
from hvkit.connections import Connection, Listener, connect
from hvkit.errors import LaunchError, RanksDisagreeError
from hvkit.host.network import addresses_for_others
from hvkit.log import logger
from hvkit.transport.engines import CHUNK, Engine
from hvkit.transport.traffic import count
from hvkit.watch import calls, rank_errors
from hvkit.watch.calls import translated, waiting_for_all_ranks

# Seconds between two polls: at first none, for answers that come at once; later a fraction of the
# time waited so far, so that pauses lengthen a wait by that fraction at most.
_LOOKS_WITHOUT_PAUSE = 30
_SHORTEST_PAUSE = 5e-5
_LONGEST_PAUSE = 5e-3
_FRACTION = 0.03

# Of mailboxes over TCP: the tag of the last message of a rank.
_BYE = -1
# Seconds between two checks of whether the run goes on.
_TICK = 0.2


class Envelope(NamedTuple):
    """A message that has arrived, or its first piece."""

    source: int
    tag: int
    bytes: int


class Mailbox(ABC):
    """Sends this rank's messages and receives those to it.

    Messages from one rank to another with the same tag come in the order in which they were sent.
    Every method raises ``RankLostError`` once another rank has ended.
    """

    def send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> None:
        """Send a contiguous array of shape (n,), and wait; nothing is counted without a purpose."""
        self.finish(self.start_to_send(array, to, tag, purpose))

    @abstractmethod
    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> list[Any]:
        """Start to send an array; the requests, for ``finish``, keep it in memory."""

    @abstractmethod
    def finish(self, requests: list[Any]) -> None:
        """Wait until an array was sent."""

    @abstractmethod
    def receive(self, into: NDArray[Any], source: int, tag: int) -> None:
        """Wait for an array of this length from a rank."""

    @abstractmethod
    def look(self) -> Envelope | None:
        """The next message that has arrived; None if there is none."""

    def wait(self) -> Envelope:
        """Wait for the next message."""
        for pause in pauses():
            if (found := self.look()) is not None:
                return found
            time.sleep(pause)
        raise AssertionError("pauses never end")

    @abstractmethod
    def require_ranks(self) -> None:
        """Raise ``RankLostError`` if another rank has ended."""

    @abstractmethod
    def close(self) -> None:
        """Send no more; on every rank, once all messages have been received."""


class MpiMailbox(Mailbox):
    """Sends through mpi4py, in pieces of at most ``engines.CHUNK`` bytes."""

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator

    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> list[Any]:
        self.require_ranks()
        requests = []
        for piece in _pieces(array):
            count(purpose, piece.nbytes)
            data = [piece, self._mpi.BYTE]
            requests.append(self._communicator.Isend(data, dest=to, tag=tag))
        return requests

    def finish(self, requests: list[Any]) -> None:
        for request in requests:
            for pause in pauses():
                if request.Test():
                    break
                time.sleep(pause)
                self.require_ranks()

    def receive(self, into: NDArray[Any], source: int, tag: int) -> None:
        for piece in _pieces(into):
            self.require_ranks()
            data = [piece, self._mpi.BYTE]
            self.finish([self._communicator.Irecv(data, source=source, tag=tag)])

    def look(self) -> Envelope | None:
        self.require_ranks()
        status = self._mpi.Status()
        if not self._communicator.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            return None
        return Envelope(status.Get_source(), status.Get_tag(), status.Get_count(self._mpi.BYTE))

    def require_ranks(self) -> None:
        # Horovod ends MPI on all ranks as soon as one has ended, from a thread of its own.
        if self._mpi.Is_finalized():
            with translated():
                raise RuntimeError("Horovod has been shut down")

    def close(self) -> None:
        if not self._mpi.Is_finalized():
            self._communicator.Free()


class _Request(NamedTuple):
    """A message that is being sent."""

    tag: int
    data: NDArray[np.uint8]
    sent: threading.Event


class TcpMailbox(Mailbox):
    """Sends over TCP to ranks with the same key, until ``run_ends``.

    ``address`` is where others connect to this rank: network addresses and a port. ``addresses``,
    those of all ranks, must be set before anything is sent.
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
        # Source, tag and bytes, in the order in which they came.
        self._received: list[tuple[int, int, bytearray]] = []
        self._outboxes: dict[int, queue.SimpleQueue[_Request]] = {}
        self._left: set[int] = set()
        self._lost = False
        threads.start("hvkit-mailbox", self._listener.serve, self._admit)

    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> list[Any]:
        if purpose:
            count(purpose, array.nbytes)
        self.require_ranks()
        request = _Request(tag, array.view(np.uint8), threading.Event())
        self._outbox(to).put(request)
        return [request]

    def finish(self, requests: list[Any]) -> None:
        for request in requests:
            while not request.sent.wait(_TICK):
                self.require_ranks()

    def receive(self, into: NDArray[Any], source: int, tag: int) -> None:
        with self._changed:
            while not (found := [m for m in self._received if m[:2] == (source, tag)]):
                self.require_ranks()
                self._changed.wait(_TICK)
            data = found[0][2]
            self._received.remove(found[0])
        if len(data) != into.nbytes:  # NumPy would repeat a single byte
            raise RanksDisagreeError(
                f"rank {source} has sent {len(data)} bytes where rank {self._rank} expects "
                f"{into.nbytes}: {rank_errors.SAME_CALLS}"
            )
        into.view(np.uint8)[:] = np.frombuffer(data, np.uint8)

    def look(self) -> Envelope | None:
        with self._changed:
            for source, tag, data in self._received:
                return Envelope(source, tag, len(data))
        self.require_ranks()
        return None

    def require_ranks(self) -> None:
        if self._lost or self._run_ends():
            raise rank_errors.lost(calls.current_call())

    def close(self) -> None:
        self._listener.close()
        # So that the others do not take the end of the connection for that of this rank.
        last = [_Request(_BYE, np.empty(0, np.uint8), threading.Event()) for _ in self._outboxes]
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
                    self._received.append((rank, tag, data))
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


def pauses() -> Iterator[float]:
    """Seconds to sleep before each further poll; never ends."""
    since = time.monotonic()
    for _ in range(_LOOKS_WITHOUT_PAUSE):
        yield 0.0
    while True:
        waited = time.monotonic() - since
        yield min(max(_FRACTION * waited, _SHORTEST_PAUSE), _LONGEST_PAUSE)


def _pieces(array: NDArray[Any]) -> list[NDArray[np.uint8]]:
    """The bytes of an array; one piece if it is empty."""
    whole = array.view(np.uint8)
    starts = range(0, max(whole.size, 1), CHUNK)
    return [whole[start : start + CHUNK] for start in starts]


def mpi_mailbox() -> MpiMailbox:
    """A new mailbox; a collective. ``can_send`` must be true on all ranks."""
    mpi = load_mpi()
    with waiting_for_all_ranks():
        return MpiMailbox(mpi, mpi.COMM_WORLD.Dup())


def can_send(engine: Engine) -> bool:
    """Whether this rank can send messages: mpi4py loads, and MPI runs with support for threads."""
    return not obstacle(engine)


def obstacle(engine: Engine) -> str:
    """Why this rank cannot send messages, and the fix; empty if it can."""
    if not engine.hvd.mpi_enabled():
        return (
            "Horovod runs on Gloo here: start the ranks with `hvkit run` or mpirun, without --gloo"
        )
    if (mpi := load_mpi()) is None:
        return "mpi4py cannot be loaded: pip install --force-reinstall mpi4py"
    if not mpi.Is_initialized() or mpi.Is_finalized():
        library = mpi.Get_library_version().split("\n")[0].strip("\0 ")
        return (
            f"mpi4py uses another MPI than Horovod, {library}: pip install --force-reinstall mpi4py"
        )
    # Horovod's own thread calls MPI all the time, so this one needs THREAD_MULTIPLE.
    if mpi.Query_thread() != mpi.THREAD_MULTIPLE:
        return (
            "MPI runs without support for threads: remove HOROVOD_MPI_THREADS_DISABLE from the "
            "environment, and let hvkit start MPI before anything else does"
        )
    return ""


@functools.cache
def load_mpi() -> Any:
    """mpi4py's MPI; None, with a warning, if it cannot be loaded."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        logger.warning(
            f"mpi4py cannot be loaded ({error}): ranks send through Horovod instead; to fix it: "
            "pip install --force-reinstall mpi4py"
        )
        return None
    return MPI
