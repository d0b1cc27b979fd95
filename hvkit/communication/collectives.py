"""Collectives on Python objects, among all ranks or a group; ranks have their numbers among all.

``broadcast`` and ``hvkit.allgather`` pickle what the script passes. hvkit's own messages are not
pickled: reading them runs no code (``encoding``). Each has the name and the line of the user's
call, so that ranks in different calls raise an error that names both.

Large objects, such as the states of all ranks in a checkpoint, go to one rank or come from one, one
after the other: ``collect`` and ``scatter``. ``open_mailbox`` is for messages between two ranks.
"""

from __future__ import annotations

import functools
import hashlib
import pickle
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hvkit.communication.encoding import decode, encode
from hvkit.errors import HvkitError, LaunchError, RanksDisagreeError
from hvkit.runtime import Group, all_ranks, any_engine, local_size, rank, size
from hvkit.transport import engines, mailbox
from hvkit.watch import calls
from hvkit.watch.calls import named, waiting_for_all_ranks
from hvkit.watch.rank_errors import SAME_CALLS, mark_as_shown_by
from hvkit.watch.script_lines import line_of_script

Object = TypeVar("Object")


@named("hvkit.barrier")
def barrier() -> None:
    """Wait until every rank has called this.

    Raises:
        RanksDisagreeError: another rank makes another collective call.
        RankLostError: another rank has ended, or waits in another call.
    """
    gather("barrier", None)


@named("hvkit.broadcast")
def broadcast(obj: Object, root: int = 0) -> Object:
    """Return rank ``root``'s object on every rank. Gradients do not flow through it.

    Args:
        obj: on rank ``root`` any object that pickles; ignored elsewhere. A parameter that ranks
            have divided is joined first, so that all of them must pass it.
        root: the rank that sends.

    Raises:
        ValueError: there is no rank ``root``.
        TypeError: the object does not pickle; on every rank.
        RankLostError: another rank has ended, or waits in another call.
    """
    if not 0 <= root < size():
        raise ValueError(f"root must be a rank from 0 to {size() - 1}, got {root}")
    if size() == 1:
        return obj
    obj = undivided(obj)
    payload = pickled(obj) if rank() == root else None
    received: Object = unpickled(engines.broadcast_message(all_ranks().engine, payload, root), root)
    return obj if rank() == root else received


def undivided(obj: Object) -> Object:
    """The object, with whole parameters and gradients in place of those that ranks have divided.

    Pickling a divided one is a collective, and only some ranks pickle.
    """
    parameters = sys.modules.get("hvkit.frameworks.pytorch.model_parallel.whole_parameters")
    return parameters.undivided(obj) if parameters else obj


def from_rank(root: int, obj: Object, group: Group | None = None) -> Object:
    """``broadcast`` inside hvkit: rank ``root``'s object, of types that ``encode`` takes."""
    group = group or all_ranks()
    if group.size == 1:
        return obj
    payload = encode(obj) if rank() == root else None
    received: Object = decode(
        engines.broadcast_message(group.engine, payload, root, group.process_set)
    )
    return obj if rank() == root else received


def broadcast_state(data: NDArray[np.uint8], group: Group | None = None) -> NDArray[np.uint8]:
    """Fill ``data``, n bytes on every rank, with the first rank's, to start training; return it."""
    group = group or all_ranks()
    if group.size == 1:
        return data
    return engines.broadcast_in_pieces(group.engine, data, group.first, "start", group.process_set)


def broadcast_bytes(data: NDArray[np.uint8], root: int = 0) -> NDArray[np.uint8]:
    """Return rank ``root``'s bytes, of shape (n,), on every rank; a collective."""
    if size() == 1:
        return data
    length = from_rank(root, len(data))
    whole = data if rank() == root else np.empty(length, np.uint8)
    return engines.broadcast_in_pieces(all_ranks().engine, whole, root)


def gather(call: str, obj: Object, group: Group | None = None) -> list[Object]:
    """The objects that all ranks pass in this call of the script's, in rank order."""
    group = group or all_ranks()
    if group.size == 1:
        return [obj]
    with calls.call(call):
        header = calls.current_call(), line_of_script(), call
        gathered = _gather_bytes(encode([*header, obj]), group)
    # Free each message once it is read: together they may take gigabytes.
    objects: list[tuple[str, str, str, Object]]
    objects = [decode(gathered.pop(0).data) for _ in group.members]
    first, first_line, first_point, _ = objects[0]
    for other, (called, line, point, _) in zip(group.members, objects, strict=True):
        if (called, point) == (first, first_point):
            continue
        this, rank_0 = f"rank {other}", f"rank {group.first}"
        text = f"{this} calls {called} ({line}) while {rank_0} calls {first} ({first_line})"
        if called == first:
            text = f"{this} is at another point of {first} ({line}) than {rank_0} ({first_line})"
        error = RanksDisagreeError(f"{text}: {SAME_CALLS}, also where only rank 0 prints or saves")
        raise mark_as_shown_by(error, group.first)
    return [each for *_, each in objects]


# Exceptions that every rank raises with their own type. Others become HvkitError elsewhere.
_KEPT = (TypeError, ValueError, RanksDisagreeError)


def gather_or_raise(
    call: str, problem: Exception | None, value: Object, group: Group | None = None
) -> list[Object]:
    """The values of all ranks, in rank order, unless a rank has a problem; a collective.

    Then all raise the first rank's problem. A TypeError, ValueError, RanksDisagreeError or OSError
    keeps its type; any other becomes HvkitError on the other ranks.
    """
    group = group or all_ranks()
    objects = gather(call, (_portable(problem), value), group)
    for source, (found, _) in zip(group.members, objects, strict=True):
        if found is None:
            continue
        if problem is not None:
            same = str(found) == str(_portable(problem))
            raise mark_as_shown_by(problem, source) if same else problem
        if not isinstance(found, OSError):  # only rank 0 writes files, so those need no rank
            found = type(found)(f"on rank {source}: {found}")
        raise mark_as_shown_by(found, source)
    return [each for _, each in objects]


def raise_together(
    problem: Exception | None, call: str = "distribute", group: Group | None = None
) -> None:
    """Raise on every rank if any rank has a problem, as ``gather_or_raise`` does."""
    gather_or_raise(call, problem, None, group)


@contextmanager
def together(call: str = "distribute", group: Group | None = None) -> Iterator[None]:
    """A context whose error all ranks raise, by ``gather_or_raise``; its end is a collective."""
    problem = None
    try:
        yield
    except Exception as error:  # of any type: the other ranks must not wait for this one
        problem = error
    raise_together(problem, call, group)


def require_equal(
    what: str, facts: Sequence[str], fix: str, call: str = "distribute", group: Group | None = None
) -> None:
    """Raise on every rank unless ``what`` has the same facts on all ranks; a collective."""
    group = group or all_ranks()
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    if len(set(gather(call, digest, group))) == 1:
        return
    reference, *others = gather(call, list(facts), group)
    other, facts_there = next(
        each for each in zip(group.members[1:], others, strict=True) if each[1] != reference
    )
    error = RanksDisagreeError(
        f"the {what} of rank {other} differs from that of rank {group.first}: "
        f"{_first_difference(reference, facts_there, group.first, other)}; {fix}"
    )
    raise mark_as_shown_by(error, group.first)


def _portable(problem: Exception | None) -> Exception | None:
    """The problem as an exception that ``encode`` takes and other ranks can raise."""
    if problem is None:
        return None
    if isinstance(problem, OSError):
        return OSError(problem.errno, problem.strerror or str(problem), problem.filename)
    known = next((k for k in (*_KEPT[::-1], HvkitError) if isinstance(problem, k)), None)
    return known(str(problem)) if known else HvkitError(f"{type(problem).__name__}: {problem}")


def _first_difference(reference: list[str], facts: list[str], first: int, other: int) -> str:
    for expected, fact in zip(reference, facts, strict=False):
        if fact != expected:
            return f"{fact} on rank {other}, but {expected} on rank {first}"
    longer, owner = (facts, other) if len(facts) > len(reference) else (reference, first)
    extra = longer[min(len(facts), len(reference))]
    return (
        f"{len(facts)} entries on rank {other}, {len(reference)} on rank {first}; "
        f"only rank {owner} has {extra}"
    )


def pickled(obj: Any) -> bytes:
    """A 1 and the pickled object; or a 0 and the text of an error for every rank to raise."""
    try:
        return b"\1" + pickle.dumps(obj)
    except Exception as error:  # pickle raises several kinds, and objects any of their own
        text = f"{type(error).__name__}: {error}"
        if "spans non-addressable" in text:  # of JAX
            text = (
                "it holds an array that is divided among the ranks: gather it first, "
                "jax.experimental.multihost_utils.process_allgather(array, tiled=True)"
            )
        return b"\0" + text.encode()


def unpickled(data: Any, source: int) -> Any:
    if not data[0]:
        text = bytes(data[1:]).decode()
        raise TypeError(f"the object that rank {source} passes does not pickle: {text}")
    return pickle.loads(memoryview(data)[1:])


def _gather_bytes(payload: bytes, group: Group) -> list[Any]:
    """All members' bytes, in rank order, by allgathers of at most ``CHUNK`` bytes in total."""
    allgather, within = group.engine.allgather, group.process_set
    limit = engines.CHUNK // group.size
    sent = np.frombuffer(len(payload).to_bytes(8, "little") + payload[: limit - 8], np.uint8)
    gathered, start = allgather(sent, within), 0
    found: list[Any] = []
    for _ in group.members:
        length = int.from_bytes(gathered[start : start + 8].tobytes(), "little")
        found.append(np.empty(length, np.uint8))
        part = found[-1][: limit - 8]
        part[:] = gathered[start + 8 : start + 8 + part.size]
        start += 8 + part.size
    # Most payloads fit into the first message. For the rest, every rank now has the lengths.
    rest = np.frombuffer(payload, np.uint8)
    for done in range(limit - 8, max(each.size for each in found), limit):
        gathered, start = allgather(rest[done : done + limit], within), 0
        for each in found:
            part = each[done : done + limit]
            part[:] = gathered[start : start + part.size]
            start += part.size
    return found


def collect(call: str, obj: Object) -> Iterator[Object]:
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


def scatter(call: str, make: Callable[[int], Object], root: int = 0) -> Object:
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
    return cast(Object, for_this_rank)


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
