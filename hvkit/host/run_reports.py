"""Reports from a rank to ``hvkit run``: lines of JSON in a pipe that its agent reads.

A rank that another launcher has started has no such pipe, and reports nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, TypedDict, Unpack

# Environment variable with the pipe's file descriptor and inode: a process that a rank starts
# inherits the variable, but may have another file under that descriptor.
VARIABLE = "HVKIT_REPORTS"

# Environment variable of ranks that were started again: JSON with ``restart``, ``reason`` and
# ``reached``, the last step that a rank had begun.
RESTART = "HVKIT_RESTART"

TIMELINE = "HVKIT_TIMELINE"  # environment variable of ranks whose run has a timeline: 1

# Environment variable of ranks that may be started again: the run's name, for all its tries.
RUN_NAME = "HVKIT_RUN_NAME"

# Bytes of a line: writes of up to so many bytes do not mix (POSIX, PIPE_BUF on Linux).
LONGEST = 4096

_MEMORY = Path("/dev/shm")


class Whereabouts(TypedDict, total=False):
    """Where a rank is in its script."""

    call: str  # the call of hvkit that it is in; empty outside of any
    waits: float  # for how many seconds it has waited there
    where: str  # the line of the script
    step: int  # the last optimizer step
    made: float  # when it was there, by its host's clock; seconds since 1970


class RunReport(TypedDict, total=False):
    """A report of a rank, with some of these values; ``hvkit.launching.supervision`` reads it."""

    starting: bool  # whether it waits for Horovod to start
    pid: int  # its process, once Horovod runs
    now: Whereabouts
    spans: list[list[Any]]  # for the timeline, see ``hvkit.watch.spans``
    speed: float  # samples a second
    saved: int  # the step of a checkpoint that was saved or resumed, in ``directory``
    resumes: int | None  # the step of the checkpoint that was found in ``directory``; None for none
    directory: str  # a short name of it
    replica: bool  # whether its host keeps checkpoints in memory
    cause: str  # why the ranks end the run together
    refused: bool  # whether hvkit has refused an argument, which ends the rank
    terminated: bool  # whether it got SIGTERM
    left: bool  # whether it has saved after that, and ends


def address_of(descriptor: int) -> str:
    """The value of the variable for a pipe."""
    return f"{descriptor}:{os.fstat(descriptor).st_ino}"


def report(**values: Unpack[RunReport]) -> None:
    """Send values to ``hvkit run``, if that has started this rank."""
    if (descriptor := _pipe()) is None:
        return
    line = json.dumps(values).encode() + b"\n"
    if len(line) > LONGEST:
        raise ValueError(f"a report of {len(line)} bytes; at most {LONGEST} are possible")
    with contextlib.suppress(BrokenPipeError):  # the agent has gone, and ends this rank
        os.write(descriptor, line)


def listened_to() -> bool:
    """Whether ``hvkit run`` has started this rank, and reads its reports."""
    return _pipe() is not None


def _pipe() -> int | None:
    """The descriptor of the pipe; None if there is none."""
    descriptor, _, inode = os.environ.get(VARIABLE, "").partition(":")
    try:
        found = os.fstat(int(descriptor))
    except (ValueError, OverflowError, OSError):
        return None
    return int(descriptor) if stat.S_ISFIFO(found.st_mode) and f"{found.st_ino}" == inode else None


def restart_of_this_run() -> dict[str, Any]:
    """The values of ``RESTART``, with ``restart`` counted from 1; empty without a restart."""
    try:
        values = json.loads(os.environ[RESTART])
        restart, reached = int(values["restart"]), int(values.get("reached", 0))
        return {"restart": restart, "reason": str(values["reason"]), "reached": reached}
    except (KeyError, ValueError, TypeError):  # not set, or by someone else
        return {}


def run_name() -> str:
    """The name of this run of ``hvkit run``, with all its restarts; empty if there are none."""
    return os.environ.get(RUN_NAME, "")


def memory_folder(run: str | None = None) -> Path | None:
    """The folder in a host's memory with files that are kept until the run's last try has ended."""
    run = run_name() if run is None else run
    return _MEMORY / f"hvkit-run-{run}" if re.fullmatch("[0-9a-f]{16}", run) else None


def timeline_wanted() -> bool:
    """Whether the run has a timeline, for which ranks send their spans."""
    return os.environ.get(TIMELINE) == "1"
