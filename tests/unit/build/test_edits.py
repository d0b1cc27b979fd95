"""Edits fit exactly or stop the build."""

from pathlib import Path

import pytest

from hvkit.build import edits
from hvkit.build.edits import Edit
from hvkit.build.toolchain import Toolchain
from hvkit.errors import BuildError


def edit(**changes: object) -> Edit:
    fields: dict[str, object] = {
        "name": "standard",
        "file": "CMakeLists.txt",
        "what": "",
        "why": "",
        "upstream": "",
        "old": "STANDARD 14",
        "new": "STANDARD 17",
    }
    return Edit(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def cmakelists(tmp_path: Path) -> Path:
    path = tmp_path / "CMakeLists.txt"
    path.write_text("project(x)\nset(STANDARD 14)\n")
    return path


def test_replaces_the_text(cmakelists: Path, toolchain: Toolchain) -> None:
    edits.apply([edit()], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == "project(x)\nset(STANDARD 17)\n"


def test_replaces_every_expected_occurrence(cmakelists: Path, toolchain: Toolchain) -> None:
    cmakelists.write_text("STANDARD 14 STANDARD 14")
    edits.apply([edit(count=2)], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == "STANDARD 17 STANDARD 17"


@pytest.mark.parametrize("text", ["", "STANDARD 14 STANDARD 14"])
def test_text_found_too_rarely_or_too_often_names_the_edit(
    cmakelists: Path, toolchain: Toolchain, text: str
) -> None:
    cmakelists.write_text(text)
    found = text.count("STANDARD 14")
    message = rf"'standard': CMakeLists.txt: expected .* 1 times, found it {found} times"
    with pytest.raises(BuildError, match=message):
        edits.apply([edit()], cmakelists.parent, toolchain)
    assert cmakelists.read_text() == text


def test_missing_file_names_the_edit(tmp_path: Path, toolchain: Toolchain) -> None:
    with pytest.raises(BuildError, match=r"'standard': CMakeLists.txt is not in the source"):
        edits.apply([edit()], tmp_path, toolchain)


def test_edit_that_does_not_apply_is_left_out(cmakelists: Path, toolchain: Toolchain) -> None:
    before = cmakelists.read_text()
    unneeded = edit(applies=lambda toolchain, source: False)
    assert edits.apply([unneeded], cmakelists.parent, toolchain) == []
    assert cmakelists.read_text() == before


def test_digest_follows_the_text_and_not_the_explanation() -> None:
    assert edits.digest([edit()]) != edits.digest([edit(new="STANDARD 20")])
    assert edits.digest([edit()]) == edits.digest([edit(why="because")])
