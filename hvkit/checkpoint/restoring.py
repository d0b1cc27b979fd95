"""Loading a checkpoint into the objects of all ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hvkit import collectives, runtime
from hvkit.checkpoint import folders, ranks
from hvkit.checkpoint.manifest import Manifest
from hvkit.checkpoint.parts import Part
from hvkit.collectives import share

_CALL = "Checkpoint.restore"


def find(directory: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that is not damaged; rank 0 only. Says what it skips."""
    skipped = []

    def skip(folder: Path, reason: str) -> None:
        skipped.append(folder)
        _say(f"skipped {folder}: damaged: {reason}")

    found = folders.newest_valid(directory, skip)
    if skipped and found is None:
        _say(f"all checkpoints in {directory} are damaged: starting from the beginning")
    return found


def load(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    """Load rank 0's files into every rank's parts; a collective.

    Raises:
        ValueError: the checkpoint lacks a part, or does not fit one.
    """
    _require_parts(folder, manifest, parts)
    problem: Exception | None = None
    for part in parts:
        content, problem = _content(folder, part.file, problem)
        if problem is None:
            try:
                part.load(content, manifest.parts[part.name])
            except Exception as error:  # the other ranks must not wait for this one
                problem = _explained(error, part, folder)
    content, problem = _content(folder, ranks.FILE, problem)
    same_size = manifest.size == runtime.size()
    if problem is None:
        try:
            ranks.put_back(content, parts, runtime.rank(), same_size=same_size)
        except Exception as error:
            problem = error
    share(_CALL, problem, None)
    if runtime.rank() == 0:
        _announce(folder, manifest, parts)


def _require_parts(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    for part in parts:
        theirs = manifest.parts.get(part.name)
        if theirs is None:
            raise ValueError(
                f"{folder} holds no {part.name!r}, it holds {', '.join(manifest.parts)}: make "
                "Checkpoint with the parts it was saved with, or use another directory"
            )
        if theirs["file"] != part.file:
            raise ValueError(
                f"{folder} holds {part.name!r} as {theirs['file']}, but it is {part.file} here: "
                "restore into objects of the kind it was saved from, or use another directory"
            )


def _content(folder: Path, file: str, problem: Exception | None) -> tuple[bytes, Exception | None]:
    """Rank 0's bytes of a file on every rank, and the problem so far or rank 0's with reading."""
    content: bytes | OSError = b""
    if runtime.rank() == 0:
        try:
            content = (folder / file).read_bytes()
        except OSError as error:
            content = OSError(error.errno, error.strerror, str(folder / file))
    content = collectives.broadcast(content)
    if isinstance(content, OSError):
        return b"", problem or content
    return content, problem


def _explained(error: Exception, part: Part, folder: Path) -> Exception:
    if isinstance(error, OSError):
        return error
    return ValueError(
        f"{folder}: {part.file} does not fit {part.name} here: {error}; restore into what it was "
        "saved from, or use another directory"
    )


def _announce(folder: Path, manifest: Manifest, parts: Sequence[Part]) -> None:
    left = [name for name in manifest.parts if name not in {part.name for part in parts}]
    if left:
        _say(f"{folder} also holds {', '.join(left)}: not loaded")
    text = f"resumed {folder} (epoch {manifest.epoch}, step {manifest.step})"
    size = runtime.size()
    if manifest.size != size:
        text += f" saved on {_ranks(manifest.size)}; {_ranks(size)} now"
    if manifest.size < size:
        new = f"rank {size - 1}" if size - manifest.size == 1 else f"ranks from {manifest.size} on"
        text += f"; {new}: random state as the script set it"
    _say(text)


def _ranks(size: int) -> str:
    return "1 rank" if size == 1 else f"{size} ranks"


def _say(text: str) -> None:
    print(f"hvkit: {text}", file=sys.stderr, flush=True)
