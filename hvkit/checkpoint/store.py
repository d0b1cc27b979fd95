"""The directory of a run's checkpoints: its lock, its folders, and the manifest in each of them.

Whenever the process is killed, every complete checkpoint can still be read: a new one is written
into a hidden folder, flushed to disk, and renamed. This is the usual way to replace files durably;
see Pillai et al., "All File Systems Are Not Created Equal" (2014). The manifest is written last, so
a folder with a manifest that fits its files is complete.

Used by rank 0, and by ranks that keep copies in memory.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger

if TYPE_CHECKING:
    from filelock import FileLock

MANIFEST = "manifest.json"
FORMAT = 3

# While a step is saved again, its earlier folder has the suffix.
_CHECKPOINT = re.compile(r"step-\d{9,}(\.old)?")
_OLD = ".old"
_SAVING = ".saving-"
_REMOVING = ".removing-"

# The locks of this process, each with the lock file it was taken on. They are released when the
# process ends, however it ends. DataLoader workers do not keep them: filelock closes the lock's
# file in every forked child.
_locks: dict[Path, tuple[FileLock, os.stat_result]] = {}

# Errors of flock on file systems without locks. There, users must keep their runs apart.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}

# Folders that could not be deleted, as was logged.
_stays: set[Path] = set()


class DamagedError(HvkitError):
    """A checkpoint's folder does not hold what was written into it."""


@sendable
@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``: what was saved, by whom, and the sha256 of each file."""

    epoch: int
    step: int
    batches: int
    """Batches of the epoch that each rank had read."""
    size: int
    """The number of ranks that saved."""
    serial: int = 0
    """The number of the save in this directory: the newest checkpoint has the largest."""
    extras: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By part: the name of its file and the facts that loading needs."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By file: its length in bytes and its sha256."""
    versions: dict[str, str] = field(default_factory=dict)
    run: str = ""
    """The name of the run that saved or resumed it, if ``hvkit run`` may start it again."""
    saves: int = 0
    """The number of saves of this run up to this one. Unlike serials, these numbers can be compared
    between directories of several hosts, which may hold checkpoints of other runs."""
    epoch_batches: int = 0
    """Batches of a whole epoch on each rank; 0 if unknown."""
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write the manifest into a checkpoint's folder, and flush it."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n")
        flush(folder / MANIFEST)


def read(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    DamagedError if it is not what was written; HvkitError if another version of hvkit wrote it in
    another format; PermissionError, since skipping to an older one would hide that.
    """
    try:
        with _damage_of(MANIFEST):
            body = json.loads((folder / MANIFEST).read_bytes())
        digest = body.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise DamagedError(f"{MANIFEST} is not what was written") from None
    if digest != _digest_of(body):
        raise DamagedError(f"{MANIFEST} is not what was written: its sha256 differs")
    if body["format"] != FORMAT:
        raise HvkitError(
            f"{folder}: this checkpoint has format {body['format']}, this hvkit reads format "
            f"{FORMAT}: install the hvkit that wrote it ({body['versions'].get('hvkit')})"
        )
    return Manifest(**body)


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file of a checkpoint with its manifest; raises as ``read``."""
    for name, written in manifest.files.items():
        with _damage_of(name):
            found = facts_of(folder / name)
        if found["bytes"] != written["bytes"]:
            raise DamagedError(f"{name} has {found['bytes']} of {written['bytes']} bytes")
        if found != written:
            raise DamagedError(f"{name} is not what was written: its sha256 differs")


@contextmanager
def _damage_of(name: str) -> Iterator[None]:
    """Turn errors of reading a file into ``DamagedError``, apart from PermissionError."""
    try:
        yield
    except FileNotFoundError:
        raise DamagedError(f"{name} is missing") from None
    except PermissionError:
        raise
    except OSError as error:
        raise DamagedError(f"{name}: {error.strerror}") from None


def wrong_length(folder: Path, manifest: Manifest) -> str:
    """The first file that has another length than written, empty if none has; reads no file."""
    for name, written in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found != written["bytes"]:
            return f"{name} has {found} of {written['bytes']} bytes"
    return ""


def describes(folder: Path, manifest: Manifest) -> bool:
    """Whether a folder's own manifest lists the same files; reads none of them."""
    try:
        return read(folder).files == manifest.files
    except (HvkitError, OSError):
        return False


def facts_of(path: Path) -> dict[str, Any]:
    """Length in bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def flushed(folder: Path, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Flush files of a folder to disk; return length and sha256 of each, for the manifest."""
    files = sorted(names)
    for name in files:
        flush(folder / name)
    return {name: facts_of(folder / name) for name in files}


def name_of(step: int) -> str:
    return f"step-{step:09d}"


def is_name(name: str) -> bool:
    return _CHECKPOINT.fullmatch(name) is not None and not name.endswith(_OLD)


def id_of(directory: Path) -> str:
    """A short name for a directory: of its copies in memory, and in reports to ``hvkit run``."""
    return hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:16]


def prepare(directory: Path) -> tuple[int, int]:
    """Create the directory, lock it for this process, and clean up after killed runs.

    Returns the largest ``serial`` in its manifests, and the largest ``saves`` in manifests of this
    run; 0 without any. BlockingIOError if another process has the lock.
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
    found = []
    for folder in _folders(directory):
        with suppress(DamagedError), _damage_of(MANIFEST):
            status = (folder / MANIFEST).stat()
            found.append(_numbers_of(folder, status.st_ino, status.st_mtime_ns))
    return (
        max((serial for serial, _, _ in found), default=0),
        max((saves for _, saves, run in found if run == run_name()), default=0),
    )


@functools.cache
def _numbers_of(folder: Path, inode: int, modified: int) -> tuple[int, int, str]:
    """Of a manifest, which is read once: with ``keep=None`` there may be thousands."""
    manifest = read(folder)
    return manifest.serial, manifest.saves, manifest.run


@contextmanager
def new_folder(directory: Path, name: str) -> Iterator[Path]:
    """Within: a hidden folder to fill, with each file flushed, the manifest last.

    Afterwards it is renamed to a checkpoint's folder, and replaces one of the same name, which is
    deleted, or stays hidden if it cannot be deleted now. After an error the directory is as it was.
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


def adopt(folder: Path, manifest: Manifest) -> Path:
    """Mark a checkpoint that rank 0 has loaded from its directory as one of this run.

    Otherwise a restart with rank 0 on another host would ignore it, as that of another run. Returns
    its folder, which is renamed if a kill had interrupted the save that was to replace it.
    """
    is_replaced, is_of_run = folder.name.endswith(_OLD), manifest.run == run_name()
    if not run_name() or not folder.is_dir() or (is_of_run and not is_replaced):
        return folder
    try:
        prepare(folder.parent)
        if is_replaced and not folder.exists():
            folder = folder.with_name(folder.name.removesuffix(_OLD))
        if not is_of_run:
            with tempfile.TemporaryDirectory(prefix=_SAVING, dir=folder.parent) as aside:
                replace(manifest, run=run_name(), saves=0).write(Path(aside))
                os.replace(Path(aside, MANIFEST), folder / MANIFEST)
            flush(folder)
    except OSError as error:
        logger.warning(
            "cannot note in %s that this run goes on from it: %s; if its host is lost before the "
            "next save, a restart begins at the start",
            *(folder, error.strerror or error),
        )
    return folder


def prune(directory: Path, keep: int | None, newest: str) -> None:
    """Delete all but the ``keep`` newest checkpoints; None deletes none.

    If one cannot be deleted now, the next save tries again. Checkpoints that cannot be read count
    as the oldest. The one named ``newest`` is never deleted.
    """
    if keep is None:
        return
    damaged: list[Path] = []
    found = readable(directory, lambda folder, _: damaged.append(folder))
    serials = {folder: manifest.serial for folder, manifest in found}
    serials |= dict.fromkeys(damaged, 0)
    oldest_first = sorted(serials, key=lambda each: (each.name == newest, serials[each], each.name))
    for folder in oldest_first[:-keep]:
        _remove(folder)


def readable(
    directory: Path, skip: Callable[[Path, str], None], *, strict: bool = True
) -> Iterator[tuple[Path, Manifest]]:
    """The checkpoints of a directory whose manifests can be read; their files may be damaged.

    The others are passed to ``skip`` with the reason. But with ``strict`` it raises an error for
    one that this user may not read, or of another format: in rank 0's directory, loading an older
    one would hide the problem.
    """
    for folder in _folders(directory):
        try:
            yield folder, read(folder)
        except (PermissionError, HvkitError) as error:
            if strict and not isinstance(error, DamagedError):
                raise
            skip(folder, str(error))


def _folders(directory: Path) -> list[Path]:
    entries = directory.iterdir() if directory.is_dir() else ()
    found = (each for each in entries if _CHECKPOINT.fullmatch(each.name) and each.is_dir())
    return sorted(found, reverse=True)


def flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _lock(directory: Path) -> None:
    """Lock the directory for this process until it ends; BlockingIOError if another one has."""
    # Ranks that do not save skip this import: from Python 3.12 on, filelock installs an audit hook,
    # which slows down each id(), import and open().
    from filelock import FileLock, Timeout

    path = directory.resolve() / ".lock"
    if path in _locks:
        lock, file = _locks[path]
        if lock.is_locked and path.exists() and os.path.samestat(file, path.stat()):
            return
        # Someone deleted and created the directory again, or this is a fork of the owner.
        lock.release(force=True)

    def write_owner(handle: int) -> None:
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
        _locks[path] = lock, os.fstat(handle)

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


def _finish_replacing(old: Path) -> None:
    new = old.with_name(old.name.removesuffix(_OLD))
    try:
        verify(new, read(new))
    except DamagedError:
        if new.exists():
            _remove(new)
        if not new.exists():
            os.rename(old, new)
            flush(old.parent)
    except (OSError, HvkitError) as error:
        _warn_once(old, f"keeps {old} in addition to {new}, which cannot be read: {error}")
    else:
        _remove(old)


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
    """Delete a hidden folder, as far as possible now: on NFS, files that others read stay."""
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
    _warn_once(folder, f"cannot delete {folder} now, the next save tries again: {error}")


def _warn_once(folder: Path, text: str) -> None:
    if folder not in _stays:
        logger.warning(text)
    _stays.add(folder)
