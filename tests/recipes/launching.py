"""Starts recipes as a user would, with a time limit, and shows their output if they fail."""

import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from monitored import Monitored

RECIPES = Path(__file__).parents[2] / "recipes"

ALONE = ()
HVKIT = (sys.executable, "-m", "hvkit")
MPIRUN = ("mpirun", "-np", "2")
HOROVODRUN = ("horovodrun", "-np", "2")


@dataclass
class Run:
    """A recipe that has ended: its exit status, what it said, and what its monitor recorded."""

    status: int
    out: str
    err: str
    monitored: Monitored | None

    @property
    def said_more_than_once(self) -> list[str]:
        return [line for line, times in Counter(self.out.splitlines()).items() if times > 1]


def python(recipe: str) -> list[str]:
    """The command of one process."""
    return [sys.executable, str(RECIPES / f"{recipe}.py")]


def run(command: list[str], seconds: float) -> tuple[int, str, str]:
    """Exit status, output and error output; a command that takes too long fails the test."""
    scripts = os.path.dirname(sys.executable)
    process = subprocess.Popen(
        command,
        env=os.environ
        | {
            "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            # Ranks that wait leave the cores to the tests beside this one.
            "OMPI_MCA_mpi_yield_when_idle": "1",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
        pytest.fail(f"not over after {seconds} s: {command}\n{out}\n{err}")
    return process.returncode, out, err


def start(
    launcher: tuple[str, ...],
    recipe: str,
    *flags: str,
    output_dir: Path | None = None,
    fails: bool = False,
    seconds: float = 170,
) -> Run:
    """Run a recipe to its end; without an ``output_dir`` it records nothing."""
    folder = ["--output-dir", str(output_dir)] if output_dir else []
    command = [*launcher, *python(recipe), *flags, *folder]
    status, out, err = run(command, seconds)
    if (status != 0) != fails:
        pytest.fail(f"exit status {status}: {command}\n{out}\n{err}")
    recorded = output_dir and (output_dir / "metrics.jsonl").exists()
    return Run(status, out, err, Monitored.read(output_dir) if recorded else None)
