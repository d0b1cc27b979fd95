"""Commands that fail, hang or are missing."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hvkit.host.commands import Output, run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], str]:
    """Write a shell script and return its path."""

    def write(name: str, body: str) -> str:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return str(path)

    return write


def test_commands_that_fail_hang_or_are_missing(
    script: Callable[[str, str], str], tmp_path: Path
) -> None:
    assert run([script("fails", "echo out; echo err >&2; exit 3")]) == Output(3, "out\n", "err\n")
    assert run([script("hangs", "exec sleep 60")], timeout=0.2) == Output(None)
    assert run([str(tmp_path / "not-there")]) is None
