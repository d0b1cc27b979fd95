"""Finds the newest checkpoint on any host: ``Checkpoint.restore`` begins here.

Usually it is in rank 0's directory. In a run that ``hvkit run`` may start again, rank 0 may be on
another host than before, and hosts may be lost or new. So the first rank of every host looks for
the run's checkpoints in the directory on that host and, with ``replicas``, in its memory. It reads
only manifests. The ranks choose the newest of all; the rank that has it compares its files with the
manifest, and if one is damaged, they choose again. If all hosts share the directory, rank 0 reads
it. If rank 0's directory lacks the checkpoint, ``resume`` writes it there.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.replicas import Replicas, require_own
from hvkit.checkpoint.store import Manifest
from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger

RESTORE = "Checkpoint.restore"

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


def find(directory: Path, replicas: Replicas) -> tuple[FoundCheckpoint, bool] | None:
    """The newest complete checkpoint, and whether rank 0's directory holds it; a collective.

    Rank 0 logs the damaged checkpoints that are skipped. If it cannot read its newest one, all
    ranks raise its HvkitError or OSError.
    """
    problem: Exception | None = None
    offers: list[FoundCheckpoint] = []
    skipped: list[_Skipped] = []
    for_host = bool(run_name()) and runtime.local_rank() == 0
    try:
        if runtime.rank() == 0 or for_host:
            _search(directory, offers, skipped, in_memory=False)
        if for_host and replicas.folder is not None:
            _search(replicas.folder, offers, skipped, in_memory=True)
    except Exception as error:  # any error: the other ranks must not wait for this one
        problem = error
    offers.sort(key=_order, reverse=True)
    by_rank = collectives.gather_or_raise(RESTORE, problem, skipped)
    # Hosts that share a directory skip the same checkpoints: log each once.
    of_all = {key: rest for of_rank in by_rank[::-1] for key, *rest in of_rank}
    for name, reason in of_all.values():
        _log_skipped(name, reason)
    found, damaged = _first_complete(offers)
    if found is None:
        if (of_all or damaged) and runtime.rank() == 0:
            logger.warning("no checkpoint can be read: starts from the beginning")
        return None
    return found, collectives.from_rank(0, _holds(directory, offers, found))


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


def _first_complete(offers: list[FoundCheckpoint]) -> tuple[FoundCheckpoint | None, bool]:
    """The newest complete checkpoint of all, and whether a newer one is damaged; a collective."""
    damaged = False
    while True:
        by_rank = collectives.gather(RESTORE, offers[0] if offers else None)
        offered = [each for each in by_rank if each is not None]
        if not offered:
            return None, damaged
        found = max(offered, key=_order)
        reason = _damage(found)
        if not reason:
            return found, damaged
        damaged = True
        _log_skipped(str(found), f"damaged: {reason}")
        offers = [each for each in offers if each.file != found.file]


def _damage(found: FoundCheckpoint) -> str:
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
    return collectives.gather_or_raise(RESTORE, problem, reason)[found.rank]


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
