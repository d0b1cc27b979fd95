"""Named edits to source text: an edit that does not fit exactly stops the build."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError


def always(toolchain: Toolchain, source: Path) -> bool:
    """The condition of an edit that every build needs."""
    return True


@dataclass(frozen=True)
class Edit:
    """One replacement of text in one file.

    Attributes:
        name: short and unique; what errors call it.
        file: the file, relative to the root of the source.
        what: what the edit changes.
        why: what goes wrong without it.
        upstream: the upstream issue, or the fault behind it.
        old: the text to replace.
        new: the text put in its place.
        count: how many times ``old`` stands in the file.
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


def apply(edits: Iterable[Edit], source: Path, toolchain: Toolchain) -> list[Edit]:
    """Make the edits that this build needs, in order, and return them.

    Raises:
        BuildError: an edit's file is missing, or its text stands there more or less often than
            it should.
    """
    needed = [edit for edit in edits if edit.applies(toolchain, source)]
    for edit in needed:
        _apply_one(edit, source / edit.file)
    return needed


def digest(edits: Iterable[Edit]) -> str:
    """A fingerprint of everything that the edits do to the source."""
    text = repr([(edit.name, edit.file, edit.old, edit.new, edit.count) for edit in edits])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _apply_one(edit: Edit, path: Path) -> None:
    if not path.is_file():
        raise BuildError(f"edit '{edit.name}': {edit.file} is not in the source. {_REMEDY}")
    text = path.read_text(encoding="utf-8")
    found = text.count(edit.old)
    if found != edit.count:
        raise BuildError(
            f"edit '{edit.name}': {edit.file}: expected its text {edit.count} times, "
            f"found it {found} times: {edit.old.splitlines()[0]!r}. {_REMEDY}"
        )
    path.write_text(text.replace(edit.old, edit.new), encoding="utf-8")


_REMEDY = "The edits fit the official Horovod 0.28.1 only; report this as a fault of hvkit"
