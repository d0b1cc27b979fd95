"""Scripts that tests run in a process of their own, and programs that stand in for others."""

import os
import subprocess
import sys

from quick_start import in_less_time

LAUNCHED = "OMPI_", "PMI", "HOROVOD_", "SLURM_", "HVKIT_RANK"


def run_script(code, *arguments, **environ):
    """Run Python code as if no launcher had started the tests; return the completed process."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True, text=True, timeout=200, env=in_less_time(clean) | environ, check=False,
    )  # fmt: skip


def write_program(path, text=""):
    """Write a program and return its path; a text without ``#!`` is a shell script's."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text if text.startswith("#!") else f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
