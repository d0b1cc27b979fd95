"""The newest checkpoint, on whichever host it is: ``Checkpoint.restore`` begins here.

Usually rank 0's directory has it. In a run that ``hvkit run`` may start again, rank 0 may be on
another host than before, and hosts come and go. So the first rank of every host looks for the run's
checkpoints in the directory on that host and, with ``replicas``, in its memory. It reads manifests
only. The ranks choose the newest of all; the rank that has it compares its files with the manifest,
and if one is damaged, they choose again. While they load it, rank 0 writes it into its own
directory, if it is not there yet. If all hosts share the directory, rank 0 reads it.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

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

# Bytes of a broadcast.
_PIECE = 1 << 24


@sendable
@dataclass(frozen=True)
class Found:
    """A checkpoint, and who can read it.

    Attributes:
        rank: the rank that reads it.
        host: that rank's host.
        folder: its folder there.
        in_memory: whether that is a copy in the host's memory.
        manifest: its manifest.
        file: inode and time of the manifest's file. They are the same for all hosts that share a
            directory.
    """

    rank: int
    host: str
    folder: Path
    in_memory: bool
    manifest: Manifest
    file: tuple[int, int]

    def __str__(self) -> str:
        return _place(self.folder, self.rank, self.host, in_memory=self.in_memory)


def find(
    directory: Path, replicas: Replicas, call: str
) -> tuple[Found, Path, Bringing | None] | None:
    """The newest complete checkpoint; None if there is none. A collective.

    Rank 0 logs the damaged checkpoints that are skipped.

    Args:
        directory: the directory of checkpoints.
        replicas: the copies in memory.
        call: the user's call.

    Returns:
        The checkpoint; its folder in rank 0's directory; and what writes it there while it is
        loaded, if that directory lacks it.

    Raises:
        RanksDisagreeError: the ranks want different numbers of copies.
        HvkitError, OSError: rank 0 cannot read its newest checkpoint.
    """
    replicas.require_same_number(call)
    problem: Exception | None = None
    offers: list[Found] = []
    skipped: list[_Skipped] = []
    try:
        offers, skipped = _offers(directory, replicas)
    except Exception as error:  # any error: the other ranks must not wait for this one
        problem = error
    everyone = collectives.share(call, problem, (directory, skipped))
    directory = everyone[0][0]
    # Hosts that share a directory skip the same in it: only the first of them counts.
    of_all = {(each.key, each.reason): each for _, theirs in everyone[::-1] for each in theirs}
    for each in of_all.values():
        _log_skipped(each.place, each.reason)
    found, damaged = _first_complete(offers, call)
    if found is None:
        if (of_all or damaged) and runtime.rank() == 0:
            logger.warning("no checkpoint can be read: starts from the beginning")
        return None
    if not collectives.from_rank(0, _lacks(directory, offers, found)):
        return found, directory / found.folder.name, None
    folder = directory / store.name_of(found.manifest.step)
    return found, folder, Bringing(found, directory, call)


def adopt(folder: Path, manifest: Manifest) -> Path:
    """Make a checkpoint in rank 0's directory, which the ranks have loaded, one of this run.

    Otherwise a restart with rank 0 on another host would take it for that of another training.

    Returns:
        Its folder, which has another name if a kill had left it while it was replaced.
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
    """What a rank cannot read.

    Attributes:
        key: the same for all hosts that share it.
        place: what it is, for messages.
        reason: why it cannot be read.
    """

    key: str
    place: str
    reason: str


def _offers(directory: Path, replicas: Replicas) -> tuple[list[Found], list[_Skipped]]:
    """The checkpoints that this rank can read, the newest first, and what it cannot read."""
    offers: list[Found] = []
    skipped: list[_Skipped] = []
    rank, host, run = runtime.rank(), socket.gethostname(), run_name()

    def skip(path: Path, reason: str, *, in_memory: bool) -> None:
        place = _place(path, rank, host, in_memory=in_memory)
        skipped.append(_Skipped(place if in_memory else str(path), place, reason))

    def look(folder: Path, *, in_memory: bool) -> Iterator[Found]:
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
            yield Found(rank, host, path, in_memory, manifest, file)

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
            except (OSError, HvkitError) as error:  # those of other hosts may do
                why = (error.strerror if isinstance(error, OSError) else "") or str(error)
                skip(folder, f"cannot be read: {why}", in_memory=in_memory)
    return sorted(offers, key=_order, reverse=True), skipped


def _order(found: Found) -> tuple[Any, ...]:
    """A key that is larger for newer checkpoints.

    Those of this run are newer than any that another run has left in rank 0's directory. Of equal
    ones, the ranks load a copy in memory rather than files on a disk, and otherwise rank 0's.
    """
    manifest = found.manifest
    own = bool(run_name()) and manifest.run == run_name()
    return own, manifest.saves if own else 0, found.in_memory, manifest.serial, -found.rank


def _first_complete(offers: list[Found], call: str) -> tuple[Found | None, bool]:
    """The newest that a rank offers and that is complete; a collective.

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


def _damage(found: Found, call: str) -> str:
    """What is damaged in a checkpoint; a collective, in which its rank reads the files.

    Raises:
        OSError: rank 0 may not read its directory: an older checkpoint would hide that.
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


def _lacks(directory: Path, offers: list[Found], found: Found) -> bool:
    """Whether rank 0's directory lacks a checkpoint; False on other ranks.

    Rank 0 logs that it leaves out what another run has saved there.
    """
    if runtime.rank():
        return False
    listed = [each for each in offers if not each.in_memory]
    wanted = replace(found.manifest, serial=0)
    for each in listed:
        # A copy in memory is chosen without reading the files of the same one on disk.
        if replace(each.manifest, serial=0) == wanted and manifests.has_all_bytes(
            each.folder, each.manifest
        ):
            return False
    newest = max((each.manifest for each in listed), key=lambda each: each.serial, default=None)
    if newest is not None and newest.run != found.manifest.run:
        logger.warning("%s: leaves out the checkpoints of another run", directory)
    return True


def _log_skipped(place: str, reason: str) -> None:
    if runtime.rank() == 0:
        logger.warning("skipped %s: %s", place, reason)


def _place(folder: Path, rank: int, host: str, *, in_memory: bool) -> str:
    if in_memory:
        return f"{folder.name} from the memory of {host}"
    return f"{folder} on {host}" if rank else str(folder)


class Bringing:
    """Writes a checkpoint that the ranks load into rank 0's directory, as its newest.

    Its files travel once: rank 0 writes those that it gets to load, and at the end of the block,
    which is a collective, the ranks send it the rest. If rank 0 cannot write, it logs that, and the
    run resumes all the same. After an error of the block the directory is as it was.

    Args:
        found: the checkpoint, the same on every rank.
        directory: rank 0's directory of checkpoints.
        call: the user's call.

    Raises:
        OSError: at the end of the block, on every rank: a rank cannot read the checkpoint.
    """

    def __init__(self, found: Found, directory: Path, call: str) -> None:
        self._found, self._directory, self._call = found, directory, call
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._serial = found.manifest.serial
        self._taken: set[str] = set()
        # Why rank 0 cannot write.
        self._problem: Exception | None = None

    def __enter__(self) -> Bringing:
        if runtime.rank() == 0:
            try:
                # Those of other runs that are there may have larger serials.
                numbers = store.prepare(self._directory)
                self._serial = max(self._serial, numbers.serial + 1)
                name = store.name_of(self._found.manifest.step)
                folder = store.new_folder(self._directory, name)
                self._folder = self._stack.enter_context(folder)
            except Exception as error:  # any error: the other ranks must not wait for this one
                self._problem = error
        return self

    def take(self, name: str, content: memoryview) -> None:
        """Keep a file that every rank has got; on every rank."""
        self._taken.add(name)
        length = self._found.manifest.files[name]["bytes"]
        if len(content) != length:
            self._problem = OSError(errno.EIO, f"{name} has {len(content)} of {length} bytes")
        self._append(name, content)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._stack.__exit__(kind, error, trace)
            return
        unreadable: OSError | None = None
        try:
            for name, piece in _travelling(self._found, self._taken):
                self._append(name, piece)
        except OSError as failed:  # on every rank
            unreadable = failed
        problem = self._finish(unreadable)
        collectives.share(self._call, problem, None)

    def _append(self, name: str, content: Any) -> None:
        if self._folder is None or self._problem is not None:
            return
        try:
            with (self._folder / name).open("ab") as file:
                file.write(content)
        except OSError as error:
            self._problem = error

    def _finish(self, unreadable: OSError | None) -> Exception | None:
        """Make the folder a checkpoint, on rank 0, unless something has failed.

        Returns:
            What all ranks must raise.
        """
        if runtime.rank():
            return unreadable
        try:
            with self._stack:
                if failed := unreadable or self._problem:
                    raise failed
                assert self._folder is not None
                replace(self._found.manifest, serial=self._serial).write(self._folder)
                for each in self._folder.iterdir():
                    store.flush(each)
        except Exception as error:  # any error: the other ranks must not wait for this one
            if unreadable is not None or not isinstance(error, OSError):
                return error
            logger.warning(
                "cannot write %s into %s: %s; the run resumes from it all the same",
                *(self._found, self._directory, error.strerror or error),
            )
        return None


def _travelling(found: Found, taken: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield a checkpoint's files in pieces, each with the file's name: on rank 0, of any rank's.

    Args:
        found: the checkpoint.
        taken: the names of files that rank 0 has.

    Raises:
        OSError: its rank cannot read it; on every rank.
    """
    for name, facts in found.manifest.files.items():
        if name in taken:
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
