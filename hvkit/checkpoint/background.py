"""Saving in the background: a copy of the files in memory, and a thread that writes it to disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from hvkit.log import logger

_HDF5 = ".h5"


class MemoryFolder:
    """A folder whose files are in this process's memory, wherever their paths seem to lead.

    They are anonymous files (``memfd_create``) behind symbolic links: libraries that write to a
    path need no other way. Memory limits count them, limits of ``/dev/shm`` do not. HDF5 writes to
    no file without a name: Keras's weights are an ordinary file in the folder for temporary files,
    which nothing flushes to disk.

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
            os.close(number)
        self._files.clear()
        shutil.rmtree(self.path, ignore_errors=True)


class Writer:
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

        # No daemon: the interpreter waits for it before it ends.
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
