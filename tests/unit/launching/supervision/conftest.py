"""Runs that go on until a test ends them."""

import sys
import uuid

import pytest
from supervised import begin, sleeping, wait_until


@pytest.fixture
def mark():
    """A duration for ``sleep`` by which a test recognises its processes."""
    return f"{600 + uuid.uuid4().int % 10**6 / 10**6:.6f}"


@pytest.fixture
def interruptible(tmp_path):
    """Writes a script that waits for KeyboardInterrupt; returns the command that runs it."""

    def write(answer):
        script = tmp_path / "interruptible.py"
        script.write_text(
            "import os, subprocess, sys, time\n"
            "try:\n    subprocess.run(['sleep', sys.argv[1]])\n"
            f"except KeyboardInterrupt:\n    {answer}\n"
        )
        return f"{sys.executable} {script} MARK"

    return write


@pytest.fixture
def started(mark):
    """Starts two ranks; each starts a shell, which starts a long ``sleep``."""
    running = []

    def start(script="(sleep MARK & wait) & wait"):
        running.append(begin(script.replace("MARK", mark)))
        wait_until(lambda: len(sleeping(mark)) == 2)
        return running[-1]

    yield start
    for run in running:
        run.kill()
        run.wait()
    for process in sleeping(mark):
        process.kill()
