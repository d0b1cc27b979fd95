"""The runner of tests/parallel: a rank that fails ends the run and shows itself."""

import os
import subprocess
import sys
from pathlib import Path

from quick_start import in_less_time

PARALLEL = Path(__file__).parents[1] / "parallel"

FAILS = """
import hvkit
def test_it():
    number = 40 + hvkit.rank()
    assert number != 41
    hvkit.barrier()
"""


def test_a_rank_that_fails_ends_the_run_and_shows_itself(tmp_path):
    (tmp_path / "test_it.py").write_text(FAILS)
    command = [
        "mpirun", "-np", "2", sys.executable, "-m", "pytest", "-p", "conftest",
        "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command,
        env=in_less_time(os.environ | {"PYTHONPATH": f"{PARALLEL}{os.pathsep}{PARALLEL.parent}"}),
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    for text in ("rank 1 of 2: test_it.py::test_it failed in call", "assert 41 != 41"):
        assert text in done.stderr + done.stdout


def test_a_run_without_ranks_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(PARALLEL)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "mpirun -np 2" in done.stdout + done.stderr
