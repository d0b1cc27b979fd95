"""The folder through which a process hands a function to ranks, and gets back what each returned.

``hvkit.functions`` knows what is in its files. It is readable for its user only. Ranks on the host
of ``hvkit run`` use the folder that was made there. On another host each agent makes one of its
own, which the supervisor's connection fills and empties.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hvkit.errors import is_of_full_disk

VARIABLE = "HVKIT_CALL"  # environment variable of ranks that run a function: the folder

PREFIX = "hvkit-call-"  # how the names of such folders begin


def call_in(folder: Path) -> Path:
    """The file with the function and its arguments."""
    return folder / "call"


def outcome_in(folder: Path, rank: int) -> Path:
    """The file with what a rank has returned or raised; absent until it has."""
    return folder / f"outcome-{rank}"


def remove_outcomes(folder: Path) -> None:
    """Remove what ranks have left there, before they are started again."""
    for each in folder.glob("outcome-*"):
        each.unlink()


def part_of(path: Path) -> Path:
    """The file that becomes this one once it is complete."""
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write that appears under its name only when it is complete.

    After an exception nothing of it is left, which makes room on a full disk for the reason.
    """
    part = part_of(path)
    try:
        with part.open("wb") as file:
            yield file
    except BaseException as error:
        part.unlink(missing_ok=True)
        if is_of_full_disk(error) and error.filename is None:
            error.filename = str(path)
            error.add_note("Set TMPDIR to a folder on a disk with more room.")
        raise
    os.replace(part, path)
