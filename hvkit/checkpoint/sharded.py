"""Checkpoints into which each rank writes its own part: of models that fit into no rank.

The folder is that of other checkpoints, made, checked and renamed by rank 0: it becomes a
checkpoint when the files of all ranks are on disk, with their sha256 in the manifest. All ranks
must see the directory. Instead of ``model.pt`` it holds ``model-of-rank-00000.pt`` and so on, of
the ranks that have a part that no earlier one has; ``hvkit join-checkpoint`` makes ``model.pt`` of
them. What their files look like, and why, is in ``frameworks/pytorch/model_parallel/shares.py``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from hvkit import runtime
from hvkit.checkpoint import manifests, rank_states, store
from hvkit.checkpoint.manifests import Manifest
from hvkit.checkpoint.saved_object import Arrays, Part
from hvkit.checkpoint.writing import explained
from hvkit.communication.collectives import share
from hvkit.errors import HvkitError

# Seconds for a folder or a file of another rank to appear: NFS shows them late.
_PATIENCE = 30.0

Facts = dict[str, dict[str, Any]]


def states_file(rank: int) -> str:
    """The name of the file with what differs between ranks, of one rank."""
    return f"ranks-{rank:05}.npz"


def is_sharded(manifest: Manifest) -> bool:
    """Whether each rank has written its own part."""
    return states_file(0) in manifest.files


def shares_of(folder: Path, facts: Mapping[str, Any]) -> list[Path] | None:
    """The files of a part, if the ranks have written their own; rank 0's first.

    Args:
        folder: the checkpoint.
        facts: about the part, from the manifest.
    """
    return [folder / name for name in facts["shares"]] if facts.get("shares") else None


def write(
    call: str,
    directory: Path,
    name: str,
    parts: Sequence[Part],
    own: Mapping[str, Arrays],
    finish: Callable[[Path, Facts, Facts], None],
) -> None:
    """Write a checkpoint's folder from all ranks; a collective.

    Args:
        call: the user's call.
        directory: for which rank 0 has called ``store.prepare``.
        name: of the folder.
        parts: the same on every rank.
        own: what this rank adds to the parts' files.
        finish: called on rank 0 with the folder, the facts about the parts, and those about the
            files that are on disk; adds the manifest.

    Raises:
        OSError: a rank could not write, or does not see the directory; on every rank.
    """
    problem: Exception | None = None
    with ExitStack() as stack:
        folder = stack.enter_context(_folder_of_all(call, directory, name))
        of_parts: Facts = {}
        facts: Facts = {}
        try:
            _wait_for(folder, "the directory, which all ranks of a sharded checkpoint write to")
            of_parts, facts = _write_own(folder, parts, own)
        except Exception as error:  # any error: the other ranks must not wait for this one
            problem = explained(error, directory / name)
        everyone = share(call, problem, (of_parts, facts))
        if runtime.rank() == 0:
            try:
                written = {file: each for _, theirs in everyone for file, each in theirs.items()}
                finish(folder, _of_all(parts, everyone), _seen(folder, written))
                stack.close()
            except Exception as error:
                problem = explained(error, directory / name)
        share(call, problem, None)


@contextmanager
def _folder_of_all(call: str, directory: Path, name: str) -> Iterator[Path]:
    """A new folder, which rank 0 makes and renames at the end; a collective."""
    with ExitStack() as stack:
        problem: Exception | None = None
        folder = ""
        if runtime.rank() == 0:
            try:
                made = stack.enter_context(store.new_folder(directory, name))
                folder = str(made.absolute())
            except Exception as error:
                problem = explained(error, directory / name)
        yield Path(share(call, problem, folder)[0])


def _write_own(
    folder: Path, parts: Sequence[Part], own: Mapping[str, Arrays]
) -> tuple[Facts, Facts]:
    """Write this rank's files, and flush them; the facts about its parts and the files."""
    rank = runtime.rank()
    of_parts: Facts = {}
    files = [states_file(rank)]
    rank_states.save(folder / states_file(rank), [own])
    for part in parts:
        share_file = part.share_file(rank)
        if part.write_share(folder / share_file, first=rank == 0):
            of_parts[part.name] = {"shares": [share_file]}
            files.append(share_file)
        elif rank == 0 and part.in_shares is None:
            of_parts[part.name] = {}
            files.append(part.file)
            part.save(folder / part.file)
    for file in files:
        store.flush(folder / file)
    return of_parts, {file: manifests.facts_of(folder / file) for file in files}


def _of_all(parts: Sequence[Part], everyone: Sequence[tuple[Facts, Facts]]) -> Facts:
    """The facts about all parts for the manifest."""
    found: Facts = {}
    for part in parts:
        theirs = [of_parts.get(part.name, {}).get("shares", []) for of_parts, _ in everyone]
        found[part.name] = {**part.facts(), "file": part.file}
        if shares := [file for files in theirs for file in files]:
            found[part.name]["shares"] = shares
    return found


def _seen(folder: Path, written: Facts) -> Facts:
    """The facts about files of all ranks, once this rank sees all their bytes.

    Raises:
        HvkitError: it does not.
    """
    for name, facts in written.items():
        file = folder / name
        _wait_for(file, "a file that another rank has written: put the directory where all see it")
        if (found := file.stat().st_size) != facts["bytes"]:
            raise HvkitError(f"{file} has {found} of {facts['bytes']} bytes")
    return written


def _wait_for(path: Path, what: str) -> None:
    """Wait until this rank sees a file or a folder.

    Raises:
        FileNotFoundError: it does not.
    """
    until = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > until:
            raise FileNotFoundError(2, f"rank {runtime.rank()} does not see {what}", str(path))
        time.sleep(0.1)


def require_readable(folder: Path, manifest: Manifest) -> None:
    """Raise unless this rank sees a sharded checkpoint.

    Raises:
        HvkitError: with the fix.
    """
    if not manifests.describes(folder, manifest):
        raise HvkitError(
            f"rank {runtime.rank()} does not see {folder}, from which every rank reads its part: "
            "put the directory where all ranks see it, or join the checkpoint with `hvkit "
            "join-checkpoint`, which rank 0 alone reads"
        )


def own_states(
    folder: Path, manifest: Manifest, *, same_size: bool, in_round: bool
) -> dict[str, Arrays]:
    """What this rank has saved for itself; nothing if there was no such rank.

    Args:
        folder: the checkpoint.
        manifest: its manifest.
        same_size, in_round: as for ``rank_states.Saved``.
    """
    name = states_file(runtime.rank())
    if name not in manifest.files:
        return {}
    saved = rank_states.Saved(folder / name, same_size=same_size, in_round=in_round)
    try:
        return saved.of(0)
    finally:
        saved.close()
