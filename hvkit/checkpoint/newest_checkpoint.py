"""Finds the newest checkpoint on any host: ``Checkpoint.restore`` begins here.

Usually it is in rank 0's directory. In a run that ``hvkit run`` may start again, rank 0 may be on
another host than before, and hosts may be lost or new. So the first rank of every host looks for
the run's checkpoints in the directory on that host and, with ``replicas``, in its memory. It reads
only manifests. The ranks choose the newest of all; the rank that has it compares its files with the
manifest, and if one is damaged, they choose again. If all hosts share the directory, rank 0 reads
it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from hvkit import runtime
from hvkit.checkpoint import manifests, store
from hvkit.checkpoint.manifests import Manifest
from hvkit.checkpoint.replicas import Replicas
from hvkit.checkpoint.transfer import require_own
from hvkit.communication import collectives
from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger


@sendable
@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint, and the rank that can read it.

    Attributes:
        rank: the rank that reads it.
        host: that rank's host.
        folder: its folder there.
        in_memory: whether that is a copy in the host's memory.
        manifest: its manifest.
        file: inode and time of the manifest's file, the same on all hosts that share a directory.
    """

    rank: int
    host: str
    folder: Path
    in_memory: bool
    manifest: Manifest
    file: tuple[int, int]

    def __str__(self) -> str:
        return _place(self.folder, self.rank, self.host, in_memory=self.in_memory)


def find(directory: Path, replicas: Replicas, call: str) -> tuple[FoundCheckpoint, bool] | None:
    """The newest complete checkpoint; None if there is none. A collective.

    Rank 0 logs the damaged checkpoints that are skipped.

    Args:
        directory: the directory of checkpoints.
        replicas: the copies in memory.
        call: the user's call.

    Returns:
        The checkpoint, and whether rank 0's directory holds it.

    Raises:
        RanksDisagreeError: the ranks have different ``replicas``.
        HvkitError, OSError: rank 0 cannot read its newest checkpoint.
    """
    replicas.require_same_number(call)
    problem: Exception | None = None
    offers: list[FoundCheckpoint] = []
    skipped: list[_Skipped] = []
    try:
        offers, skipped = _offers(directory, replicas)
    except Exception as error:  # any error: the other ranks must not wait for this one
        problem = error
    everyone = collectives.share(call, problem, skipped)
    # Hosts that share a directory skip the same checkpoints: log each once.
    of_all = {(each.key, each.reason): each for theirs in everyone[::-1] for each in theirs}
    for each in of_all.values():
        _log_skipped(each.place, each.reason)
    found, damaged = _first_complete(offers, call)
    if found is None:
        if (of_all or damaged) and runtime.rank() == 0:
            logger.warning("no checkpoint can be read: starts from the beginning")
        return None
    return found, collectives.from_rank(0, _holds(directory, offers, found))


def adopt(folder: Path, manifest: Manifest) -> Path:
    """Mark a checkpoint in rank 0's directory, which the ranks have loaded, as one of this run.

    Otherwise a restart with rank 0 on another host would ignore it, as that of another run.

    Returns:
        Its folder, which is renamed if a kill had interrupted the save that was to replace it.
    """
    if runtime.rank() or not run_name() or not folder.is_dir():
        return folder
    try:
        folder = store.finished(folder)
        if manifest.run != run_name():
            store.adopt(folder, manifest)
    except OSError as error:
        logger.warning(
            "cannot note in %s that this run goes on from it: %s; if its host is lost before the "
            "next save, a restart begins at the start",
            *(folder, error.strerror or error),
        )
    return folder


@sendable
class _Skipped(NamedTuple):
    """A checkpoint or directory that a rank cannot read.

    Attributes:
        key: the same for all hosts that share it.
        place: its name in messages.
        reason: why it cannot be read.
    """

    key: str
    place: str
    reason: str


def _offers(directory: Path, replicas: Replicas) -> tuple[list[FoundCheckpoint], list[_Skipped]]:
    """The checkpoints that this rank can read, the newest first, and what it cannot read."""
    offers: list[FoundCheckpoint] = []
    skipped: list[_Skipped] = []
    rank, host, run = runtime.rank(), socket.gethostname(), run_name()

    def skip(path: Path, reason: str, *, in_memory: bool) -> None:
        place = _place(path, rank, host, in_memory=in_memory)
        skipped.append(_Skipped(place if in_memory else str(path), place, reason))

    def look(folder: Path, *, in_memory: bool) -> Iterator[FoundCheckpoint]:
        def skip_damaged(path: Path, reason: str) -> None:
            skip(path, f"damaged: {reason}", in_memory=in_memory)

        for path, manifest in store.readable(
            folder, skip_damaged, strict=rank == 0 and not in_memory
        ):
            try:
                status = (path / manifests.MANIFEST).stat()
            except OSError:  # deleted since it was read
                continue
            file = status.st_ino, status.st_mtime_ns
            yield FoundCheckpoint(rank, host, path, in_memory, manifest, file)

    if rank == 0:
        offers += look(directory, in_memory=False)
    if run and runtime.local_rank() == 0:
        elsewhere = [] if rank == 0 else [(directory, False)]
        if replicas.folder is not None:
            elsewhere.append((replicas.folder, True))
        for folder, in_memory in elsewhere:
            try:
                if in_memory and folder.exists():
                    require_own(folder.parent)
                found = look(folder, in_memory=in_memory)
                offers += [each for each in found if each.manifest.run == run]
            except (OSError, HvkitError) as error:  # other hosts may have a checkpoint
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                skip(folder, f"cannot be read: {why}", in_memory=in_memory)
    return sorted(offers, key=_order, reverse=True), skipped


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
    """The newest complete checkpoint of all ranks; a collective.

    Returns:
        The checkpoint, or None; and whether a newer one is damaged.
    """
    damaged = False
    while True:
        everyone = collectives.gather(call, offers[0] if offers else None)
        offered = [each for each in everyone if each is not None]
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
    """What is damaged in a checkpoint; a collective, in which its rank reads the files.

    Raises:
        OSError: rank 0 may not read its directory: loading an older checkpoint would hide that.
    """
    problem, reason = None, ""
    if runtime.rank() == found.rank:
        try:
            manifests.verify(found.folder, found.manifest)
        except manifests.DamagedError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
            problem = error if found.rank == 0 and not found.in_memory else None
    return collectives.share(call, problem, reason)[found.rank]


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
        if replace(each.manifest, serial=0) == wanted and manifests.has_all_bytes(
            each.folder, each.manifest
        ):
            return True
    newest = max((each.manifest for each in listed), key=lambda each: each.serial, default=None)
    if newest is not None and newest.run != found.manifest.run:
        logger.warning("%s: leaves out the checkpoints of another run", directory)
    return False


def _log_skipped(place: str, reason: str) -> None:
    if runtime.rank() == 0:
        logger.warning("skipped %s: %s", place, reason)


def _place(folder: Path, rank: int, host: str, *, in_memory: bool) -> str:
    if in_memory:
        return f"{folder.name} from the memory of {host}"
    return f"{folder} on {host}" if rank else str(folder)
