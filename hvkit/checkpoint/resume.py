"""Loads a checkpoint on all ranks, for ``Checkpoint.restore``.

If it is not in rank 0's directory, it is written there at the same time.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hvkit import runtime
from hvkit.checkpoint import rank_states, store
from hvkit.checkpoint.manifests import Manifest
from hvkit.checkpoint.newest_checkpoint import FoundCheckpoint
from hvkit.checkpoint.saved_object import Arrays, Part
from hvkit.checkpoint.sharded import is_sharded, own_states, require_readable, shares_of
from hvkit.checkpoint.strategies import StrategyPart
from hvkit.communication import collectives, large_objects
from hvkit.communication.collectives import share
from hvkit.errors import HvkitError, RanksDisagreeError
from hvkit.log import logger
from hvkit.sync.nonfinite import kept_statistics

_CALL = "Checkpoint.restore"
# Bytes of a broadcast.
_PIECE = 1 << 24


def require_same_parts(parts: Sequence[Part]) -> None:
    """Raise on every rank unless all ranks have the same parts; a collective.

    Loading is one broadcast for each part: with different ones, ranks would wait forever.

    Raises:
        RanksDisagreeError: names the parts of two ranks.
    """
    everyone = collectives.gather(_CALL, [part.name for part in parts])
    for rank, names in enumerate(everyone):
        if names != everyone[0]:
            raise RanksDisagreeError(
                f"Checkpoint needs the same parts on every rank: rank 0 has "
                f"{everyone[0]}, rank {rank} has {names}"
            )


def load(
    found: FoundCheckpoint,
    parts: Sequence[Part],
    take: Callable[[str, memoryview], None] | None = None,
) -> Arrays:
    """Load the files of one rank into every rank's parts; a collective.

    Args:
        found: the checkpoint.
        parts: of this rank.
        take: gets each file, with its name, on every rank.

    Returns:
        The random state with which this rank shuffled the epoch of ``fit``, if it was inside one.

    Raises:
        ValueError: the checkpoint lacks a part, or does not fit one.
    """
    folder, manifest = found.folder, found.manifest
    _require_parts(folder, manifest, parts)
    problem: Exception | None = None
    epoch_random: Arrays = {}
    same_size = manifest.size == runtime.size()
    kept = [part for part in parts if isinstance(part, StrategyPart)]
    in_round = (
        same_size
        and bool(kept)
        and all(part.may_go_on(manifest.parts.get(part.name, {})) for part in kept)
    )
    sharded = is_sharded(manifest)
    if sharded:
        _require_shared(folder, manifest, is_here=take is None)
    for each in kept:
        each.in_round = in_round
        each.keeper.arrive()
    for part in parts:
        if part.name not in manifest.parts:
            part.begin_after(manifest.step)
            continue
        facts = {**manifest.parts[part.name], "step": manifest.step}
        if files := shares_of(folder, facts):
            try:
                part.load_shares(files, facts)
            except Exception as error:
                problem = problem or _explained(error, part, folder)
            continue
        content, problem = _content(found, part.file, problem)
        if take is not None:
            take(part.file, content)
        if problem is None:
            try:
                part.load(content, facts)
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = _explained(error, part, folder)
    try:
        with ExitStack() as stack:

            @functools.cache
            def saved() -> rank_states.Saved:  # on the rank that reads
                path = folder / rank_states.FILE
                opened = rank_states.Saved(path, same_size=same_size, in_round=in_round)
                return stack.enter_context(closing(opened))

            if sharded:
                own = own_states(folder, manifest, same_size=same_size, in_round=in_round)
            else:
                own = large_objects.scatter(_CALL, lambda rank: saved().of(rank), found.rank)
        if problem is None:
            epoch_random = rank_states.put_back(own, parts)
    except Exception as error:
        problem = problem or error
    share(_CALL, problem, None)
    for statistics in kept_statistics:
        statistics.keep()
    if runtime.rank() == 0:
        _log_resumed(found, parts)
    for each in kept:
        if each.name not in manifest.parts:
            each.begin_anew("the checkpoint has no state of theirs")
    return epoch_random


def _require_shared(folder: Path, manifest: Manifest, *, is_here: bool) -> None:
    """Raise on every rank unless all see a sharded checkpoint; a collective.

    Raises:
        HvkitError: names a rank that does not.
    """
    problem = None
    try:
        require_readable(folder, manifest)
        if not is_here:
            raise HvkitError(f"{folder} is sharded, but rank 0's directory is another one")
    except HvkitError as error:
        problem = error
    share(_CALL, problem, None)


def _require_parts(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    for part in parts:
        saved = manifest.parts.get(part.name)
        if saved is None and part.optional:
            continue
        if saved is None:
            raise ValueError(
                f"{folder} holds no {part.name!r}, it holds {', '.join(manifest.parts)}: create "
                "Checkpoint with the parts it was saved with, or use another directory"
            )
        if saved["file"] != part.file:
            raise ValueError(
                f"{folder} holds {part.name!r} as {saved['file']}, but here it would be "
                f"{part.file}: restore into objects of the saved kind, or use another directory"
            )


def _content(
    found: FoundCheckpoint, file: str, problem: Exception | None
) -> tuple[memoryview, Exception | None]:
    """The bytes of one rank's file on every rank, and the first problem so far.

    Ranks that already have a problem still take part in the broadcast.
    """
    content = np.empty(0, np.uint8)
    error: OSError | None = None
    if runtime.rank() == found.rank:
        path = found.folder / file
        try:
            content = np.fromfile(path, np.uint8)
        except OSError as unreadable:
            error = OSError(unreadable.errno, unreadable.strerror, str(path))
    if error := collectives.from_rank(found.rank, error):
        return memoryview(b""), problem or error
    return collectives.broadcast_bytes(content, found.rank).data, problem


def _explained(error: Exception, part: Part, folder: Path) -> Exception:
    if isinstance(error, OSError):
        return error
    return ValueError(
        f"{folder}: {part.file} does not fit {part.name} here: {error}; restore into the kind of "
        "object that was saved, or use another directory"
    )


def _log_resumed(found: FoundCheckpoint, parts: Sequence[Part]) -> None:
    folder, manifest = found.folder, found.manifest
    left = [name for name in manifest.parts if name not in {part.name for part in parts}]
    if left:
        logger.info(f"{folder} also holds {', '.join(left)}: not loaded")
    text = f"resumed {found} (epoch {manifest.epoch}, step {manifest.step})"
    size = runtime.size()
    if manifest.size != size:
        text += f" saved on {_ranks(manifest.size)}; {_ranks(size)} now"
    if manifest.size < size:
        new = f"rank {size - 1}" if size - manifest.size == 1 else f"ranks from {manifest.size} on"
        text += f"; {new}: random state as the script set it"
    logger.info(text)


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


class RemoteCopy:
    """Writes a checkpoint, while the ranks load it, into rank 0's directory as its newest.

    No file is sent twice: rank 0 writes the files that it receives for loading, and at the end of
    the block, which is a collective, it receives the others. If rank 0 cannot write, it logs that,
    and the run resumes nevertheless. After an error in the block the directory is as it was.

    Args:
        found: the checkpoint, the same on every rank.
        directory: rank 0's directory of checkpoints.

    Raises:
        OSError: at the end of the block, on every rank: a rank cannot read the checkpoint.
    """

    def __init__(self, found: FoundCheckpoint, directory: Path) -> None:
        self._found, self._directory = found, directory
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._serial = found.manifest.serial
        self._taken: set[str] = set()
        # Why rank 0 cannot write.
        self._problem: Exception | None = None

    def __enter__(self) -> RemoteCopy:
        if runtime.rank() == 0:
            try:
                # Checkpoints of other runs there may have larger serials.
                numbers = store.prepare(self._directory)
                self._serial = max(self._serial, numbers.serial + 1)
                name = store.name_of(self._found.manifest.step)
                folder = store.new_folder(self._directory, name)
                self._folder = self._stack.enter_context(folder)
            except Exception as error:  # any error: the other ranks must not wait for this one
                self._problem = error
        return self

    def take(self, name: str, content: memoryview) -> None:
        """Write a file that every rank has received; called on every rank."""
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
            for name, piece in _rest_of(self._found, self._taken):
                self._append(name, piece)
        except OSError as failed:  # on every rank
            unreadable = failed
        problem = self._finish(unreadable)
        share(_CALL, problem, None)

    def _append(self, name: str, content: Any) -> None:
        if self._folder is None or self._problem is not None:
            return
        try:
            with (self._folder / name).open("ab") as file:
                file.write(content)
        except OSError as error:
            self._problem = error

    def _finish(self, unreadable: OSError | None) -> Exception | None:
        """Complete the folder with a manifest, on rank 0, unless something has failed.

        Returns:
            The error that all ranks must raise.
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


def _rest_of(found: FoundCheckpoint, taken: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield the other files of a checkpoint in pieces, each with the file's name; a collective.

    Args:
        found: the checkpoint; its rank reads the files.
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
