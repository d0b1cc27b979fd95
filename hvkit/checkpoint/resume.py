"""Where training continues; loads a checkpoint on all ranks, and copies it if rank 0 lacks it."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvkit import random_states, runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.newest_checkpoint import RESTORE, FoundCheckpoint
from hvkit.checkpoint.part_types import StrategyPart
from hvkit.checkpoint.saved_object import (
    RANKS_FILE,
    Part,
    keys_by_rank,
    load_rank_states,
    states_of,
)
from hvkit.checkpoint.saving import is_sharded, states_file
from hvkit.checkpoint.store import Manifest
from hvkit.communication import collectives
from hvkit.communication.collectives import gather_or_raise
from hvkit.errors import HvkitError
from hvkit.log import counted, logger
from hvkit.random_states import Arrays
from hvkit.sync.port import kept_statistics

# Bytes of a broadcast of files that are only copied.
_PIECE = 1 << 24

# Takes the name and the content of a file, or of the next piece of it.
_Take = Callable[[str, NDArray[np.uint8]], None]


@dataclass(frozen=True)
class Progress:
    """Where training continues."""

    epoch: int = 0
    """The number of epochs done, as passed to ``save``."""
    step: int = 0
    """The number of optimizer steps done, as passed to ``save``."""
    batches: int = 0
    """Batches of the epoch that this rank must skip, because the saved run trained on them.

    If another number of ranks has saved, for batches of a rank that are as large as before.
    """
    extras: dict[str, Any] = field(default_factory=dict)
    """The extras that were passed to ``save``; tuples come back as lists."""
    size: int | None = None
    """The number of ranks that saved; None if there was no checkpoint."""
    folder: Path | None = None
    """The checkpoint's folder; None if there was no checkpoint."""
    epoch_batches: int = 0
    """Batches of a whole epoch on each rank of a ``fit`` that has saved in the middle of one."""


@dataclass
class FitProgress:
    """The state with which Keras's ``fit`` continues after ``restore``, and which its saves add."""

    start: Progress = field(default_factory=Progress)
    """The restored progress, until an epoch begins."""
    batches_read: int = 0
    """Batches of the epoch that each rank of the saved run had read."""
    random: Arrays = field(default_factory=dict)
    """The states of the random generators after ``restore``, until they are set again."""
    saved_epoch_random: Arrays = field(default_factory=dict)
    """Those with which the saved run shuffled an epoch that it did not end, until they are set."""
    epoch_random: Arrays = field(default_factory=dict)
    """Those with which this run shuffled its epoch."""
    epoch_batches: int = 0
    """Batches of an epoch on this rank; 0 if unknown."""

    def set_random(self) -> None:
        """Set the random generators to the states after ``restore``; only the first time."""
        if self.random:
            random_states.set_from_arrays(self.random)
            self.random = {}

    def begin_epoch(self) -> None:
        """Shuffle as the saved run did in the epoch that it did not end; only the first time."""
        if self.saved_epoch_random:
            random_states.set_from_arrays(self.saved_epoch_random)
            self.saved_epoch_random = {}
        self.epoch_random = random_states.as_arrays()

    def take_batches(self, epoch: int, epoch_batches: int) -> int:
        """The batches to skip, after ``restore``, of an epoch that begins; 0 at the next call.

        ``epoch_batches`` is how many it has on this rank, 0 if unknown.
        """
        self.epoch_batches = epoch_batches
        start, self.start = self.start, Progress()
        if start.size is None or epoch != start.epoch:
            return 0
        then, now = (start.size, start.epoch_batches), (runtime.size(), epoch_batches)
        return batches_after(self.batches_read, then, now)


def batches_after(read: int, then: tuple[int, int], now: tuple[int, int]) -> int:
    """The batches of an epoch that a rank must skip, rounded down.

    Each rank of the saved run has read ``read`` batches. ``then`` and ``now`` are the number of
    ranks, and of a rank's batches in a full epoch; 0 if unknown. A script may keep the batch of
    each rank on another number of ranks, or that of all together.
    """
    (ranks_then, all_then), (ranks_now, all_now) = then, now
    ratio = ranks_then / ranks_now
    as_large = abs(all_now - all_then * ratio) < max(ratio, 1)
    if ranks_then == ranks_now or not (all_then and all_now) or as_large:
        return read * ranks_then // ranks_now
    return read * all_now // all_then


def load(found: FoundCheckpoint, parts: Sequence[Part], take: _Take | None = None) -> Arrays:
    """Load the files of one rank into every rank's parts; a collective.

    Every rank calls ``take`` with the name and the content of each file; it is None if rank 0's
    directory has them. Returns the random state with which this rank shuffled the epoch of ``fit``,
    if it was inside one.
    """
    folder, manifest = found.folder, found.manifest
    _require_parts(folder, manifest, parts)
    of_strategies = [part for part in parts if isinstance(part, StrategyPart)]
    in_round = (
        manifest.size == runtime.size()
        and bool(of_strategies)
        and all(part.may_go_on(manifest.parts.get(part.name, {})) for part in of_strategies)
    )
    if is_sharded(manifest):
        _require_shared(folder, manifest, is_here=take is None)
    for each in of_strategies:
        each.in_round = in_round
        each.sync.wait_for_agreements()
    problem = _load_parts(found, parts, take)
    epoch_random: Arrays = {}
    try:
        saved = _saved_rank_states(found, in_round=in_round)
        if problem is None:
            epoch_random = load_rank_states(saved, parts)
    except Exception as error:
        problem = problem or error
    gather_or_raise(RESTORE, problem, None)
    for statistics in kept_statistics:
        statistics.keep()
    if runtime.rank() == 0:
        _log_resumed(found, parts)
    for each in of_strategies:
        if each.name not in manifest.parts:
            each.start_over("the checkpoint has no state of it")
    return epoch_random


def _load_parts(
    found: FoundCheckpoint, parts: Sequence[Part], take: _Take | None
) -> Exception | None:
    """Load the parts' files; return why one cannot be loaded here. A collective."""
    folder, manifest = found.folder, found.manifest
    problem: Exception | None = None
    for part in parts:
        if part.name not in manifest.parts:
            part.begin_after(manifest.step)
            continue
        facts = {**manifest.parts[part.name], "step": manifest.step}
        shards = [folder / name for name in facts.get("shares", ())]
        # A rank that already has a problem still takes part in the broadcast.
        content = None if shards else _read(found, part.file)
        if isinstance(content, OSError):
            problem = problem or content
            continue
        try:
            if content is None:
                part.load_shards(shards, facts)
                continue
            if take is not None:
                take(part.file, content)
            if problem is None:
                part.load(content.data, facts)
        except Exception as error:  # any error: the other ranks must not wait for this one
            problem = problem or _explained(error, part, folder)
    return problem


def _saved_rank_states(found: FoundCheckpoint, *, in_round: bool) -> Arrays:
    """The state that only this rank has saved; nothing if there was no such rank.

    A collective, unless the checkpoint is sharded.
    """
    folder, manifest = found.folder, found.manifest
    wanted = {"same_size": manifest.size == runtime.size(), "in_round": in_round}
    if is_sharded(manifest):
        name = states_file(runtime.rank())
        if name not in manifest.files:
            return {}
        with np.load(folder / name) as values:
            return states_of(values, values.files, **wanted)
    with ExitStack() as stack:

        @functools.cache
        def saved() -> tuple[Any, dict[int, list[str]]]:  # on the rank that reads
            values = stack.enter_context(np.load(folder / RANKS_FILE))
            return values, keys_by_rank(values)

        def states(rank: int) -> Arrays:
            values, keys = saved()
            return states_of(values, keys.get(rank, ()), **wanted)

        return collectives.scatter(RESTORE, states, found.rank)


@contextmanager
def copied_to(directory: Path, found: FoundCheckpoint) -> Iterator[_Take]:
    """While the ranks load a checkpoint, write it into rank 0's directory as its newest.

    Yields a function that every rank calls with the name and the content of each file that it has
    received. So no file is sent twice: at the end of the block, which is a collective, rank 0
    receives only the others. If rank 0 cannot write, it logs that, and the run resumes
    nevertheless. After an error in the block the directory is as it was. OSError at the end, on
    every rank, if a rank cannot read the checkpoint.
    """
    problem: Exception | None = None  # why rank 0 cannot write
    folder: Path | None = None
    manifest = found.manifest
    received: set[str] = set()

    def append(name: str, content: NDArray[np.uint8]) -> None:
        nonlocal problem
        received.add(name)
        if folder is None or problem is not None:
            return
        try:
            with (folder / name).open("ab") as file:
                file.write(content.data)
        except OSError as error:
            problem = error

    with ExitStack() as stack:
        if runtime.rank() == 0:
            try:
                # Checkpoints of other runs there may have larger serials.
                serial, _ = store.prepare(directory)
                manifest = replace(manifest, serial=max(manifest.serial, serial + 1))
                made = store.new_folder(directory, store.name_of(manifest.step))
                folder = stack.enter_context(made)
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = error
        yield append
        unreadable: Exception | None = None
        try:
            for name, piece in _pieces(found, received):
                append(name, piece)
        except OSError as error:  # on every rank
            unreadable = error
        if runtime.rank() == 0:
            try:
                with stack.pop_all():
                    if failed := unreadable or problem:
                        raise failed
                    assert folder is not None
                    if reason := store.wrong_length(folder, manifest):
                        raise OSError(errno.EIO, reason)
                    for name in manifest.files:
                        store.flush(folder / name)
                    manifest.write(folder)
            except OSError as error:
                if unreadable is None:
                    logger.warning(
                        "cannot write %s into %s: %s; the run resumes from it all the same",
                        *(found, directory, error.strerror or error),
                    )
            except Exception as error:  # any error: the other ranks must not wait for this one
                unreadable = error
        gather_or_raise(RESTORE, unreadable, None)


def _pieces(
    found: FoundCheckpoint, received: Collection[str]
) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    """Yield the files that rank 0 has not received, in pieces with their names; a collective.

    OSError on every rank if the checkpoint's rank cannot read it.
    """
    for name, facts in found.manifest.files.items():
        if name in received:
            continue
        length = facts["bytes"]
        for start in range(0, max(length, 1), _PIECE):
            count = min(_PIECE, length - start)
            piece = _read(found, name, start, count, to_all=found.rank != 0)
            if isinstance(piece, OSError):
                raise piece
            yield name, piece


def _read(
    found: FoundCheckpoint, file: str, start: int = 0, count: int = -1, *, to_all: bool = True
) -> NDArray[np.uint8] | OSError:
    """Bytes of one rank's file on every rank, or why that rank cannot read it; a collective.

    Unless ``to_all``: then only that rank gets them.
    """
    content = np.empty(0, np.uint8)
    error: OSError | None = None
    if runtime.rank() == found.rank:
        path = found.folder / file
        try:
            content = np.fromfile(path, np.uint8, count, offset=start)
            if content.size < count:
                raise OSError(errno.EIO, f"it is shorter than {start + count} bytes")
        except OSError as unreadable:
            error = OSError(unreadable.errno, unreadable.strerror, str(path))
    if not to_all:
        return error or content
    if error := collectives.from_rank(found.rank, error):
        return error
    return collectives.broadcast_bytes(content, found.rank)


def _require_shared(folder: Path, manifest: Manifest, *, is_here: bool) -> None:
    """Raise HvkitError on every rank unless all see a sharded checkpoint; a collective."""
    problem = None
    if not store.describes(folder, manifest):
        problem = HvkitError(
            f"rank {runtime.rank()} does not see {folder}, from which every rank reads its part: "
            "put the directory where all ranks see it, or join the checkpoint with `hvkit "
            "join-checkpoint`, which rank 0 alone reads"
        )
    elif not is_here:
        problem = HvkitError(f"{folder} is sharded, but rank 0's directory is another one")
    gather_or_raise(RESTORE, problem, None)


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
        text += f" saved on {counted(manifest.size, 'rank')}; {counted(size, 'rank')} now"
    if manifest.size < size:
        new = f"rank {size - 1}" if size - manifest.size == 1 else f"ranks from {manifest.size} on"
        text += f"; {new}: random state as the script set it"
    logger.info(text)
