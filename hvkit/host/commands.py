"""Runs short commands and returns their output, also when they fail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Output:
    """The exit status and output of a command.

    Attributes:
        status: exit status; negative for the signal that ended the command, ``None`` if it ran out
            of time.
        stdout: what it wrote to stdout; empty if it ran out of time.
        stderr: what it wrote to stderr; empty if it ran out of time.
    """

    status: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def text(self) -> str:
        """Stdout, then stderr."""
        return f"{self.stdout}\n{self.stderr}".strip()


def run(
    command: Sequence[str], timeout: float = 10, environ: Mapping[str, str] | None = None
) -> Output | None:
    """Run a command without input; ``None`` if the program is missing or cannot be started.

    Args:
        command: the program and its arguments.
        timeout: seconds after which the command is killed.
        environ: its environment; ``None`` for this process's own.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            env=environ,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Output(None)
    except OSError:
        return None
    return Output(done.returncode, done.stdout, done.stderr)


def program(name: str) -> str | None:
    """Path of a program on PATH, else in the folder of this Python; ``None`` if there is none."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
