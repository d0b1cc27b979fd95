"""Messages from one rank to another: the mailbox of a run, and large objects.

Checkpoints send the states of all ranks to rank 0 and back, one after the other.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator
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
    """A mailbox for a feature, by MPI, or over TCP where Horovod runs on Gloo; a collective."""
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
    """
    if rank() == 0:
        yield obj
    if size() == 1:
        return
    data = encode(obj) if rank() else b""
    gathered = gather(call, (len(data), mailbox.can_send(any_engine())))
    by_mpi = _mailbox_of_objects() if all(can_send for _, can_send in gathered) else None
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
    """This rank's object, which one rank makes, sent as in ``collect``; a collective."""
    if size() == 1:
        return make(0)
    by_mpi = None
    if all(gather(call, mailbox.can_send(any_engine()))):
        by_mpi = _mailbox_of_objects()
    for_this_rank: Any = None
    problem: Exception | None = None
    for target in range(size()):
        data = b""
        if rank() == root and problem is None:
            try:
                if target == root:
                    for_this_rank = make(target)
                else:
                    data = encode(make(target))
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = error
        length = from_rank(root, len(data))
        if not length:  # the root's object, or none after an error
            continue
        received, reason = _transfer(data, length, root, target, by_mpi)
        if rank() == target:
            for_this_rank, problem = received, HvkitError(reason) if reason else None
    raise_together(problem, call)
    return cast(T, for_this_rank)


_mailbox_of_objects = functools.cache(mailbox.mpi_mailbox)


def _transfer(
    data: bytes, length: int, source: int, target: int, by_mpi: mailbox.MpiMailbox | None
) -> tuple[Any, str]:
    """Send an encoded object from one rank to another, in pieces; a collective.

    A target without memory for it still receives the pieces, since the other ranks continue.
    """
    sends, receives = rank() == source, rank() == target
    array, problem = np.frombuffer(data, np.uint8) if sends else None, ""
    try:
        array = np.empty(length, np.uint8) if receives else array
    except MemoryError as error:
        problem = f"{type(error).__name__}: {error} ({length} bytes of rank {source})"
    for start in range(0, length, engines.CHUNK):
        stop = min(start + engines.CHUNK, length)
        piece = np.empty(stop - start, np.uint8) if array is None else array[start:stop]
        if by_mpi is None:
            engines.broadcast_in_pieces(any_engine(), piece, source)
            continue
        with waiting_for_all_ranks():
            if sends:
                by_mpi.send(piece, target, 0, "objects")
            elif receives:
                by_mpi.receive(piece, source, 0)
    try:
        return decode(array.data) if receives and array is not None else None, problem
    except Exception as error:
        return None, f"{type(error).__name__}: {error} ({length} bytes of rank {source})"
