"""Messages from one rank to another: the mailbox of a run, and large objects.

Checkpoints send the states of all ranks to rank 0 and back, one after the other.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import numpy as np

from hvkit.communication.collectives import from_rank, gather, raise_together
from hvkit.communication.encoding import decode, encode
from hvkit.errors import HvkitError, LaunchError
from hvkit.runtime import any_engine, local_size, rank, size
from hvkit.transport import engines, mailbox
from hvkit.watch.calls import waiting_for_all_ranks

T = TypeVar("T")


def open_mailbox(user: str) -> mailbox.Mailbox:
    """A mailbox for this run, by MPI, or over TCP where Horovod runs on Gloo; a collective.

    Args:
        user: the feature that needs it, for errors.

    Raises:
        LaunchError: a rank cannot send messages; on every rank, with the fix.
    """
    engine = any_engine()
    if not engine.hvd.mpi_enabled():
        opened = mailbox.TcpMailbox(
            rank(),
            from_rank(0, secrets.token_bytes(32)),
            local_size() == size(),
            lambda: not engine.hvd.is_initialized(),
        )
        opened.addresses = gather("distribute", opened.address)
        return opened
    why = mailbox.obstacle(engine)
    raise_together(LaunchError(f"{user} needs messages by MPI: {why}") if why else None)
    return mailbox.mpi_mailbox()


def collect(call: str, obj: T) -> Iterator[T]:
    """Yield the objects of all ranks, in rank order, on rank 0; nothing on the others.

    A collective: every rank must exhaust the iterator. Ranks send one after the other, in pieces.
    So a rank has its object and its bytes in memory, and rank 0 also one other object at a time, if
    the caller keeps none. They are sent by MPI, or where it does not run, by Horovod's broadcasts.

    Args:
        call: the user's call.
        obj: of types that ``encode`` takes.

    Raises:
        HvkitError: rank 0 had no memory for an object, or could not read it; on every rank, at the
            end.
        RanksDisagreeError: another rank makes another collective call.
    """
    if rank() == 0:
        yield obj
    if size() == 1:
        return
    data = encode(obj) if rank() else b""
    gathered = gather(call, (len(data), mailbox.can_send(any_engine())))
    by_mpi = _mailbox_of_all(can_send for _, can_send in gathered)
    problem = ""
    for source, (length, _) in enumerate(gathered[1:], start=1):
        from_rank(0, None)  # until rank 0 is ready
        received, reason = _transfer(data, length, source, 0, by_mpi)
        if rank() == 0 and not reason:
            yield received
        del received
        problem = reason or problem
    if problem := from_rank(0, problem):
        raise HvkitError(f"rank 0 cannot collect the objects of all ranks: {problem}")


def scatter(call: str, make: Callable[[int], T], root: int = 0) -> T:
    """This rank's object, which one rank makes; a collective.

    They are sent as in ``collect``, one after the other.

    Args:
        call: the user's call.
        make: called on rank ``root`` with each rank; returns an object that ``encode`` takes.
        root: the rank that makes them.

    Raises:
        Exception: the error of ``make``, on every rank, as in ``share``.
        HvkitError: a rank had no memory for its object, or could not read it; on every rank.
    """
    if size() == 1:
        return make(0)
    by_mpi = _mailbox_of_all(gather(call, mailbox.can_send(any_engine())))
    own: Any = None
    problem: Exception | None = None
    for target in range(size()):
        data = b""
        if rank() == root and problem is None:
            try:
                obj = make(target)
                if target == root:
                    own = obj
                else:
                    data = encode(obj)
                del obj
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = error
        length = from_rank(root, len(data))
        if not length:  # the root's own object, or none after an error
            continue
        received, reason = _transfer(data, length, root, target, by_mpi)
        if rank() == target:
            own, problem = received, HvkitError(reason) if reason else None
    raise_together(problem, call)
    return cast(T, own)


_mailbox: mailbox.MpiMailbox | None = None


def _mailbox_of_all(can_send: Iterable[bool]) -> mailbox.MpiMailbox | None:
    """The mailbox for large objects, if all ranks have MPI; a collective."""
    global _mailbox
    if not all(can_send):
        return None
    if _mailbox is None:
        _mailbox = mailbox.mpi_mailbox()
    return _mailbox


def _transfer(
    data: bytes, length: int, source: int, target: int, by_mpi: mailbox.MpiMailbox | None
) -> tuple[Any, str]:
    """Send an encoded object from one rank to another, in pieces; a collective.

    A target without memory for it still receives the pieces, since the other ranks continue.

    Args:
        data: the object, on the source.
        length: of the data, on every rank.
        source: the rank that sends.
        target: the rank that receives, another one.
        by_mpi: sends by MPI; None to send by broadcasts to all ranks.

    Returns:
        On the target the object, or None and the reason.
    """
    sends, receives = rank() == source, rank() == target
    whole, problem = np.frombuffer(data, np.uint8) if sends else None, ""
    try:
        whole = np.empty(length, np.uint8) if receives else whole
    except MemoryError as error:
        problem = f"{type(error).__name__}: {error} ({length} bytes of rank {source})"
    for start in range(0, length, engines.CHUNK):
        stop = min(start + engines.CHUNK, length)
        piece = np.empty(stop - start, np.uint8) if whole is None else whole[start:stop]
        if by_mpi is None:
            received = any_engine().broadcast(piece, source)
            if receives:
                piece[:] = received
            continue
        with waiting_for_all_ranks():
            if sends:
                by_mpi.send(piece, target, 0, "objects")
            elif receives:
                by_mpi.receive(piece, source, 0)
    try:
        return decode(whole.data) if receives and whole is not None else None, problem
    except Exception as error:
        return None, f"{type(error).__name__}: {error} ({length} bytes of rank {source})"
