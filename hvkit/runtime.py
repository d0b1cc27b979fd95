"""Ranks, and the collectives on Python objects that everything else is built from.

With one process nothing is started and every collective is the identity. With several, Horovod is
started on first use, through the library of the framework that the script has imported.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from hvkit import messages, watch
from hvkit.engines import ENGINES, Engine, built_for
from hvkit.errors import HvkitError, LaunchError, RanksDisagreeError
from hvkit.host import mca
from hvkit.host.commands import program
from hvkit.host.network import within_host
from hvkit.host.rank_variables import launch_id, launched
from hvkit.watch import calls
from hvkit.watch.calls import named
from hvkit.watch.failures import mark_as_shown_by
from hvkit.watch.verdict import SAME_CALLS

T = TypeVar("T")

# MPI counts elements in a C int, so longer messages go out in pieces. In bytes.
_CHUNK = 1 << 28


@dataclass(frozen=True)
class _World:
    rank: int
    size: int
    local_rank: int
    local_size: int
    of_parent: bool = False
    """Whether this is a process that a rank has started, as data loaders do."""


# Tells the processes that a rank starts that they are not ranks themselves.
_MARK = "HVKIT_RANK"

_world: _World | None = None
_engines: dict[str, Engine] = {}


def init(framework: str | None = None) -> None:
    """Start Horovod, if this process is one of several ranks, and pin it to its GPU.

    Calling it again does nothing. :func:`hvkit.distribute` calls it; call it yourself, right
    after the imports, where something before that needs the rank, or where TensorFlow has more
    than one GPU on a host.

    Args:
        framework: ``"torch"`` or ``"tensorflow"``; by default the one that is imported already.

    Raises:
        ValueError: unknown framework.
        HorovodNotFoundError: several ranks were launched, but there is no usable Horovod.
        LaunchError: Horovod sees another number of ranks than were launched, or there are more
            ranks on this host than GPUs.
    """
    if framework is not None and framework not in ENGINES:
        raise ValueError(f"framework must be one of {sorted(ENGINES)}, got {framework!r}")
    world = _world or _join(framework)
    if world.size > 1 and framework is not None and framework not in _engines:
        _engines[framework] = _start(framework, world)


def _became_child() -> None:
    """A fork of a rank is no rank: its copy of Horovod has no threads and reaches nobody."""
    global _world
    if _world is not None and _world.size > 1:
        _world = replace(_world, of_parent=True)


os.register_at_fork(after_in_child=_became_child)


def _join(framework: str | None = None) -> _World:
    """Find out who we are; starts Horovod if there are several ranks."""
    global _world
    if (parent := _rank_of_parent()) is not None:
        _world = parent
        return _world
    announced = launched(os.environ)
    if announced is None or announced.size == 1:
        _world = _World(rank=0, size=1, local_rank=0, local_size=1)
        return _world
    # Horovod's background thread waits inside MPI. Without this, it spins there at full speed on
    # a core that the framework computes on. Read by Open MPI when it starts.
    os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    # Horovod's own check knows tensors, not the lines of the script: hvkit.watch has one that does.
    if not any(name.startswith("HOROVOD_STALL_") for name in os.environ):
        os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    _keep_open_mpi_off_containers()
    framework = framework or _imported_framework()
    with watch.starting():
        engine = ENGINES[framework]()
    hvd = engine.hvd
    if hvd.size() != announced.size:
        raise LaunchError(
            f"{announced.launcher} launched {announced.size} processes, but Horovod sees "
            f"{hvd.size()}: it was built for another MPI than this {announced.launcher} belongs "
            "to. Rebuild it with: hvkit install-horovod --force"
        )
    _world = _World(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
    engine.take_device(_world.local_rank, _world.local_size)
    _engines[framework] = engine
    numbers = (_world.rank, _world.size, _world.local_rank, _world.local_size)
    os.environ[_MARK] = json.dumps([launch_id(os.environ), *numbers])
    watch.start(
        _world.rank,
        _world.size,
        one_host=_world.local_size == _world.size,
        from_rank_0=broadcast,
        shut_down=_shut_down,
    )
    return _world


def _shut_down() -> None:
    """End all waits in Horovod, on all ranks."""
    for each in list(_engines.values()):
        each.shut_down()


def _keep_open_mpi_off_containers() -> None:
    """Have Open MPI not use networks within hosts, which it takes for ways to other hosts.

    Where docker0 has the same address on two hosts, their ranks would wait for ever. ``hvkit run``
    names the right network; this is for ranks that a bare mpirun started. What the user or the
    site has set counts.
    """
    names = within_host()
    if names and not mca.place_set(mca.RANKS, os.environ, program("mpirun")):
        # The first two are what Open MPI leaves out by default. It warns of names that are not
        # there, so only those that are here are added.
        exclude = f"{mca.RANKS.prefix}btl_tcp_if_exclude"
        os.environ[exclude] = ",".join(["127.0.0.1/8", "sppp", *names])


def _rank_of_parent() -> _World | None:
    """The rank that has started this process, if it was not launched as one itself."""
    mark = os.environ.get(_MARK)
    if mark is None:
        return None
    launch, *numbers = json.loads(mark)
    return replace(_World(*numbers), of_parent=True) if launch == launch_id(os.environ) else None


def _start(framework: str, world: _World) -> Engine:
    _refuse_in_child(world)
    engine = ENGINES[framework]()
    engine.take_device(world.local_rank, world.local_size)
    return engine


def _imported_framework() -> str:
    """The framework that the script has imported; else one that Horovod was built for."""
    for framework in ("torch", "tensorflow"):
        if framework in sys.modules:
            return framework
    return next(iter(built_for()), "torch")


def _joined() -> _World:
    return _world or _join()


def engine(framework: str) -> Engine:
    """The started engine of ``framework``; for adapters. Only with several ranks."""
    init(framework)
    return _engines[framework]


def _any_engine() -> Engine:
    _refuse_in_child(_joined())
    return next(iter(_engines.values()))


def _refuse_in_child(world: _World) -> None:
    if world.of_parent:
        raise LaunchError(
            f"this process was started by rank {world.rank} and is no rank itself: it knows its "
            "numbers, but cannot communicate; call hvkit.distribute and collectives under "
            'if __name__ == "__main__"'
        )


def rank() -> int:
    """This process's number among all ranks, from 0 to ``size() - 1``."""
    return _joined().rank


def size() -> int:
    """World size: the number of ranks on all hosts together."""
    return _joined().size


def local_rank() -> int:
    """This process's number among the ranks of its host, from 0 to ``local_size() - 1``."""
    return _joined().local_rank


def local_size() -> int:
    """The number of ranks on this host."""
    return _joined().local_size


def uses_mpi() -> bool:
    """Whether this rank runs MPI in its process: not under Gloo, nor in a process of a rank's."""
    return any(engine.hvd.mpi_enabled() for engine in _engines.values())


@named("hvkit.barrier")
def barrier() -> None:
    """Wait until every rank has come here."""
    gather("barrier", None)


@named("hvkit.broadcast")
def broadcast(obj: T, root: int = 0) -> T:
    """Return rank ``root``'s object on every rank.

    Args:
        obj: on rank ``root`` any object that pickles; elsewhere it is not looked at.
        root: the rank that sends.

    Raises:
        ValueError: there is no rank ``root``.
        TypeError: the object does not pickle; on every rank.
    """
    if not 0 <= root < size():
        raise ValueError(f"root must be a rank from 0 to {size() - 1}, got {root}")
    if size() == 1:
        return obj
    payload = _pickled((obj,)) if rank() == root else b""
    header = np.array([len(payload)], np.int64).view(np.uint8)
    length = int(broadcast_bytes(header, root).view(np.int64)[0])
    data = np.frombuffer(payload, np.uint8) if rank() == root else np.empty(length, np.uint8)
    received: T
    (received,) = _unpickled(broadcast_bytes(data, root), root)
    return obj if rank() == root else received


def broadcast_bytes(data: np.ndarray[Any, np.dtype[np.uint8]], root: int = 0) -> Any:
    """Return rank ``root``'s bytes on every rank; for adapters.

    Args:
        data: uint8 array of shape (n,), n the same on every rank.
        root: the rank that sends.
    """
    if size() == 1 or data.size == 0:
        return data
    send = _any_engine().broadcast
    pieces = [send(data[start : start + _CHUNK], root) for start in range(0, data.size, _CHUNK)]
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def allreduce_array(array: np.ndarray[Any, Any], op: str) -> np.ndarray[Any, Any]:
    """Reduce a flat array over the ranks, of which there are several; see ``Engine.allreduce``."""
    return _any_engine().allreduce(array, op)


@named("hvkit.allgather")
def allgather(obj: T) -> list[T]:
    """Return the objects of all ranks, in rank order, on every rank; they must pickle.

    Raises:
        RanksDisagreeError: another rank has come to another call that all ranks have to make.
        TypeError: the object of a rank does not pickle; on every rank.
    """
    return gather("allgather", obj)


def gather(call: str, obj: T) -> list[T]:
    """:func:`allgather` inside hvkit, under the name of what the user called."""
    if size() == 1:
        return [obj]
    with calls.call(call):
        place = calls.current_call(), calls.line_of_script(), call
        gathered = _gather_bytes(_pickled((*place, obj)))
    # Each goes when it is read: together they may be gigabytes.
    everyone: list[tuple[str, str, str, T]]
    everyone = [_unpickled(gathered.pop(0), rank) for rank in range(size())]
    first, first_line, first_point, _ = everyone[0]
    for other, (theirs, line, point, _) in enumerate(everyone):
        text = ""
        if theirs != first:
            text = f"rank {other} calls {theirs} ({line}) while rank 0 calls {first} ({first_line})"
        elif point != first_point:
            text = f"rank {other} is elsewhere in {first} ({line}) than rank 0 ({first_line})"
        if text:
            error = RanksDisagreeError(
                f"{text}: {SAME_CALLS}, also where only rank 0 prints or saves"
            )
            raise mark_as_shown_by(error, 0)
    return [each for *_, each in everyone]


def _pickled(message: tuple[Any, ...]) -> bytes:
    """The message, or what is wrong with it, which all ranks have to learn."""
    try:
        return pickle.dumps(message)
    except Exception as error:  # pickle raises several kinds, and objects any of their own
        return pickle.dumps(f"{type(error).__name__}: {error}")


def _unpickled(data: Any, source: int) -> Any:
    """The message of rank ``source``.

    Raises:
        TypeError: it did not pickle there.
    """
    message = pickle.loads(data)
    if isinstance(message, str):
        raise TypeError(f"what rank {source} passes does not pickle: {message}")
    return message


def _gather_bytes(payload: bytes) -> list[Any]:
    """All ranks' bytes, in rank order, by allgathers of at most ``_CHUNK`` bytes in all.

    Returns:
        uint8 arrays of shape (n,), n of each rank.
    """
    allgather, limit = _any_engine().allgather, _CHUNK // size()
    mine = np.frombuffer(len(payload).to_bytes(8, "little") + payload[: limit - 8], np.uint8)
    gathered, start = allgather(mine), 0
    everyone: list[Any] = []
    for _ in range(size()):
        length = int.from_bytes(gathered[start : start + 8].tobytes(), "little")
        everyone.append(np.empty(length, np.uint8))
        part = everyone[-1][: limit - 8]
        part[:] = gathered[start + 8 : start + 8 + part.size]
        start += 8 + part.size
    # Most fit into the first message. Of the rest, every rank now knows the lengths.
    rest = np.frombuffer(payload, np.uint8)
    for done in range(limit - 8, max(each.size for each in everyone), limit):
        gathered, start = allgather(rest[done : done + limit]), 0
        for each in everyone:
            part = each[done : done + limit]
            part[:] = gathered[start : start + part.size]
            start += part.size
    return everyone


def collect(call: str, obj: T) -> list[T]:
    """The objects of all ranks, in rank order, on rank 0; nothing on the others. A collective.

    Ranks send one after the other, in pieces, so that those besides rank 0 hold no more than a
    piece of what others send. Through MPI, or, where it does not run, by broadcasts.

    Args:
        call: what the user called.
        obj: it must pickle.

    Raises:
        HvkitError: rank 0 could not hold or read them; on every rank.
        RanksDisagreeError: another rank has come to another call that all ranks have to make.
    """
    if size() == 1:
        return [obj]
    mine = np.frombuffer(pickle.dumps(obj) if rank() else b"", np.uint8)
    everyone = gather(call, (mine.size, messages.can_send(_any_engine())))
    by_mpi = all(can_send for _, can_send in everyone)
    if by_mpi:
        messages.open_communicator()
    collected, problem = [obj], ""
    for source, (length, _) in enumerate(everyone[1:], start=1):
        pieces = _pieces(mine if rank() == source else None, length, source, by_mpi)
        if rank() == 0:
            try:
                received, start = np.empty(length, np.uint8), 0
                for piece in pieces:
                    received[start : start + piece.size] = piece
                    start += piece.size
                collected.append(pickle.loads(received.data))
            except Exception as error:
                problem = f"{type(error).__name__}: {error} ({length} bytes of rank {source})"
        for _ in pieces:
            pass  # after an error, too: that rank goes on sending
    if problem := broadcast(problem):
        raise HvkitError(f"rank 0 cannot bring together what the ranks have: {problem}")
    return collected if rank() == 0 else []


def _pieces(mine: Any, length: int, source: int, by_mpi: bool) -> Iterator[Any]:
    """The ``length`` bytes of rank ``source``, to be gone through by every rank; its own there."""
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        piece = np.empty(stop - start, np.uint8) if mine is None else mine[start:stop]
        if not by_mpi:
            piece = _any_engine().broadcast(piece, source)
        elif rank() == source:
            messages.send(piece, 0)
        elif rank() == 0:
            messages.receive(piece, source)
        yield piece
