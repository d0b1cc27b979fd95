"""The runner of tests/parallel: a rank that fails or hangs ends the run and shows itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_start import in_less_time

PARALLEL = Path(__file__).parents[1] / "parallel"

FAILS = """
import hvkit
def test_it():
    number = 40 + hvkit.rank()
    assert number != 41
    hvkit.barrier()
"""

HANGS = """
import time, hvkit
def test_it():
    if hvkit.rank() == 1:
        time.sleep(1000)  # here
    hvkit.barrier()
"""


def run_on_two_ranks(test: str, folder: Path) -> subprocess.CompletedProcess:
    path = folder / "test_it.py"
    path.write_text(test)
    command = [
        "mpirun", "-np", "2", sys.executable, "-m", "pytest", "-p", "conftest",
        "-c", os.devnull, "--rootdir", str(folder), str(path),
        "-o", "faulthandler_timeout=8",
    ]  # fmt: skip
    return subprocess.run(
        command,
        env=in_less_time(os.environ | {"PYTHONPATH": f"{PARALLEL}{os.pathsep}{PARALLEL.parent}"}),
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("test", "shown"),
    [
        pytest.param(
            FAILS,
            ["rank 1 of 2: test_it.py::test_it failed in call", "assert 41 != 41"],
            id="fails",
        ),
        pytest.param(
            HANGS,
            ["Timeout", 'test_it.py", line 5 in test_it'],
            id="hangs",
            marks=pytest.mark.every_combination,
        ),
    ],
)
def test_a_rank_that_fails_or_hangs_ends_the_run_and_shows_itself(test, shown, tmp_path):
    done = run_on_two_ranks(test, tmp_path)
    assert done.returncode != 0
    for text in shown:
        assert text in done.stderr + done.stdout


def test_a_run_without_ranks_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(PARALLEL)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "mpirun -np 2" in done.stdout + done.stderr
