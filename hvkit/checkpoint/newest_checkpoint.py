"""Finds the newest checkpoint on any host: ``Checkpoint.restore`` begins here.

Usually it is in rank 0's directory. In a run that ``hvkit run`` may start again, rank 0 may be on
another host than before, and hosts may be lost or new. So the first rank of every host looks for
the run's checkpoints in the directory on that host and, with ``replicas``, in its memory. It reads
only manifests. The ranks choose the newest of all; the rank that has it compares its files with the
manifest, and if one is damaged, they choose again. If all hosts share the directory, rank 0 reads
it. If rank 0's directory lacks the checkpoint, rank 0 writes it there while the ranks load it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.replicas import Replicas, require_own
from hvkit.checkpoint.store import Manifest
from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger

# Bytes of a broadcast.
_PIECE = 1 << 24

# A file or folder that a rank cannot read: a key, the same on all hosts that share it; its name in
# messages; and the reason.
_Skipped = tuple[str, str, str]


@sendable
@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and the rank that can read it."""

    rank: int
    host: str
    folder: Path
    in_memory: bool
    manifest: Manifest
    file: tuple[int, int]
    """Inode and time of the manifest's file, the same on all hosts that share a directory."""

    def __str__(self) -> str:
        return _named(self.folder, self.rank, self.host, in_memory=self.in_memory)


def find(directory: Path, replicas: Replicas, call: str) -> tuple[FoundCheckpoint, bool] | None:
    """The newest complete checkpoint, and whether rank 0's directory holds it; a collective.

    Rank 0 logs the damaged checkpoints that are skipped. If it cannot read its newest one, all
    ranks raise its HvkitError or OSError.
    """
    problem: Exception | None = None
    offers: list[FoundCheckpoint] = []
    skipped: list[_Skipped] = []
    try:
        for folder, in_memory in _folders_to_search(directory, replicas):
            _search(folder, offers, skipped, in_memory=in_memory)
    except Exception as error:  # any error: the other ranks must not wait for this one
        problem = error
    offers.sort(key=_order, reverse=True)
    by_rank = collectives.gather_or_raise(call, problem, skipped)
    # Hosts that share a directory skip the same checkpoints: log each once.
    of_all = {key: rest for of_rank in by_rank[::-1] for key, *rest in of_rank}
    for name, reason in of_all.values():
        _log_skipped(name, reason)
    found, damaged = _first_complete(offers, call)
    if found is None:
        if (of_all or damaged) and runtime.rank() == 0:
            logger.warning("no checkpoint can be read: starts from the beginning")
        return None
    return found, collectives.from_rank(0, _holds(directory, offers, found))


def _folders_to_search(directory: Path, replicas: Replicas) -> Iterator[tuple[Path, bool]]:
    """The folders in which this rank looks for checkpoints, and whether each is in memory."""
    for_host = bool(run_name()) and runtime.local_rank() == 0
    if runtime.rank() == 0 or for_host:
        yield directory, False
    if for_host and replicas.folder is not None:
        yield replicas.folder, True


def _search(
    folder: Path, offers: list[FoundCheckpoint], skipped: list[_Skipped], *, in_memory: bool
) -> None:
    rank, host, run = runtime.rank(), socket.gethostname(), run_name()
    in_directory_of_0 = rank == 0 and not in_memory

    def skip(path: Path, reason: str) -> None:
        name = _named(path, rank, host, in_memory=in_memory)
        skipped.append((f"{name if in_memory else path}: {reason}", name, reason))

    try:
        if in_memory and folder.exists():
            require_own(folder.parent)
        found = store.readable(
            folder, lambda path, reason: skip(path, f"damaged: {reason}"), strict=in_directory_of_0
        )
        for path, manifest in found:
            with suppress(OSError):  # it was deleted since it was read
                status = (path / store.MANIFEST).stat()
                file = status.st_ino, status.st_mtime_ns
                if in_directory_of_0 or manifest.run == run:
                    offers.append(FoundCheckpoint(rank, host, path, in_memory, manifest, file))
    except (OSError, HvkitError) as error:
        if in_directory_of_0:
            raise
        # Other hosts may have a checkpoint.
        why = (error.strerror if isinstance(error, OSError) else "") or str(error)
        skip(folder, f"cannot be read: {why}")


def _order(found: FoundCheckpoint) -> tuple[Any, ...]:
    """A sort key that is larger for newer checkpoints.

    Those of this run count as newer than any of another run in rank 0's directory. Of several
    copies, the ranks load one in memory rather than one on a disk, and otherwise rank 0's.
    """
    manifest = found.manifest
    own = bool(run_name()) and manifest.run == run_name()
    return own, manifest.saves if own else 0, found.in_memory, manifest.serial, -found.rank


def _first_complete(
    offers: list[FoundCheckpoint], call: str
) -> tuple[FoundCheckpoint | None, bool]:
    """The newest complete checkpoint of all, and whether a newer one is damaged; a collective."""
    damaged = False
    while True:
        by_rank = collectives.gather(call, offers[0] if offers else None)
        offered = [each for each in by_rank if each is not None]
        if not offered:
            return None, damaged
        found = max(offered, key=_order)
        reason = _damage(found, call)
        if not reason:
            return found, damaged
        damaged = True
        _log_skipped(str(found), f"damaged: {reason}")
        offers = [each for each in offers if each.file != found.file]


def _damage(found: FoundCheckpoint, call: str) -> str:
    """The damage in a checkpoint, empty if there is none; a collective: its rank reads the files.

    OSError if rank 0 may not read its directory: loading an older checkpoint would hide that.
    """
    problem, reason = None, ""
    if runtime.rank() == found.rank:
        try:
            store.verify(found.folder, found.manifest)
        except store.DamagedError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = error if found.rank == 0 and not found.in_memory else None
    return collectives.gather_or_raise(call, problem, reason)[found.rank]


def _holds(directory: Path, offers: list[FoundCheckpoint], found: FoundCheckpoint) -> bool:
    """Whether rank 0's directory holds a checkpoint; True on other ranks.

    Rank 0 logs that it leaves out what another run has saved there.
    """
    if runtime.rank():
        return True
    listed = [each for each in offers if not each.in_memory]
    wanted = replace(found.manifest, serial=0)
    for each in listed:
        # The files of the same checkpoint on disk were not read when the copy in memory was chosen.
        if replace(each.manifest, serial=0) == wanted and not store.wrong_length(
            each.folder, each.manifest
        ):
            return True
    newest = max((each.manifest for each in listed), key=lambda each: each.serial, default=None)
    if newest is not None and newest.run != found.manifest.run:
        logger.warning("%s: leaves out the checkpoints of another run", directory)
    return False


def _log_skipped(name: str, reason: str) -> None:
    if runtime.rank() == 0:
        logger.warning("skipped %s: %s", name, reason)


def _named(folder: Path, rank: int, host: str, *, in_memory: bool) -> str:
    if in_memory:
        return f"{folder.name} from the memory of {host}"
    return f"{folder} on {host}" if rank else str(folder)


@contextmanager
def copied_to(
    directory: Path, found: FoundCheckpoint, call: str
) -> Iterator[Callable[[str, memoryview], None]]:
    """While the ranks load a checkpoint, write it into rank 0's directory as its newest.

    Yields a function that every rank calls with the name and the content of each file that it has
    received. So no file is sent twice: at the end of the block, which is a collective, rank 0
    receives only the others. If rank 0 cannot write, it logs that, and the run resumes
    nevertheless. After an error in the block the directory is as it was. OSError at the end, on
    every rank, if a rank cannot read the checkpoint.
    """
    problem: Exception | None = None  # why rank 0 cannot write
    folder: Path | None = None
    manifest = found.manifest
    received: set[str] = set()

    def append(name: str, content: Any) -> None:
        nonlocal problem
        received.add(name)
        if folder is None or problem is not None:
            return
        try:
            with (folder / name).open("ab") as file:
                file.write(content)
        except OSError as error:
            problem = error

    with ExitStack() as stack:
        if runtime.rank() == 0:
            try:
                # Checkpoints of other runs there may have larger serials.
                serial, _ = store.prepare(directory)
                manifest = replace(manifest, serial=max(manifest.serial, serial + 1))
                made = store.new_folder(directory, store.name_of(manifest.step))
                folder = stack.enter_context(made)
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = error
        yield append
        unreadable: Exception | None = None
        try:
            for name, piece in _pieces(found, received):
                append(name, piece)
        except OSError as error:  # on every rank
            unreadable = error
        if runtime.rank() == 0:
            try:
                with stack.pop_all():
                    if failed := unreadable or problem:
                        raise failed
                    assert folder is not None
                    if reason := store.wrong_length(folder, manifest):
                        raise OSError(errno.EIO, reason)
                    for name in manifest.files:
                        store.flush(folder / name)
                    manifest.write(folder)
            except Exception as error:  # any error: the other ranks must not wait for this one
                if unreadable is not None or not isinstance(error, OSError):
                    unreadable = error
                else:
                    logger.warning(
                        "cannot write %s into %s: %s; the run resumes from it all the same",
                        *(found, directory, error.strerror or error),
                    )
        collectives.gather_or_raise(call, unreadable, None)


def _pieces(found: FoundCheckpoint, received: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the files that rank 0 has not received, in pieces with their names; a collective.

    OSError on every rank if the checkpoint's rank cannot read it.
    """
    for name, facts in found.manifest.files.items():
        if name in received:
            continue
        for start in range(0, max(facts["bytes"], 1), _PIECE):
            piece, error = np.empty(0, np.uint8), None
            if runtime.rank() == found.rank:
                piece, error = _read(found.folder / name, start, facts["bytes"])
            if found.rank != 0:
                error = collectives.from_rank(found.rank, error)
            if error is not None:
                raise error
            yield name, piece if found.rank == 0 else collectives.broadcast_bytes(piece, found.rank)


def _read(path: Path, start: int, length: int) -> tuple[np.ndarray[Any, Any], OSError | None]:
    """A piece of a file of this length, or why it cannot be read."""
    try:
        piece = np.fromfile(path, np.uint8, _PIECE, offset=start)
    except OSError as error:
        return np.empty(0, np.uint8), OSError(error.errno, error.strerror, str(path))
    if start + piece.size != min(start + _PIECE, length):
        return piece, OSError(errno.EIO, f"it is shorter than {length} bytes", str(path))
    return piece, None
