"""Copies of the newest checkpoint in the memory of other hosts, for restarts by ``hvkit run``.

Rank 0 sends each checkpoint that is complete on its disk to the first rank of some other hosts, the
holders. It sends the names of the files and their lengths; the holder answers whether it has enough
memory; if so, rank 0 sends the bytes, and the holder answers again. A thread there keeps them as
files below ``/dev/shm``, which outlive the ranks. They are stored as in a directory on disk, with
manifest, lock and renaming (``store``), so here, too, a kill at any moment leaves the newest
complete checkpoint. After a restart the ranks load the copy, so they need neither the disk nor the
host of rank 0 (``newest_checkpoint``).

The copies belong to one run of ``hvkit run`` with all its restarts, which deletes them at its end.
If ``hvkit run`` itself was killed, the next run with copies on that host deletes them a day later.

Similar: Wang et al., "GEMINI: Fast Failure Recovery in Distributed Training with In-Memory
Checkpoints" (SOSP 2023).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from hvkit import runtime, threads
from hvkit.checkpoint import store
from hvkit.communication import collectives
from hvkit.errors import HvkitError
from hvkit.host.hardware import free_memory
from hvkit.host.run_reports import memory_folder, report
from hvkit.log import logger
from hvkit.watch import channel

# Seconds for the other end to take a piece, and to answer.
_PATIENCE = 60
# Seconds that the first save waits for the holders to connect.
_CONNECTED = 10.0
# Seconds before a holder that cannot reach rank 0 tries again.
_AGAIN = 10.0
# Bytes of a message.
_PIECE = 1 << 20
# The largest part of the free memory for a copy: the ranks need some as well.
_MOST = 0.9
# Seconds without a save after which copies count as left behind by a killed run.
_ABANDONED = 24 * 3600.0


class Replicas:
    """The copies of the newest checkpoint in rank 0's directory, on ``number`` other hosts."""

    def __init__(self, directory: Path, number: int) -> None:
        self.number = number
        self._directory = directory
        self._opened = False
        self._hosts: dict[int, str] = {}
        self._links: dict[int, Connection] = {}
        self._late: set[int] = set()
        self._patience = _CONNECTED
        self._listener: channel.RankListener | None = None
        # Guards these.
        self._changed = threading.Condition()

    @property
    def folder(self) -> Path | None:
        """Where this host keeps copies of the directory's checkpoints; None if it keeps none."""
        if (root := memory_folder()) is None or not self.number:
            return None
        return root / store.id_of(self._directory)

    def open(self, call: str) -> None:
        """Connect rank 0 to the hosts that keep the copies, once; a collective."""
        if self._opened or not self.number:
            return
        self._opened = True
        own = (self.folder is not None, runtime.local_rank(), socket.gethostname())
        by_rank = list(enumerate(collectives.gather(call, own)))
        others = {rank: host for rank, (_, local, host) in by_rank if rank and local == 0}
        restarts = all(restarts for _, (restarts, _, _) in by_rank)
        if restarts:
            self._hosts = dict(list(others.items())[: self.number])
        if runtime.rank() == 0 and len(self._hosts) < self.number:
            _log_fewer(self.number, len(others), restarts=restarts)
        if not self._hosts:
            return
        problem, endpoint = None, ""
        if runtime.rank() == 0:
            try:
                self._listener = channel.RankListener(one_host=False, patience=_PATIENCE)
                endpoint = self._listener.endpoint.to_json()
                threads.start("hvkit-replicas", self._listener.serve, self._admit)
            except OSError as error:
                problem = error
        endpoint = collectives.gather_or_raise(call, problem, endpoint)[0]
        if runtime.rank() in self._hosts and self.folder is not None:
            rank_0 = channel.Endpoint.from_json(endpoint)
            threads.start("hvkit-replicas", _receive_from_rank_0, rank_0, self.folder)

    def send(self, folder: Path) -> None:
        """Send a complete checkpoint to all holders; on rank 0. Nobody may delete it meanwhile.

        If a host does not keep it, rank 0 logs why, and training continues.
        """
        with self._changed:
            self._changed.wait_for(self._are_complete, self._patience)
            self._patience = 0.0
            links = {rank: self._links.get(rank) for rank in self._hosts}
        for rank, link in links.items():
            fails = f"{self._hosts[rank]} keeps no copy of {folder}"
            if link is None:
                if rank not in self._late:
                    logger.warning(
                        "%s: rank %d there has not connected yet; once it has, it gets the next",
                        *(fails, rank),
                    )
                self._late.add(rank)
                continue
            try:
                problem = send_checkpoint(link, folder)
            except (LinkError, OSError) as error:  # a holder that waits for the rest is dropped
                self._drop(rank)
                if isinstance(error, LinkError):
                    problem = f"rank {rank} there {error}"
                else:
                    problem = f"rank 0 cannot read it again ({error.strerror or error})"
                problem += "; it gets no more copies until a restart"
            if problem:
                logger.warning("%s: %s", fails, problem)

    def _are_complete(self) -> bool:
        return self._links.keys() >= self._hosts.keys()

    def _admit(self, rank: int, connection: Connection) -> None:
        with self._changed:
            if rank not in self._hosts:
                connection.close()
                return
            self._links[rank] = connection
            self._stop_listening_if_complete()
            self._changed.notify_all()

    def _drop(self, rank: int) -> None:
        with self._changed:
            del self._hosts[rank]
            self._links.pop(rank).close()
            self._stop_listening_if_complete()

    def _stop_listening_if_complete(self) -> None:
        if self._listener is not None and self._are_complete():
            self._listener.close()
            self._listener = None


def _log_fewer(wanted: int, others: int, *, restarts: bool) -> None:
    if not restarts:
        reason = (
            "no copies are kept, because only restarts need them: start the script with `hvkit run "
            "--max-restarts`"
        )
    elif not others:
        reason = "no copies are kept, because all ranks are on one host"
    else:
        reason = f"fewer copies are kept, because the ranks are on {others + 1} hosts"
    logger.info("replicas=%d: %s", wanted, reason)


def _receive_from_rank_0(endpoint: channel.Endpoint, folder: Path) -> None:
    _delete_abandoned(folder.parent)
    while (connection := channel.connect(endpoint, runtime.rank(), _PATIENCE)) is None:
        time.sleep(_AGAIN)
    receive_checkpoints(connection, folder)


class LinkError(HvkitError):
    """The other end cannot receive or send a checkpoint any more; the text describes why."""


def send_checkpoint(connection: Connection, folder: Path) -> str:
    """Send a checkpoint to a holder; return why it does not keep it, or nothing.

    LinkError if the holder is gone, silent or sends no answer; OSError if a file cannot be read.
    """
    files = sorted(folder.iterdir())
    lengths = {file.name: file.stat().st_size for file in files}
    with _link():
        channel.send(connection, {"name": folder.name, "files": lengths})
    if refusal := _answer(connection):
        return refusal
    for each in files:
        with each.open("rb") as file:
            while piece := file.read(_PIECE):
                with _link():
                    connection.send_bytes(piece)
    return _answer(connection)


def _answer(connection: Connection) -> str:
    """Why the holder does not keep a checkpoint; empty if it does."""
    with _link():
        if not connection.poll(_PATIENCE):
            raise TimeoutError
        return str(channel.receive(connection)["problem"])


def receive_checkpoints(connection: Connection, folder: Path) -> None:
    """Keep the newest checkpoint that rank 0 sends, in a folder for it only, until rank 0 ends."""
    # A LinkError: rank 0 has ended, or will report that this host keeps no more copies.
    with connection, contextlib.suppress(LinkError):
        while True:
            receive_checkpoint(connection, folder)


def receive_checkpoint(connection: Connection, folder: Path) -> None:
    """Wait for a checkpoint, answer whether there is room, and keep it instead of the one before.

    LinkError if rank 0 is gone, silent within a checkpoint, or sends something else.
    """
    with _link():
        connection.poll(None)
        order = channel.receive(connection)
    match order:
        case {"name": str(name), "files": dict(lengths)} if store.is_name(name) and all(
            "/" not in file and file.strip(".") and type(length) is int and length >= 0
            for file, length in lengths.items()
        ):
            pieces = _received(connection, lengths)
        case _:
            raise LinkError("sent a message with no checkpoint")

    def answer(problem: str) -> None:
        with _link():
            channel.send(connection, {"problem": problem})

    refusal = _refusal(folder, sum(lengths.values()))
    answer(refusal)
    if refusal:
        return
    problem = ""
    try:
        with store.new_folder(folder, name) as target:
            for file, piece in pieces:
                with (target / file).open("ab") as out:
                    out.write(piece)
            # A file that rank 0's disk has damaged must not replace a complete copy.
            store.verify(target, store.read(target))
        store.prune(folder, 1, name)
        os.utime(folder.parent)
    except store.DamagedError as error:
        problem = f"what rank 0 has sent is damaged: {error}"
    except OSError as error:
        problem = _reason(error, folder)
    for _ in pieces:  # after an error
        pass
    answer(problem)


def _refusal(folder: Path, needed: int) -> str:
    """Why this host cannot keep a checkpoint of so many bytes; empty if it can.

    Makes the folder for it, and deletes what a killed try has left.
    """
    report(replica=True)  # first, so that `hvkit run` deletes the folder at its end
    try:
        require_own(folder.parent)
        store.prepare(folder)
        # Data loaders and MPI keep files in /dev/shm, too.
        free = min(free_memory(), shutil.disk_usage(folder).free)
    except OSError as error:
        return _reason(error, folder)
    if needed <= _MOST * free:
        return ""
    return (
        f"it has {needed:,} bytes, and {free:,} bytes of memory are free there, of which hvkit "
        f"uses at most {_MOST:.0%}"
    )


def _received(connection: Connection, lengths: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """Yield the files' bytes in pieces, each with the file's name; LinkError if more come."""
    for name, left in lengths.items():
        yield name, b""
        while left > 0:
            with _link():
                piece = connection.recv_bytes(_PIECE)
            left -= len(piece)
            if left < 0:
                raise LinkError(f"sent {-left} bytes more of {name} than it had announced")
            yield name, piece


@contextlib.contextmanager
def _link() -> Iterator[None]:
    """Turn errors of a connection into ``LinkError``: errors of files have the same types."""
    try:
        yield
    except (BlockingIOError, TimeoutError):  # the first by the socket's own limit
        raise LinkError(f"has not answered for {_PATIENCE} s") from None
    except (EOFError, ConnectionError):
        raise LinkError("has closed the connection") from None
    except OSError as error:
        raise LinkError(f"cannot be reached any more ({error.strerror or error})") from None
    except (ValueError, KeyError):
        raise LinkError("has sent something that is no answer") from None


def _reason(error: OSError, folder: Path) -> str:
    return f"{error.strerror or error} ({folder.parent})"


def require_own(root: Path) -> None:
    """Make a run's folder in memory, which only this user may enter; else PermissionError."""
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "it is no folder that only you can enter", str(root))


def _delete_abandoned(own: Path) -> None:
    """Delete copies that killed runs have left in this host's memory, but for ``own``."""
    for root in own.parent.glob("hvkit-run-*"):
        with contextlib.suppress(OSError):  # someone else's, or gone
            old = root.lstat()
            idle = time.time() - old.st_mtime > _ABANDONED and old.st_uid == os.geteuid()
            if idle and root != own and not any(map(_is_locked, root.glob("*/.lock"))):
                shutil.rmtree(root)


def _is_locked(path: Path) -> bool:
    from filelock import FileLock, Timeout  # see the import in store

    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True
