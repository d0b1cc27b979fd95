"""Writes checkpoints: whole objects, on rank 0, or of each rank its own part.

Rank 0 makes a hidden folder. It writes the files of all objects, at once or in a thread that has a
copy of them in memory; or in a sharded checkpoint, of models that fit into no rank, every rank
writes its own. All ranks must then see the directory. The folder becomes a checkpoint when all
files are on disk, with their sha256 in the manifest.

In place of ``model.pt`` a sharded one holds ``model-of-rank-00000.pt`` and so on, of each rank that
has a part that no lower rank has. The format of these files, and its reasons, are in
``frameworks/pytorch/model_parallel/sharded_tensors.py``. ``join`` makes ``model.pt`` of them.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.replicas import Replicas
from hvkit.checkpoint.saved_object import (
    RANKS_FILE,
    Part,
    all_of,
    saved_states,
    write_arrays,
    write_states,
)
from hvkit.checkpoint.store import DamagedError, Manifest
from hvkit.communication.collectives import share
from hvkit.communication.encoding import sendable
from hvkit.errors import HvkitError
from hvkit.host.run_reports import report, run_name
from hvkit.log import logger
from hvkit.random_states import Arrays

_HDF5 = ".h5"
# Seconds for a folder or a file of another rank to appear: NFS shows them late.
_PATIENCE = 30.0
# Bytes from which ``join`` puts a tensor together in a file.
_LARGE = 1 << 20


class Writer:
    """Writes the checkpoints of a run into its directory. A process that ends waits for it.

    Args:
        directory: rank 0's directory.
        keep: how many of the newest checkpoints to keep; None for all.
        background: whether a thread writes them to disk.
        replicas: gets each complete checkpoint.
    """

    def __init__(
        self, directory: Path, keep: int | None, background: bool, replicas: Replicas
    ) -> None:
        self.directory = directory
        self.saves = 0
        """The number of saves of this run so far."""
        self._keep, self._background, self._replicas = keep, background, replicas
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
            Exception: why it could not be written, once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._problem is not None:
            problem, self._problem = self._problem, None
            raise problem

    def save(
        self,
        call: str,
        manifest: Manifest,
        parts: Sequence[Part],
        states: Iterator[dict[str, Arrays]],
    ) -> None:
        """Write whole objects, on rank 0; a collective.

        Args:
            call: the user's call.
            manifest: where training continues; rank 0 adds the rest.
            parts: what to save.
            states: what differs between ranks, from ``messages.collect``.
        """
        problem: Exception | None = None
        with all_of(part.gathered() for part in parts):
            if runtime.rank() == 0:
                try:
                    self._write(self._numbered(manifest), parts, states)
                except Exception as error:  # any error: the others must not wait for this one
                    problem = self._explained(error, manifest.step)
            try:
                for _ in states:  # the other ranks send states; after an error rank 0 drops them
                    pass
            except HvkitError as error:  # on every rank
                problem = problem or error
            share(call, problem, None)

    def _write(
        self, manifest: Manifest, parts: Sequence[Part], states: Iterable[dict[str, Arrays]]
    ) -> None:
        """Write a checkpoint's folder, or start to."""

        def fill(folder: Path) -> Manifest:
            facts = {}
            for part in parts:
                facts[part.name] = {**part.facts(), "file": part.file}
                part.save(folder / part.file)
            write_states(folder / RANKS_FILE, states)
            return replace(manifest, parts=facts)

        def write(fill: Callable[[Path], Manifest]) -> None:
            with self._new_folder(manifest.step) as folder:
                _seal(folder, fill(folder))
            self._finish(manifest.step)

        if not self._background:
            write(fill)
            return
        copy = MemoryFolder([*(part.file for part in parts), RANKS_FILE])
        try:
            filled = fill(copy.path)
        except BaseException:
            copy.close()
            raise

        def copied(folder: Path) -> Manifest:
            copy.copy_to(folder)
            return filled

        def write_copy() -> None:
            try:
                write(copied)
            except Exception as error:
                raise self._explained(error, manifest.step) from error
            finally:
                copy.close()

        self.start(write_copy)

    def save_sharded(
        self, call: str, manifest: Manifest, parts: Sequence[Part], local: Mapping[str, Arrays]
    ) -> None:
        """Write each rank's own part; a collective.

        Args:
            call, manifest, parts: as for ``save``.
            local: the state of this rank that the files of parts do not hold.

        Raises:
            OSError: a rank could not write, or does not see the directory; on every rank.
        """
        problem: Exception | None = None
        path, written = "", _Written()
        with ExitStack() as stack:
            if runtime.rank() == 0:
                try:
                    manifest = self._numbered(manifest)
                    path = str(stack.enter_context(self._new_folder(manifest.step)).absolute())
                except Exception as error:  # any error: the others must not wait for this one
                    problem = self._explained(error, manifest.step)
            folder = Path(share(call, problem, path)[0])
            try:
                _wait_for(folder, "the directory, which all ranks of a sharded checkpoint write to")
                written = _write_shards(folder, parts, local)
            except Exception as error:
                problem = self._explained(error, manifest.step)
            by_rank = share(call, problem, written)
            if runtime.rank() == 0:
                try:
                    _complete(folder, manifest, parts, by_rank)
                    stack.close()
                    self._finish(manifest.step)
                except Exception as error:
                    problem = self._explained(error, manifest.step)
            share(call, problem, None)

    def _numbered(self, manifest: Manifest) -> Manifest:
        """The manifest with the numbers of the next save; locks the directory."""
        serial, saves = store.prepare(self.directory)
        self.saves = max(saves, self.saves) + 1
        return replace(
            manifest,
            serial=serial + 1,
            saves=self.saves,
            run=run_name(),
            versions=_versions(),
        )

    def _new_folder(self, step: int) -> AbstractContextManager[Path]:
        return store.new_folder(self.directory, store.name_of(step))

    def _finish(self, step: int) -> None:
        """Count a checkpoint that is complete, and send copies of it."""
        name = store.name_of(step)
        report(saved=step, directory=store.id_of(self.directory))
        store.prune(self.directory, self._keep, name)
        self._replicas.send(self.directory / name)

    def _explained(self, error: Exception, step: int) -> Exception:
        """The error, with the checkpoint's folder in its text."""
        folder = self.directory / store.name_of(step)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            return OSError(error.errno, f"cannot write the checkpoint: {reason}", str(folder))
        if isinstance(error, TypeError | ValueError | HvkitError):
            return error
        return HvkitError(f"{folder}: cannot write the checkpoint: {error}")


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


def _seal(folder: Path, manifest: Manifest) -> None:
    """Flush the files of a checkpoint to disk, and add the manifest, which lists them."""
    files = store.flushed(folder, (path.name for path in folder.iterdir()))
    replace(manifest, files=files).write(folder)


def _versions() -> dict[str, str]:
    """The versions of Python, hvkit and the libraries that are in use."""
    found = {"python": sys.version.split()[0]}
    for package in ("hvkit", "numpy", "torch", "tensorflow", "keras"):
        if package in sys.modules:
            version = getattr(sys.modules[package], "__version__", None)
            found[package] = str(version or metadata.version(package))
    return found


def states_file(rank: int) -> str:
    """The name of the file with what differs between ranks, of one rank of a sharded checkpoint."""
    return f"ranks-{rank:05}.npz"


def is_sharded(manifest: Manifest) -> bool:
    """Whether each rank has written its own part."""
    return states_file(0) in manifest.files


@sendable
@dataclass(frozen=True)
class _Written:
    """The files that one rank has written of a sharded checkpoint."""

    shards: dict[str, str] = field(default_factory=dict)
    """By part, the name of the file with its shard."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By file, its length and sha256."""


def _write_shards(folder: Path, parts: Sequence[Part], local: Mapping[str, Arrays]) -> _Written:
    """Write this rank's files, and flush them."""
    rank = runtime.rank()
    shards: dict[str, str] = {}
    files = [states_file(rank)]
    write_states(folder / states_file(rank), [local])
    for part in parts:
        if part.sharded is not None:
            from hvkit.checkpoint.pytorch import write_shard

            shard_file = f"{part.name}-of-rank-{rank:05}.pt"
            if write_shard(folder / shard_file, part, first=rank == 0):
                shards[part.name] = shard_file
                files.append(shard_file)
        elif rank == 0:
            part.save(folder / part.file)
            files.append(part.file)
    return _Written(shards, store.flushed(folder, files))


def _complete(
    folder: Path,
    manifest: Manifest,
    parts: Sequence[Part],
    by_rank: Sequence[_Written],
) -> None:
    """Add the manifest of a sharded checkpoint, once rank 0 sees all bytes of all files."""
    files = {name: facts for written in by_rank for name, facts in written.files.items()}
    for name, facts in files.items():
        file = folder / name
        _wait_for(file, "a file that another rank has written: put the directory where all see it")
        if (found := file.stat().st_size) != facts["bytes"]:
            raise HvkitError(f"{file} has {found} of {facts['bytes']} bytes")
    of_parts: dict[str, dict[str, Any]] = {}
    for part in parts:
        of_parts[part.name] = {**part.facts(), "file": part.file}
        if shards := [each.shards[part.name] for each in by_rank if part.name in each.shards]:
            of_parts[part.name]["shares"] = shards
    replace(manifest, parts=of_parts, files=files).write(folder)


def _wait_for(path: Path, what: str) -> None:
    """Wait until this rank sees a file or a folder; FileNotFoundError after a while."""
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise FileNotFoundError(2, f"rank {runtime.rank()} does not see {what}", str(path))
        time.sleep(0.1)


def join(source: Path, directory: Path) -> Path:
    """Write the plain files of a sharded checkpoint into a directory of checkpoints.

    They are those that rank 0 would have written of all ranks. Tensors that ranks have divided are
    put together one at a time, in files that are mapped into memory: joining needs disk for them,
    but hardly any memory, however large the model is.

    Args:
        source: the checkpoint's folder, or a directory, of which the newest one counts.
        directory: another one; created if it is not there.

    Returns:
        The new checkpoint's folder.

    Raises:
        HvkitError: the source is no sharded checkpoint, or damaged, or in the same directory.
        OSError: it cannot be read, or the new one not be written.
    """
    folder = source
    if not store.is_name(source.absolute().name):
        found = [(m.serial, path) for path, m in store.readable(source, lambda *_: None)]
        if not found:
            raise HvkitError(f"{source} holds no checkpoint: name a folder such as step-000000100")
        folder = max(found)[1]
    if folder.absolute().parent == directory.absolute():
        raise HvkitError(f"{directory} holds the checkpoint itself: name another directory")
    try:
        manifest = store.read(folder)
        store.verify(folder, manifest)
    except DamagedError as error:
        raise HvkitError(f"{folder} is no complete checkpoint: {error}") from error
    if not is_sharded(manifest):
        raise HvkitError(f"{folder} is not sharded: its files are plain ones already")
    serial, _ = store.prepare(directory)
    parts = {name: dict(facts) for name, facts in manifest.parts.items()}
    with store.new_folder(directory, folder.name) as target:
        for facts in parts.values():
            if shards := facts.pop("shares", None):
                _join_shards([folder / shard for shard in shards], target / facts["file"])
            else:
                shutil.copyfile(folder / facts["file"], target / facts["file"])
        write_states(target / RANKS_FILE, _states_of_all(folder, manifest.size))
        _seal(target, replace(manifest, serial=serial + 1, parts=parts))
    return directory / folder.name


def _states_of_all(folder: Path, size: int) -> Iterator[dict[str, Arrays]]:
    for rank in range(size):
        with saved_states(folder / states_file(rank)) as states:
            yield states.of(0)


def _join_shards(files: list[Path], path: Path) -> None:
    """Write the plain file of a part of which each rank has written a shard."""
    import torch

    from hvkit.frameworks.pytorch.model_parallel.sharded_tensors import SavedState

    numbers = itertools.count()
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:

        def new(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
            length = shape.numel()
            if length * dtype.itemsize < _LARGE:
                return torch.empty(shape, dtype=dtype)
            file = str(Path(scratch, str(next(numbers))))
            whole: torch.Tensor = torch.from_file(file, shared=True, size=length, dtype=dtype)
            return whole.view(shape)

        state: Any = SavedState(files).plain(new, alias=True)
        if path.suffix == ".npz":
            write_arrays(path, state)
        else:
            with path.open("wb") as file:
                torch.save(state, file)
