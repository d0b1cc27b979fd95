"""Ending processes with all that they have started."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence

import psutil

_DAEMONS = ("prted", "orted", "hydra_pmi_proxy", "prterun", "mpirun", "mpiexec", "mpiexec.hydra")
_ROUNDS = 10
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "tcsh", "csh", "fish")

# Loaded here, since a child of a process with threads must not load anything before its exec.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that none gets out of sight."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def ends_with_parent(number: signal.Signals) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets this signal when the thread that started it ends."""
    parent = os.getpid()

    def arrange() -> None:
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # It ended before the line above.
            os.kill(os.getpid(), number)

    return arrange


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def end_descendants(left: Callable[[], float] | None = None) -> None:
    """End all processes below this one.

    Args:
        left: seconds that they have still to end by themselves, which may change meanwhile;
            ``None`` for an end by force at once.
    """
    if left is not None and left() > 0:
        asked = signalled(descendants(), signal.SIGTERM)
        while left() > 0 and any(map(_runs, asked)):
            time.sleep(0.02)
    # What they start meanwhile is found in the next round. One that waits for a disk may not end.
    for _ in range(_ROUNDS):
        if not (running := [process for process in descendants() if _runs(process)]):
            return
        _wait_for(signalled(running, signal.SIGKILL), 0.5)


def reap_adopted(child: int) -> None:
    """Forget the descendants that were adopted and have ended; the child is left alone."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == child:
                return
            os.waitpid(found.si_pid, 0)


def end_way_here(started_by: int) -> None:
    """End what a launcher has put between itself and a process on a host it cannot reach.

    Its daemon and the end of its ssh connection wait for TCP to give up, which takes many minutes.

    Args:
        started_by: the process at the near end of that way, which stays.
    """
    way = []
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for process in psutil.Process(started_by).parents():
            if process.name() in _DAEMONS or _is_login(process):
                way.append(process)
            elif process.name() not in _SHELLS:
                break
    with contextlib.suppress(psutil.AccessDenied):
        signalled(way, signal.SIGKILL)


def _is_login(process: psutil.Process) -> bool:
    """Whether it is the end of one ssh connection, not the server that waits for them."""
    command = " ".join(process.cmdline())
    return command.startswith("sshd") and "@notty" in command


def interrupt(leader: int) -> None:
    """Send SIGINT to a child and to all below this process that are in its process group.

    These are the ones that Ctrl-C in a terminal would reach.
    """
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(leader)
        signalled([each for each in descendants() if _group(each) == group], signal.SIGINT)


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except ProcessLookupError:
        return None


def _wait_for(processes: Sequence[psutil.Process], seconds: float) -> None:
    """Wait until they have ended; their exit statuses are left to whoever started them."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(_runs, processes)):
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def signalled(processes: Sequence[psutil.Process], number: signal.Signals) -> list[psutil.Process]:
    """Send a signal to processes; those that are still there to receive it."""
    reached = []
    for process in processes:
        # A command that became another user is not ours to end.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
            reached.append(process)
    return reached


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
