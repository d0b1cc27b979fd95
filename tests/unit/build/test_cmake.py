"""Which CMake is taken."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hvkit.build import cmake

Script = Callable[[str, str], Path]


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked of pip; a stand-in installs a CMake that works."""
    asked: list[str] = []

    def install(arguments: list[str], doing: str) -> None:
        asked.append(arguments[-1])
        binary = Path(arguments[arguments.index("--target") + 1], "cmake/data/bin/cmake")
        binary.parent.mkdir(parents=True)
        binary.write_text("#!/bin/sh\necho cmake version 3.31.6\n")
        binary.chmod(0o755)

    monkeypatch.setattr(cmake, "run_pip", install)
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    return asked


@pytest.mark.parametrize("version", ["3.13.0", "3.31.6"])
def test_usable_cmake_on_path_is_taken(script: Script, fetched: list[str], version: str) -> None:
    installed = script("cmake", f"echo cmake version {version}")
    assert cmake.find_cmake() == str(installed)
    assert fetched == []


@pytest.mark.parametrize(
    "body", ["echo cmake version 3.12.4", "echo cmake version 4.0.0", "exit 1"]
)
def test_unusable_cmake_is_passed_over_and_one_is_fetched_once(
    script: Script, fetched: list[str], cache: Path, body: str
) -> None:
    script("cmake", body)
    command = cmake.find_cmake()
    assert command == str(cache / "cmake/cmake/data/bin/cmake")
    assert cmake.find_cmake() == command
    assert fetched == ["cmake>=3.13,<4"]


def test_users_choice_is_taken(
    script: Script, fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_CMAKE", "/opt/cmake")
    assert cmake.find_cmake() == "/opt/cmake"
