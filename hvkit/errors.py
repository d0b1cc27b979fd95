"""hvkit's own exceptions.

Wrong arguments raise the built-in ``TypeError`` and ``ValueError``. All other errors are here:

    RuntimeError
    └── HvkitError
        ├── HorovodNotFoundError   several ranks were launched, no usable Horovod
        ├── LaunchError            ranks cannot be started, or another number than launched
        │   ├── CannotRunError     hosts lack the command that ranks shall run
        │   └── UsageError         arguments of a command do not fit each other or the hosts
        ├── HostfileError          a hostfile or a list of hosts cannot be read
        ├── RankLostError          a rank has ended, or waits in another call
        ├── RanksDisagreeError     the ranks passed different models or arguments
        └── BuildError             Horovod could not be built or installed
"""

import errno
import signal
from collections.abc import Sequence
from typing import TypeGuard

# Exit status of a rank that a SIGTERM has ended, once its checkpoint was saved.
PREEMPTED = 128 + signal.SIGTERM


class HvkitError(RuntimeError):
    """Base of hvkit's own errors.

    Attributes:
        exit_status: of an ``hvkit`` command that ends with this error: 2 for wrong arguments.
    """

    exit_status = 1


class HorovodNotFoundError(HvkitError):
    """Several ranks were launched, but there is no Horovod for the framework in use."""


class LaunchError(HvkitError):
    """Ranks cannot be started, or Horovod sees another number of ranks than were launched."""


class CannotRunError(LaunchError):
    """Hosts lack the command that ranks shall run, or cannot start it.

    Args:
        message: what is wrong, and where.
        exit_status: as a shell's: 127 if there is no such command, 126 if it cannot be started.
    """

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class UsageError(LaunchError):
    """Arguments of an ``hvkit`` command do not fit each other or the hosts."""

    exit_status = 2


class HostfileError(HvkitError, ValueError):
    """A hostfile or a list of hosts cannot be read; the message names file and line."""

    exit_status = 2


class RanksDisagreeError(HvkitError, ValueError):
    """The ranks passed different models, optimizers or arguments, or made different calls."""


class RankLostError(HvkitError):
    """This process waited for a rank that has ended, or that waits in another call."""


class BuildError(HvkitError):
    """Horovod could not be built or installed; the message gives the reason and the fix."""


def is_of_full_disk(error: BaseException) -> TypeGuard[OSError]:
    """Whether this is the error of a full disk, or of a used-up quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def ranks_text(numbers: Sequence[int]) -> str:
    """Sorted rank numbers in words: ``rank 3``, ``ranks 0-3, 5``; past six parts only how many."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    listed = ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts[:6])
    more = f" and {sum(map(len, parts[6:]))} more" if len(parts) > 6 else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {listed}{more}"
