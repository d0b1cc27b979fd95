"""The directory of a run's checkpoints: at every moment, whatever was complete can be read.

A checkpoint is written into a hidden folder, flushed to disk, and renamed. The method is the usual
one for replacing files durably; see Pillai et al., "All File Systems Are Not Created Equal" (2014).

One run at a time saves in a directory.

What lies in a checkpoint's folder, and whether it is still what was written.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from itertools import chain, count
from pathlib import Path
from typing import Any

from hvkit.errors import HvkitError

# While a step that was saved before is replaced, its first folder carries the suffix.
_CHECKPOINT = re.compile(r"step-\d{9,}(\.old)?")
_OLD = ".old"
_SAVING = ".saving-"
_REMOVING = ".removing-"

# Folders that could not be deleted, and of which that was said.
_stays: set[Path] = set()


def name_of(step: int) -> str:
    """The name of a step's folder."""
    return f"step-{step:09d}"


def prepare(directory: Path) -> int:
    """Make the directory, take it for this process, and clean up after runs that were killed.

    Returns:
        A serial number larger than that of every checkpoint in the directory.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True, exist_ok=True)
        flush(directory.parent)
    lock(directory)
    for entry in sorted(directory.iterdir()):
        if entry.name.startswith((_SAVING, _REMOVING)):
            _delete(entry)
        elif entry.name.endswith(_OLD) and _CHECKPOINT.fullmatch(entry.name):
            _finish_replacing(entry)
    return 1 + max((m.serial for _, m in _readable(directory) if m), default=0)


def _finish_replacing(old: Path) -> None:
    new = old.with_name(old.name.removesuffix(_OLD))
    if new.exists():
        _remove(old)
    else:
        os.rename(old, new)
        flush(old.parent)


def write_folder(directory: Path, name: str, fill: Callable[[Path], None]) -> None:
    """Make a checkpoint's folder, in the place of one with that name.

    What it replaces goes, or stays hidden if it cannot be deleted now.

    Args:
        directory: as :func:`prepare` left it.
        name: what :func:`name_of` gave.
        fill: writes all files into the folder that it is given, the manifest last.

    Raises:
        OSError: a file cannot be written; the directory is then as it was.
    """
    temporary = _unused(directory / (_SAVING + name))
    try:
        temporary.mkdir()
        fill(temporary)
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


def prune(directory: Path, keep: int | None, newest: str) -> None:
    """Delete all but the ``keep`` newest checkpoints; None deletes none.

    One that cannot be deleted now is left to the next save. What cannot be read counts as oldest.
    The one that is named ``newest`` is never deleted.
    """
    if keep is None:
        return
    folders = sorted(
        _readable(directory),
        key=lambda each: (each[0].name == newest, each[1].serial if each[1] else 0, each[0].name),
    )
    for folder, _ in folders[:-keep]:
        _remove(folder)


def newest_valid(
    directory: Path, skip: Callable[[Path, str], None]
) -> tuple[Path, Manifest] | None:
    """The newest checkpoint whose files are all as they were written; None if there is none.

    Args:
        directory: it need not exist.
        skip: is told the folder of every newer one that is damaged, and the reason.
    """
    readable = []
    for folder in sorted(_checkpoints(directory), reverse=True):
        try:
            readable.append((folder, read_manifest(folder)))
        except DamagedError as error:
            skip(folder, str(error))
    for folder, manifest in sorted(readable, key=lambda each: each[1].serial, reverse=True):
        try:
            verify(folder, manifest)
        except DamagedError as error:
            skip(folder, str(error))
        else:
            return folder, manifest
    return None


def flush(path: Path) -> None:
    """Have a file, or a folder's list of names, on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _checkpoints(directory: Path) -> Iterator[Path]:
    if directory.is_dir():
        yield from (e for e in directory.iterdir() if _CHECKPOINT.fullmatch(e.name))


def _readable(directory: Path) -> Iterator[tuple[Path, Manifest | None]]:
    for folder in _checkpoints(directory):
        try:
            yield folder, read_manifest(folder)
        except DamagedError:
            yield folder, None


def _remove(folder: Path) -> None:
    """Delete a folder so that no half of it ever looks like a checkpoint."""
    hidden = _unused(folder.with_name(_REMOVING + folder.name))
    try:
        os.rename(folder, hidden)
    except OSError as error:
        _say_that_it_stays(folder, error)
    else:
        _delete(hidden)


def _delete(hidden: Path) -> None:
    """Delete a folder that is no checkpoint, as far as that can be done now.

    On NFS, a file that another process reads stays until it is closed, under another name, and so
    does its folder.
    """
    try:
        shutil.rmtree(hidden)
    except OSError as error:
        shutil.rmtree(hidden, ignore_errors=True)  # what can go takes room on the disk
        if hidden.exists():
            _say_that_it_stays(hidden, error)


def _unused(path: Path) -> Path:
    """The path, or one like it where something of that name could not be deleted."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain((path,), others) if not each.exists())


def _say_that_it_stays(folder: Path, error: OSError) -> None:
    if folder in _stays:
        return
    _stays.add(folder)
    text = f"hvkit: cannot delete {folder} now, the next save tries again: {error}"
    print(text, file=sys.stderr, flush=True)


# Held until the process ends. A record lock belongs to the process: it goes with it, however it
# ends, and the processes that data loaders fork do not keep it.
_held: dict[Path, int] = {}

# File systems without locks; there, keeping two runs apart is the user's part.
_WITHOUT_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def lock(directory: Path) -> None:
    """Take the directory for this process, until it ends; a second call does nothing.

    Raises:
        BlockingIOError: another process has it.
        OSError: the lock's file cannot be made.
    """
    path = directory.resolve() / ".lock"
    if path in _held and _is_open_as(path, _held[path]):
        return
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 200).decode(errors="replace") or "another process"
        os.close(handle)
        if error.errno in _WITHOUT_LOCKS:
            return
        raise BlockingIOError(
            errno.EAGAIN,
            f"{owner} saves its checkpoints in this directory: give every run its own, or end "
            "the other one first",
            str(directory),
        ) from None
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
    _held[path] = handle


def _is_open_as(path: Path, handle: int) -> bool:
    """Not so when the directory was deleted and made again."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


MANIFEST = "manifest.json"
FORMAT = 2


class DamagedError(HvkitError):
    """A checkpoint's folder does not hold what was written into it."""


@dataclass(frozen=True)
class Manifest:
    """The contents of ``manifest.json``."""

    epoch: int
    step: int
    batches: int
    """Batches of the epoch that each rank had."""
    size: int
    """The number of ranks that saved."""
    serial: int
    """Counts the saves in a directory: the newest checkpoint has the largest."""
    extras: dict[str, Any]
    parts: dict[str, dict[str, Any]]
    """For each part its file and what loading it has to know."""
    files: dict[str, dict[str, Any]]
    """For each file its length in bytes and its sha256."""
    versions: dict[str, str]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        body = asdict(self)
        text = json.dumps({**body, "sha256": _digest_of(body)}, indent=1)
        (folder / MANIFEST).write_text(text + "\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint's folder.

    Raises:
        DamagedError: it is missing, cut short or changed.
        HvkitError: an older or newer hvkit wrote it, in another format.
    """
    try:
        body = json.loads((folder / MANIFEST).read_bytes())
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
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


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file with the manifest.

    Raises:
        DamagedError: names the file and what is wrong with it.
    """
    for name, written in manifest.files.items():
        try:
            found = facts_of(folder / name)
        except PermissionError:
            raise  # no damage, and nothing to skip in silence
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name}: {error.strerror}") from None
        if found["bytes"] != written["bytes"]:
            raise DamagedError(f"{name} has {found['bytes']} of {written['bytes']} bytes")
        if found != written:
            raise DamagedError(f"{name} is not what was written: its sha256 differs")


def facts_of(path: Path) -> dict[str, Any]:
    """Length in bytes and sha256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def versions() -> dict[str, str]:
    """The versions of Python, hvkit and the libraries that are in use."""
    found = {"python": sys.version.split()[0]}
    for module, package in (
        ("hvkit", "hvkit"),
        ("numpy", "numpy"),
        ("torch", "torch"),
        ("tensorflow", "tensorflow"),
        ("keras", "keras"),
    ):
        if module in sys.modules:
            version = getattr(sys.modules[module], "__version__", None)
            found[package] = str(version or metadata.version(package))
    return found


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
