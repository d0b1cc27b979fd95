"""Short commands whose output hvkit reads, and pip."""

import subprocess
import sys
from collections.abc import Mapping, Sequence

from hvkit.build import failures


def output_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> str | None:
    """What ``command`` prints, stdout and stderr together; ``None`` if it fails or is not there."""
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=env,
            timeout=120,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def run_pip(arguments: Sequence[str], doing: str) -> None:
    """Run this Python's pip with the user's own pip settings.

    Raises:
        BuildError: pip failed; the message starts with ``doing`` and explains pip's output.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    if done.returncode != 0:
        raise failures.explain(done.stdout, doing)
