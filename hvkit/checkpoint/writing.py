"""Writes a checkpoint's files, at once or in a thread that has a copy of them in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hvkit.checkpoint import manifests, rank_states, store
from hvkit.checkpoint.progress import Progress
from hvkit.checkpoint.saved_object import Part
from hvkit.errors import HvkitError
from hvkit.host.run_reports import run_name
from hvkit.log import logger

_HDF5 = ".h5"


class MemoryFolder:
    """A folder whose files are in this process's memory.

    They are anonymous files (``memfd_create``) behind symbolic links, for libraries that can only
    write to a path. They count for memory limits, not for the size of ``/dev/shm``. HDF5 cannot
    write to an anonymous file: Keras's weights are an ordinary temporary file, which is not flushed
    to disk.

    Args:
        names: of the files.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="hvkit-checkpoint-"))
        self._files: dict[str, int] = {}
        self._ordinary: list[Path] = []
        for name in names:
            if name.endswith(_HDF5):
                self._ordinary.append(self.path / name)
                continue
            self._files[name] = number = os.memfd_create(name)
            (self.path / name).symlink_to(f"/proc/{os.getpid()}/fd/{number}")

    def copy_to(self, folder: Path) -> None:
        """Write the files into a folder on disk."""
        for name, number in self._files.items():
            with open(number, "rb", closefd=False) as source, (folder / name).open("wb") as target:
                source.seek(0)
                shutil.copyfileobj(source, target, 1 << 20)
        for file in self._ordinary:
            shutil.copyfile(file, folder / file.name)

    def close(self) -> None:
        """Free the memory."""
        for number in self._files.values():
            os.ftruncate(number, 0)  # a worker that was forked meanwhile has the file, too
            os.close(number)
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)


class BackgroundWriter:
    """Writes one checkpoint at a time in a thread. A process that ends waits for it."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._problem: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread, after ``wait`` has returned."""

        def run() -> None:
            try:
                write()
            except Exception as error:  # of any type: raised in the script's thread by ``wait``
                self._problem = error
                logger.error("the checkpoint was not saved: %s", error)

        # Not a daemon thread: the interpreter waits for it at its end.
        self._thread = threading.Thread(target=run, name="hvkit-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            Exception: what ``write`` has raised, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem


def fill_folder(
    folder: Path, parts: list[Part], states: Iterator[dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], int]:
    """Write a checkpoint's files; return the facts about its parts, and how many ranks save."""
    facts = {}
    for part in parts:
        facts[part.name] = {**part.facts(), "file": part.file}
        part.save(folder / part.file)
    return facts, rank_states.save(folder / rank_states.FILE, states)


def seal(
    folder: Path,
    filled: tuple[dict[str, dict[str, Any]], int],
    progress: Progress,
    serial: int,
    saves: int,
    written: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Flush the files of a checkpoint to disk, and add its manifest.

    Args:
        folder: the files.
        filled: what ``fill_folder`` returned.
        progress, serial, saves: for the manifest.
        written: the lengths and sha256 of all files if they are on disk already.
    """
    facts, size = filled
    if written is None:
        files = sorted(path.name for path in folder.iterdir())
        for file in files:
            store.flush(folder / file)
        written = {file: manifests.facts_of(folder / file) for file in files}
    manifests.Manifest(
        epoch=progress.epoch,
        step=progress.step,
        batches=progress.batches,
        size=size,
        serial=serial,
        extras=progress.extras,
        parts=facts,
        files=dict(written),
        versions=manifests.versions(),
        run=run_name(),
        saves=saves,
        epoch_batches=progress.epoch_batches,
    ).write(folder)
    store.flush(folder / manifests.MANIFEST)


def explained(error: Exception, folder: Path) -> Exception:
    """The error, with the checkpoint's folder in its text."""
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return OSError(error.errno, f"cannot write the checkpoint: {reason}", str(folder))
    if isinstance(error, TypeError | ValueError | HvkitError):
        return error
    return HvkitError(f"{folder}: cannot write the checkpoint: {error}")
