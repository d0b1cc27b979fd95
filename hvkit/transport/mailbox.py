"""Messages from one rank to another, by MPI: the one place that imports mpi4py.

Horovod has collectives only. Where it runs on MPI, messages use the same MPI, with communicators of
their own to keep them apart from Horovod's. Horovod starts and finalises MPI; hvkit does neither.
Without MPI they go through ``tcp_mailbox``.

A rank that receives cannot know when another sends. A wait inside MPI would keep a core busy, so
all waits here poll, and sleep in between.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvkit.log import logger
from hvkit.transport.engines import CHUNK, Engine
from hvkit.transport.traffic import count
from hvkit.watch.calls import translated, waiting_for_all_ranks

# Seconds between two polls: at first none, for answers that come at once; later a fraction of the
# time waited so far, so that pauses lengthen a wait by that fraction at most.
_LOOKS_WITHOUT_PAUSE = 30
_SHORTEST_PAUSE = 5e-5
_LONGEST_PAUSE = 5e-3
_FRACTION = 0.03


class Envelope(NamedTuple):
    """A message that has arrived, or its first piece."""

    source: int
    tag: int
    bytes: int


class Sending(NamedTuple):
    """An array that is being sent, and must stay in memory until then.

    Attributes:
        array: of the message.
        requests: to wait for.
    """

    array: NDArray[Any]
    requests: list[Any]


class Mailbox(ABC):
    """Sends this rank's messages and receives those to it.

    Messages from one rank to another with the same tag come in the order in which they were sent.
    Every method raises ``RankLostError`` once another rank has ended.
    """

    def send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> None:
        """Send an array; wait until it was sent.

        Args:
            array: of shape (n,), contiguous.
            to: the receiving rank.
            tag: a number from 0.
            purpose: as in ``hvkit.traffic``.
        """
        self.finish(self.start_to_send(array, to, tag, purpose))

    @abstractmethod
    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> Sending:
        """Start to send an array, with the arguments of ``send``; the result is for ``finish``."""

    @abstractmethod
    def finish(self, sending: Sending) -> None:
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
    """Sends through mpi4py, in pieces of at most ``engines.CHUNK`` bytes.

    Args:
        mpi: mpi4py's MPI, which runs.
        communicator: of all ranks, for these messages only.
    """

    def __init__(self, mpi: Any, communicator: Any) -> None:
        self._mpi = mpi
        self._communicator = communicator

    def start_to_send(self, array: NDArray[Any], to: int, tag: int, purpose: str) -> Sending:
        self.require_ranks()
        requests = []
        for piece in _pieces(array):
            count(purpose, piece.nbytes)
            data = [piece, self._mpi.BYTE]
            requests.append(self._communicator.Isend(data, dest=to, tag=tag))
        return Sending(array, requests)

    def finish(self, sending: Sending) -> None:
        for request in sending.requests:
            self._finish(request)

    def receive(self, into: NDArray[Any], source: int, tag: int) -> None:
        for piece in _pieces(into):
            self.require_ranks()
            self._finish(self._communicator.Irecv([piece, self._mpi.BYTE], source=source, tag=tag))

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
        """Free the communicator; on every rank, once all messages have been received."""
        if not self._mpi.Is_finalized():
            self._communicator.Free()

    def _finish(self, request: Any) -> None:
        for pause in pauses():
            if request.Test():
                return
            time.sleep(pause)
            self.require_ranks()


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


_warned = False


def load_mpi() -> Any:
    """mpi4py's MPI; None, with a warning, if it cannot be loaded."""
    global _warned
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if not _warned:
            logger.warning(
                f"mpi4py cannot be loaded ({error}): ranks send through Horovod instead; to fix "
                "it: pip install --force-reinstall mpi4py"
            )
        _warned = True
        return None
    return MPI
