"""The directory of a run's checkpoints: its lock, and its folders.

Whenever the process is killed, every complete checkpoint can still be read: a new one is written
into a hidden folder, flushed to disk, and renamed. This is the usual way to replace files durably;
see Pillai et al., "All File Systems Are Not Created Equal" (2014).

Used by rank 0, and by ranks that keep copies in memory.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hvkit.checkpoint import manifests
from hvkit.checkpoint.manifests import MANIFEST, DamagedError, Manifest
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger

if TYPE_CHECKING:
    from filelock import FileLock

# While a step is saved again, its earlier folder has the suffix.
_CHECKPOINT = re.compile(r"step-\d{9,}(\.old)?")
_OLD = ".old"
_SAVING = ".saving-"
_REMOVING = ".removing-"

# The locks of this process, each with the lock file it was taken on. They are released when the
# process ends, however it ends. DataLoader workers do not keep them: filelock closes the lock's
# file in every forked child.
_held: dict[Path, tuple[FileLock, os.stat_result]] = {}

# What flock reports on file systems without locks. There, users must keep their runs apart.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}

# Folders that could not be deleted, as was logged.
_stays: set[Path] = set()


class Numbers(NamedTuple):
    """The largest numbers of a directory's manifests, 0 without any.

    Attributes:
        serial: of all.
        saves: of those of this run.
    """

    serial: int
    saves: int


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:09d}"


def is_name(name: str) -> bool:
    """Whether ``name_of`` makes this name of a folder."""
    return _CHECKPOINT.fullmatch(name) is not None and not name.endswith(_OLD)


def id_of(directory: Path) -> str:
    """A short name for a directory: of its copies in memory, and in reports to ``hvkit run``."""
    return hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]


def prepare(directory: Path) -> Numbers:
    """Create the directory, lock it for this process, and clean up after killed runs.

    Returns:
        The largest numbers in its manifests.

    Raises:
        BlockingIOError: another process has the lock.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        flush(directory.parent)
    _lock(directory)
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((_SAVING, _REMOVING)):
            _delete(entry)
        elif entry.name.endswith(_OLD) and _CHECKPOINT.fullmatch(entry.name):
            _finish_replacing(entry)
    found = [manifest for _, manifest in _readable(directory) if manifest is not None]
    return Numbers(
        serial=max((each.serial for each in found), default=0),
        saves=max((each.saves for each in found if each.run == run_name()), default=0),
    )


def write_folder(directory: Path, name: str, fill: Callable[[Path], None]) -> None:
    """Write a checkpoint's folder, replacing one of the same name.

    Args:
        directory, name: as for ``new_folder``.
        fill: writes all files into the folder it is given, and flushes each, the manifest last.

    Raises:
        OSError: a file cannot be written; the directory is then as it was.
    """
    with new_folder(directory, name) as folder:
        fill(folder)


@contextmanager
def new_folder(directory: Path, name: str) -> Iterator[Path]:
    """Within: a hidden folder to fill, with each file flushed, the manifest last.

    Afterwards it is renamed to a checkpoint's folder, and replaces one of the same name, which is
    deleted, or stays hidden if it cannot be deleted now. After an error the directory is as it was.

    Args:
        directory: one for which ``prepare`` was called.
        name: the folder's name, from ``name_of``.

    Raises:
        OSError: it cannot be made or flushed.
    """
    temporary = _unused(directory / (_SAVING + name))
    try:
        temporary.mkdir()
        yield temporary
        flush(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    final, old = directory / name, directory / (name + _OLD)
    replaces = final.exists()
    if replaces:
        os.rename(final, old)
    os.rename(temporary, final)
    flush(directory)
    if replaces:
        _remove(old)


def finished(folder: Path) -> Path:
    """Give a checkpoint that was loaded its own name if a kill had interrupted its replacement.

    Returns:
        Its folder.

    Raises:
        OSError: the directory cannot be locked or written.
    """
    if not folder.name.endswith(_OLD):
        return folder
    _lock(folder.parent)
    new = folder.with_name(folder.name.removesuffix(_OLD))
    if new.exists():  # it is damaged, else it would have been loaded
        _remove(new)
    os.rename(folder, new)
    flush(new.parent)
    return new


def adopt(folder: Path, manifest: Manifest) -> None:
    """Mark a checkpoint of another run as one of this run, which goes on from it.

    Args:
        folder: the checkpoint's.
        manifest: its manifest.

    Raises:
        OSError: the directory cannot be locked or written; the checkpoint is then as it was.
    """
    prepare(folder.parent)
    with tempfile.TemporaryDirectory(prefix=_SAVING, dir=folder.parent) as aside:
        replace(manifest, run=run_name(), saves=0).write(Path(aside))
        flush(Path(aside, MANIFEST))
        os.replace(Path(aside, MANIFEST), folder / MANIFEST)
    flush(folder)


def prune(directory: Path, keep: int | None, newest: str) -> None:
    """Delete all but the ``keep`` newest checkpoints; None deletes none.

    If one cannot be deleted now, the next save tries again. Checkpoints that cannot be read count
    as the oldest. The one named ``newest`` is never deleted.
    """
    if keep is None:
        return
    folders = sorted(
        _readable(directory),
        key=lambda each: (each[0].name == newest, each[1].serial if each[1] else 0, each[0].name),
    )
    for folder, _ in folders[:-keep]:
        _remove(folder)


def readable(
    directory: Path, skip: Callable[[Path, str], None], *, strict: bool = True
) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a directory whose manifests can be read; their files may be damaged.

    Args:
        directory: it need not exist.
        skip: called with the folder and the reason for every checkpoint whose manifest is damaged.
        strict: whether to raise an error for one that this user may not read, or of another format;
            else it is skipped. In rank 0's directory, loading an older one would hide the problem.

    Raises:
        HvkitError: an older or newer hvkit wrote one in another format.
        PermissionError: this user may not read one.
    """
    for folder in sorted(_checkpoints(directory), reverse=True):
        try:
            yield folder, manifests.read(folder)
        except DamagedError as error:
            skip(folder, str(error))
        except (PermissionError, HvkitError) as error:
            if strict:
                raise
            skip(folder, str(error))


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(directory: Path) -> None:
    """Lock the directory for this process until it ends; a second call does nothing.

    Raises:
        BlockingIOError: another process has the lock.
        OSError: the lock's file cannot be written.
    """
    # Ranks that do not save skip this import: from Python 3.12 on, filelock installs an audit hook,
    # which slows down each id(), import and open().
    from filelock import FileLock, Timeout

    path = directory.resolve() / ".lock"
    if path in _held:
        lock, file = _held[path]
        if lock.is_locked and _is_same(path, file):
            return
        # Someone deleted and created the directory again, or this is a fork of the owner.
        lock.release(force=True)

    def write_owner(handle: int) -> None:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _held[path] = lock, os.fstat(handle)

    lock = FileLock(path, thread_local=False, on_acquired=write_owner)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        owner = path.read_text(errors="replace")[:200] or "another process"
        raise BlockingIOError(
            errno.EAGAIN,
            f"{owner} saves its checkpoints in this directory: give every run its own, or end "
            "the other one first",
            str(directory),
        ) from None
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise


def _is_same(path: Path, file: os.stat_result) -> bool:
    try:
        return os.path.samestat(file, path.stat())
    except OSError:
        return False


def _finish_replacing(old: Path) -> None:
    """Of two checkpoints of a step, left by a kill, keep the new one if it is complete."""
    new = old.with_name(old.name.removesuffix(_OLD))
    try:
        manifests.verify(new, manifests.read(new))
    except DamagedError:
        if new.exists():
            _remove(new)
        if not new.exists():
            os.rename(old, new)
            flush(old.parent)
    except (OSError, HvkitError) as error:
        if old not in _stays:
            logger.warning(f"keeps {old} in addition to {new}, which cannot be read: {error}")
        _stays.add(old)
    else:
        _remove(old)


def _checkpoints(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        found = (each for each in directory.iterdir() if _CHECKPOINT.fullmatch(each.name))
        yield from (each for each in found if each.is_dir())


def _readable(directory: Path) -> Iterator[tuple[Path, Manifest | None]]:
    for folder in _checkpoints(directory):
        try:
            yield folder, manifests.read(folder)
        except DamagedError:
            yield folder, None


def _remove(folder: Path) -> None:
    """Delete a checkpoint. It is hidden first, so half of it never looks like a checkpoint."""
    hidden = _unused(folder.with_name(_REMOVING + folder.name))
    try:
        os.rename(folder, hidden)
    except OSError as error:
        _log_that_it_stays(folder, error)
    else:
        _delete(hidden)


def _delete(hidden: Path) -> None:
    """Delete a hidden folder, as far as possible now.

    On NFS, a file that another process reads stays under another name until that process closes
    it, and its folder stays too.
    """
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)  # free as much of the disk as possible
        if hidden.exists():
            _log_that_it_stays(hidden, error)


def _unused(path: Path) -> Path:
    """The path, or the path with a number if something with its name could not be deleted."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain((path,), others) if not each.exists())


def _log_that_it_stays(folder: Path, error: OSError) -> None:
    if folder not in _stays:
        logger.warning(f"cannot delete {folder} now, the next save tries again: {error}")
    _stays.add(folder)
