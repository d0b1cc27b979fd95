"""An edit of Horovod's source, and how edits are applied.

An edit names its file and the exact text that it replaces. If that text is missing, or occurs more
or less often than expected, the build stops.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError

VERSION = "0.28.1"
"""The Horovod release that the edits fit."""


def always(toolchain: Toolchain, source: Path) -> bool:
    """The condition of an edit that every build needs."""
    return True


@dataclass(frozen=True)
class Edit:
    """One replacement of text in one file.

    Attributes:
        name: short and unique; error messages use it.
        file: the file, relative to the root of the source.
        what: what the edit changes.
        why: what goes wrong without it.
        upstream: the upstream issue, or the cause of the fault upstream.
        old: the text to replace.
        new: the replacement.
        count: how often ``old`` occurs in the file.
        applies: whether a build with this toolchain, from this source folder, needs the edit.
    """

    name: str
    file: str
    what: str
    why: str
    upstream: str
    old: str
    new: str
    count: int = 1
    applies: Callable[[Toolchain, Path], bool] = always


def apply_edits(edits: Iterable[Edit], source: Path, toolchain: Toolchain) -> list[Edit]:
    """Make the edits that this build needs, in order, and return them.

    Raises:
        BuildError: a file is missing, or does not contain an edit's text ``count`` times.
    """
    needed = [edit for edit in edits if edit.applies(toolchain, source)]
    for edit in needed:
        _apply(edit, source / edit.file)
    return needed


def edits_digest(edits: Iterable[Edit]) -> str:
    """A fingerprint of all that the edits change in the source."""
    text = repr([(edit.name, edit.file, edit.old, edit.new, edit.count) for edit in edits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _apply(edit: Edit, path: Path) -> None:
    remedy = f"The edits fit the official Horovod {VERSION} only; report this as a fault of hvkit"
    if not path.is_file():
        raise BuildError(f"edit '{edit.name}': {edit.file} is not in the source. {remedy}")
    text = path.read_text(encoding="utf-8")
    found = text.count(edit.old)
    if found != edit.count:
        raise BuildError(
            f"edit '{edit.name}': {edit.file}: expected its text {edit.count} times, "
            f"found it {found} times: {edit.old.splitlines()[0]!r}. {remedy}"
        )
    path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")
