"""Loading a checkpoint on all ranks: ``Checkpoint.restore``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np

from hvkit import runtime
from hvkit.checkpoint import ranks
from hvkit.checkpoint.manifests import Manifest
from hvkit.checkpoint.newest import Found
from hvkit.checkpoint.part import Part
from hvkit.checkpoint.strategies import StrategyPart
from hvkit.communication import collectives, one_by_one
from hvkit.communication.collectives import share
from hvkit.errors import RanksDisagreeError
from hvkit.log import logger
from hvkit.sync.nonfinite import kept_statistics

_CALL = "Checkpoint.restore"


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
    found: Found, parts: Sequence[Part], take: Callable[[str, memoryview], None] | None = None
) -> None:
    """Load the files of one rank into every rank's parts; a collective.

    Args:
        found: the checkpoint.
        parts: of this rank.
        take: gets each file, with its name, on every rank.

    Raises:
        ValueError: the checkpoint lacks a part, or does not fit one.
    """
    folder, manifest = found.folder, found.manifest
    _require_parts(folder, manifest, parts)
    problem: Exception | None = None
    same_size = manifest.size == runtime.size()
    kept = [part for part in parts if isinstance(part, StrategyPart)]
    in_round = (
        same_size
        and bool(kept)
        and all(part.matches(manifest.parts.get(part.name, {})) for part in kept)
    )
    for each in kept:
        each.goes_on = in_round
        each.keeper.arrive()
    for part in parts:
        if part.name not in manifest.parts:
            part.begin_after(manifest.step)
            continue
        content, problem = _content(found, part.file, problem)
        if take is not None:
            take(part.file, content)
        if problem is None:
            try:
                part.load(content, manifest.parts[part.name])
            except Exception as error:  # any error: the other ranks must not wait for this one
                problem = _explained(error, part, folder)
    try:
        with ExitStack() as stack:

            @functools.cache
            def saved() -> ranks.Saved:  # on the rank that reads
                path = folder / ranks.FILE
                opened = ranks.Saved(path, same_size=same_size, in_round=in_round)
                return stack.enter_context(closing(opened))

            own = one_by_one.scatter(_CALL, lambda rank: saved().of(rank), found.rank)
        if problem is None:
            ranks.put_back(own, parts)
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
    found: Found, file: str, problem: Exception | None
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


def _log_resumed(found: Found, parts: Sequence[Part]) -> None:
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
