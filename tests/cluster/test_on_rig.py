"""What ``on_rig.py`` refuses before it makes hosts."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("option", ["--hosts", "--slots"])
@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_numbers_have_to_be_positive(option, number):
    script = str(Path(__file__).with_name("on_rig.py"))
    done = subprocess.run(
        [sys.executable, script, option, number, "--", "true"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert f"argument {option}: " in done.stderr
