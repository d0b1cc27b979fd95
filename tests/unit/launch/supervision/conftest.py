"""Runs that last until a test ends them."""

import subprocess
import sys
import uuid

import pytest
from supervised import command_line, sleeping, wait_until


@pytest.fixture
def mark():
    """A duration to sleep for that no other process sleeps for."""
    return f"{600 + uuid.uuid4().int % 10**6 / 10**6:.6f}"


@pytest.fixture
def interruptible(tmp_path):
    """Writes a script that waits for a KeyboardInterrupt; the command that runs it."""

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
    """Starts ranks that sleep for long, each in a process of a process of its own."""
    running = []

    def start(script="(sleep MARK & wait) & wait"):
        run = subprocess.Popen(
            command_line(script.replace("MARK", mark)),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(run)
        wait_until(lambda: len(sleeping(mark)) == 2)
        return run

    yield start
    for run in running:
        run.kill()
        run.wait()
    for process in sleeping(mark):
        process.kill()
