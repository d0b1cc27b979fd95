"""Copies of the newest checkpoint in the memory of other hosts, for restarts by ``hvkit run``.

Rank 0 sends each checkpoint that is complete on its disk over a socket to the first rank of some
other hosts. A thread there keeps it as files below ``/dev/shm``, which outlive the ranks. Folder,
manifest, lock and renaming are those of a directory on disk (``store``), so here, too, a kill at
any moment leaves the newest complete one. After a restart the ranks load from memory what the
directory lacks because its host is lost, and what would otherwise be read from a disk.

The copies belong to one run of ``hvkit run`` with all its restarts, which deletes them at its end.
Those of a run that was killed itself are deleted a day later, by the next run with copies there.

Similar: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints" (SOSP 2023).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.communication import collectives
from hvkit.errors import RanksDisagreeError, ranks_text
from hvkit.host.cpus import free_memory
from hvkit.host.run_reports import memory_folder, report
from hvkit.log import logger
from hvkit.watch import channel

# Bytes of a message to a holder, and of a broadcast.
_PIECE = 1 << 20
_BROUGHT = 1 << 24
# Seconds for a holder to take a piece, and to answer at the end.
_ANSWERS = 60
# Seconds for the holders to connect.
_CONNECTED = 10.0
# Of the free memory, at most so much for a copy: the ranks need some as well.
_MOST = 0.9
# Seconds without a save after which what a killed run has left behind is deleted.
_ABANDONED = 24 * 3600.0


class Replicas:
    """The copies of one directory's newest checkpoint.

    Args:
        directory: rank 0's directory.
        number: on how many other hosts to keep a copy; 0 for none.
    """

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._directory = directory
        self._opened = False
        self._hosts: dict[int, str] = {}
        self._links: dict[int, Connection] = {}
        self._listener: channel.Listener | None = None
        self._changed = threading.Condition()

    @property
    def folder(self) -> Path | None:
        """Where this host keeps copies of the directory's checkpoints.

        None if nobody wants copies, and in a run that is not started again.
        """
        if (root := memory_folder()) is None or not self.number:
            return None
        name = hashlib.sha256(str(self._directory.absolute()).encode()).hexdigest()[:16]
        return root / name

    def open(self, call: str) -> None:
        """Connect rank 0 to the hosts that keep the copies, once; a collective.

        Raises:
            RanksDisagreeError: the ranks want different numbers of copies.
        """
        if self._opened:
            return
        self._opened = True
        mine = (self.folder is not None, runtime.local_rank(), socket.gethostname())
        everyone = list(enumerate(self._from_all(call, mine)))
        if not self.number:
            return
        others = {rank: host for rank, (_, local, host) in everyone if rank and local == 0}
        why = ""
        if all(restarts for _, (restarts, _, _) in everyone):
            self._hosts = dict(list(others.items())[: self.number])
            if len(others) < self.number:
                why = "the ranks are on " + (f"{len(others) + 1} hosts" if others else "one host")
        else:
            why = "they serve restarts, and `hvkit run --max-restarts` has not started this run"
        if why and runtime.rank() == 0:
            logger.info("replicas=%d: keeps %d: %s", self.number, len(self._hosts), why)
        if not self._hosts:
            return
        problem, meeting = None, ""
        if runtime.rank() == 0:
            try:
                self._listener = channel.Listener(one_host=False, patience=_ANSWERS)
                meeting = self._listener.meeting.to_json()
                _in_thread(self._listener.serve, self._admit)
            except OSError as error:
                problem = error
        meeting = collectives.share(call, problem, meeting)[0]
        if runtime.rank() in self._hosts:
            _in_thread(self._hold, channel.Meeting.from_json(meeting))

    # Rank 0.

    def send(self, folder: Path) -> None:
        """Send a complete checkpoint to all holders. One that fails is an entry in the log.

        Args:
            folder: the checkpoint, which nobody may delete meanwhile.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._links.keys() >= self._hosts.keys(), _CONNECTED)
        for rank, host in list(self._hosts.items()):
            link = self._links.get(rank)
            try:
                if link is None:
                    raise TimeoutError(f"no connection within {_CONNECTED:g} s")
                problem = _sent(link, folder)
            except (ConnectionError, EOFError):  # its rank has ended, and with it the run
                problem = ""
                self._drop(rank)
            except (OSError, ValueError, KeyError) as error:
                problem = f"{ranks_text([rank])} takes no more of them until a restart: {error!r}"
                self._drop(rank)
            if problem:
                logger.warning("%s has no copy of %s: %s", host, folder, problem)

    def _drop(self, rank: int) -> None:
        del self._hosts[rank]
        if (link := self._links.pop(rank, None)) is not None:
            link.close()

    def _admit(self, rank: int, connection: Connection) -> None:
        with self._changed:
            self._links[rank] = connection
            if self._links.keys() >= self._hosts.keys() and self._listener is not None:
                self._listener.close()
            self._changed.notify_all()

    # The holders.

    def _hold(self, meeting: channel.Meeting) -> None:
        """Keep what rank 0 sends, until it ends."""
        folder = self.folder
        connection = channel.connect(meeting, runtime.rank(), _ANSWERS)
        if connection is None or folder is None:
            return  # rank 0 misses this holder, and says so
        _delete_abandoned(folder.parent)
        try:
            while connection.poll(None):
                order = channel.receive(connection)
                problem = _take(connection, folder, order)
                if not problem:
                    report(replica=True)
                channel.send(connection, {"problem": problem})
        except (OSError, EOFError, ValueError):
            connection.close()

    # All ranks.

    def require_same_number(self, call: str) -> None:
        """Raise on every rank unless all want the same number of copies; a collective.

        Raises:
            RanksDisagreeError: names the numbers of two ranks.
        """
        self._from_all(call, ())

    def _from_all(self, call: str, mine: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """What each rank has passed; an error on every rank if they want different numbers."""
        numbers, everyone = zip(*collectives.gather(call, (self.number, mine)), strict=True)
        for rank, number in enumerate(numbers):
            if number != numbers[0]:
                raise RanksDisagreeError(
                    f"Checkpoint needs the same replicas= on every rank: rank 0 has {numbers[0]}, "
                    f"rank {rank} has {number}"
                )
        return list(everyone)


def _in_thread(target: Callable[..., None], argument: Any) -> None:
    threading.Thread(target=target, args=(argument,), name="hvkit-replicas", daemon=True).start()


def _sent(connection: Connection, folder: Path) -> str:
    """Send a checkpoint; return why the other end does not have it, or nothing.

    Raises:
        OSError, EOFError, ValueError, KeyError: the other end is gone, or is no holder.
    """
    files = sorted(folder.iterdir())
    lengths = {file.name: file.stat().st_size for file in files}
    channel.send(connection, {"name": folder.name, "files": lengths})
    for each in files:
        with each.open("rb") as file:
            while piece := file.read(_PIECE):
                connection.send_bytes(piece)
    if not connection.poll(_ANSWERS):
        raise TimeoutError(f"no answer within {_ANSWERS:g} s")
    return str(channel.receive(connection)["problem"])


def _take(connection: Connection, folder: Path, order: dict[str, Any]) -> str:
    """Receive a checkpoint and keep it in this folder alone; return why not, or nothing.

    Raises:
        OSError, EOFError: the other end is gone.
        ValueError: it has sent something else.
    """
    match order:
        case {"name": str(name), "files": dict(lengths)} if store.is_name(name) and all(
            "/" not in file and file.strip(".") and type(length) is int and length >= 0
            for file, length in lengths.items()
        ):
            pieces = _received(connection, lengths)
        case _:
            raise ValueError("a message with no checkpoint")

    def fill(target: Path) -> None:
        for file, piece in pieces:
            with (target / file).open("ab") as out:
                out.write(piece)

    problem = ""
    try:
        require_own(folder.parent)
        store.prepare(folder)  # deletes what a killed try has left, too
        needed, free = sum(lengths.values()), _free(folder)
        if needed > _MOST * free:
            why = f"it needs {needed:,} bytes of memory, {free:,} are free, and some must stay so"
            raise OSError(errno.ENOMEM, why)
        store.write_folder(folder, name, fill)
        store.prune(folder, 1, name)
        os.utime(folder.parent)
    except OSError as error:
        problem = f"{error.strerror or error} ({folder.parent})"
    for _ in pieces:  # after an error
        pass
    return problem


def _free(folder: Path) -> int:
    """Bytes that a copy could take; data loaders and MPI keep files in ``/dev/shm``, too."""
    return min(free_memory(), shutil.disk_usage(folder).free)


def _received(connection: Connection, lengths: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    for name, left in lengths.items():
        yield name, b""
        while left > 0:
            piece = connection.recv_bytes(_PIECE)
            left -= len(piece)
            if left < 0:
                raise ValueError(f"{name}: {-left} bytes more than were announced")
            yield name, piece


def require_own(root: Path) -> None:
    """Make a run's folder in memory, which is for this user alone.

    Raises:
        PermissionError: it is someone else's.
    """
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "it is not a folder of this user alone", str(root))


def _delete_abandoned(own: Path) -> None:
    """Delete what runs that were killed have left behind in this host's memory."""
    for root in own.parent.glob("hvkit-run-*"):
        with contextlib.suppress(OSError):  # someone else's, or gone
            old = root.lstat()
            idle = time.time() - old.st_mtime > _ABANDONED and old.st_uid == os.geteuid()
            if idle and root != own and not any(map(_is_locked, root.glob("*/.lock"))):
                shutil.rmtree(root)


def _is_locked(path: Path) -> bool:
    from filelock import FileLock, Timeout  # see the import in store

    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False
