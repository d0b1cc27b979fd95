"""Sends a checkpoint from rank 0 to the memory of another host, over a socket.

Rank 0 sends the names of the files and their lengths. The holder, the first rank of the other host,
answers whether it has enough memory; if so, rank 0 sends the bytes, and the holder answers again.
It keeps the files below ``/dev/shm``. Folder, manifest, lock and renaming are those of a directory
on disk (``store``), so here, too, a kill at any moment leaves the newest complete checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from hvkit.checkpoint import manifests, store
from hvkit.errors import HvkitError
from hvkit.host.cpus import free_memory
from hvkit.host.run_reports import report
from hvkit.watch import channel

PATIENCE = 60
"""Seconds for the other end to take a piece, and to answer."""

# Bytes of a message.
_PIECE = 1 << 20
# The largest part of the free memory for a copy: the ranks need some as well.
_MOST = 0.9
# Seconds without a save after which copies count as left behind by a killed run.
_ABANDONED = 24 * 3600.0


class LinkError(HvkitError):
    """The other end cannot receive or send a checkpoint any more; the text describes why."""


def give(connection: Connection, folder: Path) -> str:
    """Send a checkpoint; return why the holder does not keep it, or nothing.

    Args:
        connection: to the holder.
        folder: the checkpoint, which nobody may delete meanwhile.

    Raises:
        LinkError: the holder is gone, is silent or sends something else than an answer.
        OSError: the checkpoint cannot be read.
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


def keep(connection: Connection, folder: Path) -> None:
    """Keep the newest checkpoint that rank 0 sends, until it ends.

    Args:
        connection: to rank 0.
        folder: for this checkpoint only, in the run's folder.
    """
    # A LinkError: rank 0 has ended, or will report that this host keeps no more copies.
    with connection, contextlib.suppress(LinkError):
        while True:
            take(connection, folder)


def take(connection: Connection, folder: Path) -> None:
    """Wait for a checkpoint, answer whether there is room, and keep it instead of the one before.

    Raises:
        LinkError: rank 0 is gone, is silent within a checkpoint, or sends something else.
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

    def fill(target: Path) -> None:
        for file, piece in pieces:
            with (target / file).open("ab") as out:
                out.write(piece)
        # A file that rank 0's disk has damaged must not replace a complete copy.
        manifests.verify(target, manifests.read(target))

    problem = ""
    try:
        _make_room(folder, sum(lengths.values()))
        with _link():
            channel.send(connection, {"problem": ""})
        store.write_folder(folder, name, fill)
        store.prune(folder, 1, name)
        os.utime(folder.parent)
    except _NoRoomError as error:
        with _link():
            channel.send(connection, {"problem": str(error)})
        return
    except manifests.DamagedError as error:
        problem = f"what rank 0 has sent is damaged: {error}"
    except OSError as error:
        problem = _reason(error, folder)
    for _ in pieces:  # after an error
        pass
    with _link():
        channel.send(connection, {"problem": problem})


class _NoRoomError(HvkitError):
    """This host cannot keep a checkpoint; the text gives the reason."""


def _make_room(folder: Path, needed: int) -> None:
    """Make the folder for a checkpoint of so many bytes, and delete what a killed try has left.

    Raises:
        _NoRoomError: it cannot be made, or the memory is too small.
    """
    report(replica=True)  # first, so that `hvkit run` deletes the folder at its end
    try:
        require_own(folder.parent)
        store.prepare(folder)
        # Data loaders and MPI keep files in /dev/shm, too.
        free = min(free_memory(), shutil.disk_usage(folder).free)
    except OSError as error:
        raise _NoRoomError(_reason(error, folder)) from None
    if needed > _MOST * free:
        raise _NoRoomError(
            f"it has {needed:,} bytes, and {free:,} bytes of memory are free there, of which hvkit "
            f"uses at most {_MOST:.0%}"
        )


def _received(connection: Connection, lengths: dict[str, int]) -> Iterator[tuple[str, bytes]]:
    """Yield the files' bytes in pieces, each with the file's name.

    Raises:
        LinkError: rank 0 is gone or silent, or sends more bytes than it has announced.
    """
    for name, left in lengths.items():
        yield name, b""
        while left > 0:
            with _link():
                piece = connection.recv_bytes(_PIECE)
            left -= len(piece)
            if left < 0:
                raise LinkError(f"sent {-left} bytes more of {name} than it had announced")
            yield name, piece


def _answer(connection: Connection) -> str:
    """Why the holder does not keep a checkpoint; empty if it does."""
    with _link():
        if not connection.poll(PATIENCE):
            raise TimeoutError
        return str(channel.receive(connection)["problem"])


@contextlib.contextmanager
def _link() -> Iterator[None]:
    """Turn the errors of a connection into ``LinkError``: those of files are of the same types."""
    try:
        yield
    except (BlockingIOError, TimeoutError):  # the first by the socket's own limit
        raise LinkError(f"has not answered for {PATIENCE} s") from None
    except (EOFError, ConnectionError):
        raise LinkError("has closed the connection") from None
    except OSError as error:
        raise LinkError(f"cannot be reached any more ({error.strerror or error})") from None
    except (ValueError, KeyError):
        raise LinkError("has sent something that is no answer") from None


def _reason(error: OSError, folder: Path) -> str:
    return f"{error.strerror or error} ({folder.parent})"


def require_own(root: Path) -> None:
    """Make a run's folder in memory, which only this user may enter.

    Raises:
        PermissionError: someone else has made it.
    """
    with contextlib.suppress(FileExistsError):
        root.mkdir(mode=0o700)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "it is no folder that only you can enter", str(root))


def delete_abandoned(own: Path) -> None:
    """Delete copies that killed runs have left behind in this host's memory.

    Args:
        own: this run's folder there, which stays.
    """
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
