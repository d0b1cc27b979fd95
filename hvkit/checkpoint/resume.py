"""Loads a checkpoint on all ranks, for ``Checkpoint.restore``; and where training continues."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hvkit import random_states, runtime
from hvkit.checkpoint import store
from hvkit.checkpoint.newest_checkpoint import FoundCheckpoint
from hvkit.checkpoint.part_types import StrategyPart
from hvkit.checkpoint.saved_object import (
    RANKS_FILE,
    Part,
    SavedStates,
    load_rank_states,
    saved_states,
)
from hvkit.checkpoint.saving import is_sharded, states_file
from hvkit.checkpoint.store import Manifest
from hvkit.communication import collectives, messages
from hvkit.communication.collectives import share
from hvkit.errors import HvkitError
from hvkit.log import logger
from hvkit.random_states import Arrays
from hvkit.sync.nonfinite import kept_statistics
from hvkit.wording import counted

_CALL = "Checkpoint.restore"


@dataclass(frozen=True)
class Progress:
    """Where training continues."""

    epoch: int = 0
    """The epoch that was passed to ``save``: the number of epochs done."""
    step: int = 0
    """The step that was passed to ``save``: the number of optimizer steps done."""
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
class FitState:
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
        """The batches of this epoch to skip after ``restore``; 0 at the next call.

        Args:
            epoch: that begins.
            epoch_batches: how many it has on this rank; 0 if unknown.
        """
        self.epoch_batches = epoch_batches
        start, self.start = self.start, Progress()
        if start.size is None or epoch != start.epoch:
            return 0
        then, now = (start.size, start.epoch_batches), (runtime.size(), epoch_batches)
        return batches_after(self.batches_read, then, now)


def progress_of(manifest: Manifest, folder: Path) -> Progress:
    """Where these ranks continue after a checkpoint was loaded."""
    return Progress(
        epoch=manifest.epoch,
        step=manifest.step,
        batches=batches_after(manifest.batches, (manifest.size, 0), (runtime.size(), 0)),
        extras=manifest.extras,
        size=manifest.size,
        folder=folder,
        epoch_batches=manifest.epoch_batches,
    )


def batches_after(read: int, then: tuple[int, int], now: tuple[int, int]) -> int:
    """The batches of an epoch that a rank must skip, rounded down.

    A script may keep the batch of each rank on another number of ranks, or that of all together.

    Args:
        read: batches that each rank of the saved run has read.
        then, now: the number of ranks, and of a rank's batches in a whole epoch; 0 if unknown.
    """
    (ranks_then, all_then), (ranks_now, all_now) = then, now
    ratio = ranks_then / ranks_now
    as_large = abs(all_now - all_then * ratio) < max(ratio, 1)
    if ranks_then == ranks_now or not (all_then and all_now) or as_large:
        return read * ranks_then // ranks_now
    return read * all_now // all_then


def load(
    found: FoundCheckpoint,
    parts: Sequence[Part],
    take: Callable[[str, memoryview], None] | None = None,
) -> Arrays:
    """Load the files of one rank into every rank's parts; a collective.

    Args:
        found: the checkpoint.
        parts: the same on every rank.
        take: gets each file, with its name, on every rank; None if rank 0's directory has it.

    Returns:
        The random state with which this rank shuffled the epoch of ``fit``, if it was inside one.

    Raises:
        ValueError: the checkpoint lacks a part, or does not fit one.
        HvkitError: the checkpoint is sharded, and a rank does not see it.
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
        each.keeper.arrive()
    problem: Exception | None = None
    for part in parts:
        if part.name not in manifest.parts:
            part.begin_after(manifest.step)
            continue
        facts = {**manifest.parts[part.name], "step": manifest.step}
        content = memoryview(b"")
        shards = [folder / name for name in facts.get("shares", ())]
        if not shards:
            content, problem = _content(found, part.file, problem)
            if take is not None:
                take(part.file, content)
        try:
            if shards:
                part.load_shards(shards, facts)
            elif problem is None:
                part.load(content, facts)
        except Exception as error:  # any error: the other ranks must not wait for this one
            problem = problem or _explained(error, part, folder)
    epoch_random: Arrays = {}
    try:
        saved = _saved_rank_states(found, in_round=in_round)
        if problem is None:
            epoch_random = load_rank_states(saved, parts)
    except Exception as error:
        problem = problem or error
    share(_CALL, problem, None)
    for statistics in kept_statistics:
        statistics.keep()
    if runtime.rank() == 0:
        _log_resumed(found, parts)
    for each in of_strategies:
        if each.name not in manifest.parts:
            each.start_over("the checkpoint has no state of it")
    return epoch_random


def _saved_rank_states(found: FoundCheckpoint, *, in_round: bool) -> dict[str, Arrays]:
    """The state that only this rank has saved; nothing if there was no such rank.

    A collective, unless the checkpoint is sharded.
    """
    folder, manifest = found.folder, found.manifest
    wanted = {"same_size": manifest.size == runtime.size(), "in_round": in_round}
    if is_sharded(manifest):
        name = states_file(runtime.rank())
        if name not in manifest.files:
            return {}
        with saved_states(folder / name) as states:
            return states.of(0, **wanted)
    with ExitStack() as stack:

        @functools.cache
        def saved() -> SavedStates:  # on the rank that reads
            return stack.enter_context(saved_states(folder / RANKS_FILE))

        return messages.scatter(_CALL, lambda rank: saved().of(rank, **wanted), found.rank)


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
        text += f" saved on {counted(manifest.size, 'rank')}; {counted(size, 'rank')} now"
    if manifest.size < size:
        new = f"rank {size - 1}" if size - manifest.size == 1 else f"ranks from {manifest.size} on"
        text += f"; {new}: random state as the script set it"
    logger.info(text)
