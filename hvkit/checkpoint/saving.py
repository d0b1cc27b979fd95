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
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.replicas import Replicas
from hvkit.checkpoint.saved_object import (
    RANKS_FILE,
    Part,
    all_of,
    states_of,
    write_arrays,
    write_states,
)
from hvkit.checkpoint.store import DamagedError, Manifest
from hvkit.communication.collectives import gather_or_raise
from hvkit.errors import HvkitError
from hvkit.host.run_reports import report, run_name
from hvkit.log import logger
from hvkit.random_states import Arrays

SAVE = "Checkpoint.save"

# Seconds for a folder or a file of another rank to appear: NFS shows them late.
_PATIENCE = 30.0
# Bytes from which ``join`` puts a tensor together in a file.
_LARGE = 1 << 20

# Of one rank: by part, the file with its shard; by file, length and sha256.
_Written = tuple[dict[str, str], dict[str, dict[str, Any]]]


class Writer:
    """Writes the checkpoints of a run into rank 0's directory, and has ``replicas`` send them."""

    def __init__(
        self, directory: Path, keep: int | None, background: bool, replicas: Replicas
    ) -> None:
        self.directory = directory
        self.saves = 0
        """The number of saves of this run so far."""
        self._serial = 0
        """The last save's ``serial``, which the cache of ``store.prepare`` may not have."""
        self._keep, self._background, self._replicas = keep, background, replicas
        self._writing: Future[None] | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Call ``write`` in a thread, for which the interpreter waits at its end."""
        executor = ThreadPoolExecutor(1, "hvkit-checkpoint")
        self._writing = executor.submit(write)
        self._writing.add_done_callback(_log_failure)
        executor.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raises, once, why it could not be."""
        if (writing := self._writing) is not None:
            writing.exception()  # only waits: after an interrupt, the next call waits again
            self._writing = None
            writing.result()

    def save(self, manifest: Manifest, parts: Sequence[Part], states: Iterator[Arrays]) -> None:
        """Write plain files, on rank 0; a collective. ``states`` are from ``collect``."""
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
            gather_or_raise(SAVE, problem, None)

    def _write(self, manifest: Manifest, parts: Sequence[Part], states: Iterable[Arrays]) -> None:
        def fill(folder: Path) -> Manifest:
            facts = {}
            for part in parts:
                facts[part.name] = {**part.facts(), "file": part.file}
                part.save(folder / part.file)
            write_states(folder / RANKS_FILE, states)
            return replace(manifest, parts=facts)

        if not self._background:
            with self._new_folder(manifest.step) as folder:
                _seal(folder, fill(folder))
            self._finish(manifest.step)
            return
        with ExitStack() as stack:
            memory = _folder_in_memory([*(part.file for part in parts), RANKS_FILE])
            copy = stack.enter_context(memory)
            filled = fill(copy)
            until_copied = stack.pop_all()

        def write_copy() -> None:
            try:
                with until_copied, self._new_folder(manifest.step) as folder:
                    for file in copy.iterdir():
                        shutil.copyfile(file, folder / file.name)
                    _seal(folder, filled)
                self._finish(manifest.step)
            except Exception as error:
                raise self._explained(error, manifest.step) from error

        self.start(write_copy)

    def save_sharded(self, manifest: Manifest, parts: Sequence[Part], local: Arrays) -> None:
        """Write each rank's own part, and the states that no part holds; a collective."""
        problem: Exception | None = None
        path = ""
        written: _Written = ({}, {})
        with ExitStack() as stack:
            if runtime.rank() == 0:
                try:
                    manifest = self._numbered(manifest)
                    path = str(stack.enter_context(self._new_folder(manifest.step)).absolute())
                except Exception as error:  # any error: the others must not wait for this one
                    problem = self._explained(error, manifest.step)
            folder = Path(gather_or_raise(SAVE, problem, path)[0])
            try:
                _wait_for(folder, "the directory, which all ranks of a sharded checkpoint write to")
                written = _write_shards(folder, parts, local)
            except Exception as error:
                problem = self._explained(error, manifest.step)
            by_rank = gather_or_raise(SAVE, problem, written)
            if runtime.rank() == 0:
                try:
                    _complete(folder, manifest, parts, by_rank)
                    stack.close()
                    self._finish(manifest.step)
                except Exception as error:
                    problem = self._explained(error, manifest.step)
            gather_or_raise(SAVE, problem, None)

    def _numbered(self, manifest: Manifest) -> Manifest:
        """The manifest with the numbers of the next save; locks the directory."""
        serial, saves = store.prepare(self.directory)
        self._serial, self.saves = max(serial, self._serial) + 1, max(saves, self.saves) + 1
        numbered = replace(manifest, serial=self._serial, saves=self.saves)
        return replace(numbered, run=run_name(), versions=_versions())

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


def _log_failure(writing: Future[None]) -> None:
    if error := writing.exception():
        logger.error("the checkpoint was not saved: %s", error)


@contextmanager
def _folder_in_memory(names: Iterable[str]) -> Iterator[Path]:
    """A folder for files of these names, which are in this process's memory.

    They are anonymous files (``memfd_create``) behind symbolic links, for libraries that can only
    write to a path. They count for memory limits, not for the size of ``/dev/shm``. HDF5 cannot
    write to an anonymous file: Keras's weights are an ordinary temporary file, which is not flushed
    to disk.
    """
    folder = Path(tempfile.mkdtemp(prefix="hvkit-checkpoint-"))
    numbers: list[int] = []
    try:
        for name in names:
            if not name.endswith(".h5"):
                numbers.append(os.memfd_create(name))
                (folder / name).symlink_to(f"/proc/{os.getpid()}/fd/{numbers[-1]}")
        yield folder
    finally:
        for number in numbers:
            os.ftruncate(number, 0)  # a worker that was forked meanwhile has the file, too
            os.close(number)
        shutil.rmtree(folder, ignore_errors=True)


def _seal(folder: Path, manifest: Manifest) -> None:
    """Flush the files of a checkpoint to disk, and add the manifest, which lists them."""
    files = store.flushed(folder, (path.name for path in folder.iterdir()))
    replace(manifest, files=files).write(folder)


def _versions() -> dict[str, str]:
    libraries = ("hvkit", "numpy", "torch", "tensorflow", "keras")
    in_use = {name: sys.modules[name] for name in libraries if name in sys.modules}
    found = {name: str(getattr(module, "__version__", "")) for name, module in in_use.items()}
    return {"python": sys.version.split()[0], **found}


def states_file(rank: int) -> str:
    return f"ranks-{rank:05}.npz"


def is_sharded(manifest: Manifest) -> bool:
    return states_file(0) in manifest.files


def _write_shards(folder: Path, parts: Sequence[Part], local: Arrays) -> _Written:
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
    return shards, store.flushed(folder, files)


def _complete(
    folder: Path, manifest: Manifest, parts: Sequence[Part], by_rank: Sequence[_Written]
) -> None:
    """Add the manifest of a sharded checkpoint, once rank 0 sees all bytes of all files."""
    files = {name: facts for _, of_rank in by_rank for name, facts in of_rank.items()}
    for name, facts in files.items():
        file = folder / name
        _wait_for(file, "a file that another rank has written: put the directory where all see it")
        if (found := file.stat().st_size) != facts["bytes"]:
            raise HvkitError(f"{file} has {found} of {facts['bytes']} bytes")
    of_parts: dict[str, dict[str, Any]] = {}
    for part in parts:
        of_parts[part.name] = {**part.facts(), "file": part.file}
        if shards := [of_rank[part.name] for of_rank, _ in by_rank if part.name in of_rank]:
            of_parts[part.name]["shares"] = shards
    replace(manifest, parts=of_parts, files=files).write(folder)


def _wait_for(path: Path, what: str) -> None:
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise FileNotFoundError(2, f"rank {runtime.rank()} does not see {what}", str(path))
        time.sleep(0.1)


def join(source: Path, directory: Path) -> Path:
    """Write the plain files of a sharded checkpoint into another directory; return their folder.

    They are those that rank 0 would have written of all ranks. Tensors that ranks have divided are
    put together one at a time, in files that are mapped into memory: joining needs disk for them,
    but hardly any memory, however large the model is. Of a directory, the newest checkpoint counts.
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


def _states_of_all(folder: Path, size: int) -> Iterator[Arrays]:
    for rank in range(size):
        with np.load(folder / states_file(rank)) as values:
            yield states_of(values, values.files)


def _join_shards(files: list[Path], path: Path) -> None:
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

        state: Any = SavedState(files).plain(new)
        if path.suffix == ".npz":
            write_arrays(path, state)
        else:
            with path.open("wb") as file:
                torch.save(state, file)
