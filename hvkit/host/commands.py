"""Short commands whose output is looked at, also when they fail."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Said:
    """How a command ended.

    Attributes:
        status: its exit status; negative for the signal that ended it, ``None`` if it took too
            long.
        stdout: what it wrote there.
        stderr: what it wrote there.
    """

    status: int | None
    stdout: str = ""
    stderr: str = ""

    @property
    def text(self) -> str:
        """All that it wrote."""
        return f"{self.stdout}\n{self.stderr}".strip()


def ask(
    command: Sequence[str], timeout: float = 10, environ: Mapping[str, str] | None = None
) -> Said | None:
    """Run a command; ``None`` if there is no such program, or none that can be started.

    Args:
        command: the program and its arguments.
        timeout: seconds after which it is ended.
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
        return Said(None)
    except OSError:
        return None
    return Said(done.returncode, done.stdout, done.stderr)


def program(name: str) -> str | None:
    """Where a program is, first on PATH, else beside this Python; ``None`` if it is nowhere."""
    return shutil.which(name) or shutil.which(name, path=os.path.dirname(sys.executable))
