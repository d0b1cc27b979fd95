"""The directory of a run's checkpoints: at every moment, whatever was complete can be read.

A checkpoint is written into a hidden folder, flushed to disk, and renamed. The method is the usual
one for replacing files durably; see Pillai et al., "All File Systems Are Not Created Equal" (2014).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path

from hvkit.checkpoint.lock import lock
from hvkit.checkpoint.manifest import DamagedError, Manifest, read, verify

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


def write(directory: Path, name: str, fill: Callable[[Path], None]) -> None:
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
            readable.append((folder, read(folder)))
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
            yield folder, read(folder)
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
