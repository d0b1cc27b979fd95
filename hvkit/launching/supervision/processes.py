"""How ``hvkit run`` and agents end: signals to this process, and the processes below it (Linux).

Signals are handled here while ``hvkit run`` has no ranks: before the first start, and between two
tries. While ranks run, ``supervised_run`` handles them itself. Processes are ended together with
everything that they have started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import psutil

# Those that end the run, with an exit status of 128 plus the signal's number.
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

COMMAND_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # those that go to the command of every rank

# A batch system and a launcher may both pass on the same signal. After so many seconds, another
# signal is not the same one.
_SAME = 2.0

_ROUNDS = 10
_POLL = 0.02

# What launchers leave on a remote host above an agent: their daemons, started by a login shell.
_DAEMONS = ("prted", "orted", "hydra_pmi_proxy", "prterun", "mpirun", "mpiexec", "mpiexec.hydra")
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "tcsh", "csh", "fish")

# Loaded here: in a process with threads, a forked child must not load anything before its exec.
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class EndedBySignal(SystemExit):
    """A signal ends the run; raised in the main thread, wherever it is, so that it cleans up."""

    code: int


def ended_text(number: signal.Signals, saved: int | None, *, resumes: bool = True) -> str:
    """The line that ``hvkit run`` prints after a signal that ends it."""
    text = f"hvkit run: ended by {number.name}"
    if saved is None:
        return text
    again = "the same command resumes" if resumes else "resume it with Checkpoint.restore()"
    return f"{text}; step {saved} is saved; {again}"


@contextlib.contextmanager
def end_on_signals(saved: Callable[[], int | None]) -> Iterator[None]:
    """Within: signals that end the run raise ``EndedBySignal``, those for ranks do nothing.

    A further signal that comes while the first one's exception cleans up ends this process at once.
    Signals that this process was started to ignore stay ignored.
    """
    first: float | None = None

    def end(number: int, _: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            # Not print: the signal may have interrupted one.
            with contextlib.suppress(OSError):
                os.write(2, f"{ended_text(signal.Signals(number), saved())}\n".encode())
            raise EndedBySignal(128 + number)
        if time.monotonic() - first > _SAME:
            os._exit(128 + number)

    with same_handlers_after():
        for number in END_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, end)
        for number in COMMAND_SIGNALS:
            # A function, as commands would inherit SIG_IGN.
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Within: signals that end the run do nothing, since it is ending and cleaning up."""
    with same_handlers_after():
        for number in END_SIGNALS:
            signal.signal(number, lambda *_: None)
        yield


@contextlib.contextmanager
def same_handlers_after() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (*END_SIGNALS, *COMMAND_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that Python has not set
                signal.signal(number, handler)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parents end, so that they stay findable."""
    # A service may have started this process ignoring SIGCHLD: the kernel would then drop the exit
    # status of every child before anybody reads it.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_adopted(child: int) -> None:
    """Reap adopted descendants that have ended, but leave ``child`` to its own ``wait``."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == child:
                return
            os.waitpid(found.si_pid, 0)


def ends_with_parent(number: signal.Signals, parent: int | None = None) -> Callable[[], None]:
    """For ``preexec_fn``: the child gets this signal when the thread that started it ends.

    ``parent`` is the process that the thread belongs to; None for this one.
    """
    parent = os.getpid() if parent is None else parent

    def arrange() -> None:
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # The parent ended before the line above.
            os.kill(os.getpid(), number)

    return arrange


def end_descendants(
    seconds_left: Callable[[], float] | None = None, leader: int | None = None
) -> None:
    """End all processes below this one.

    ``seconds_left`` says how long they still have to end after SIGTERM, which may change while this
    function waits; without it they get SIGKILL at once. The ``leader`` among them needs the
    processes below it, such as the workers of a data loader: they get SIGTERM when it has ended.
    """
    if seconds_left is not None and seconds_left() > 0:
        below = _below(leader)
        others = [each for each in _descendants() if each.pid not in below]
        for some in (others, []) if below else (others,):
            ending = _send(some or _descendants(), signal.SIGTERM)
            _send(ending, signal.SIGCONT)  # one that was stopped gets SIGTERM when it goes on
            while seconds_left() > 0 and any(map(_runs, ending)):
                time.sleep(_POLL)
    # Each round finds the processes that have been started since the last one. The number of
    # rounds is limited because a process that waits for a disk may not end at all.
    for _ in range(_ROUNDS):
        if not (running := [process for process in _descendants() if _runs(process)]):
            return
        killed, deadline = _send(running, signal.SIGKILL), time.monotonic() + 0.5
        while time.monotonic() < deadline and any(map(_runs, killed)):
            time.sleep(_POLL)


def interrupt(leader: int) -> None:
    """Send SIGINT to a child and all of its process group below this process, as Ctrl-C would."""
    with contextlib.suppress(ProcessLookupError):
        group = os.getpgid(leader)
        for each in _descendants():
            with contextlib.suppress(ProcessLookupError):
                if os.getpgid(each.pid) == group:
                    _send([each], signal.SIGINT)


def end_remote_launcher(started_by_it: int) -> None:
    """End the launcher's processes on this host when its own host cannot be reached any more.

    Its daemon and sshd would wait many minutes for a TCP timeout.
    """
    found = []
    with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        for process in psutil.Process(started_by_it).parents():
            if process.name() in _DAEMONS or _is_ssh_session(process):
                found.append(process)
            elif process.name() not in _SHELLS:
                break
    with contextlib.suppress(psutil.AccessDenied):
        _send(found, signal.SIGKILL)


def _is_ssh_session(process: psutil.Process) -> bool:
    """Whether this sshd serves one connection; the one that waits for connections must live."""
    command = " ".join(process.cmdline())
    return command.startswith("sshd") and "@notty" in command


def _descendants() -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process().children(recursive=True)
    return found


def _below(leader: int | None) -> set[int]:
    """The ids of the processes below one of the descendants of this process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        if leader in {each.pid for each in _descendants()}:
            return {each.pid for each in psutil.Process(leader).children(recursive=True)}
    return set()


def _send(processes: Sequence[psutil.Process], number: signal.Signals) -> list[psutil.Process]:
    """Send a signal to processes; return those that got it."""
    reached = []
    for process in processes:
        # AccessDenied: a command may run as another user; then it is not ours to end.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
            reached.append(process)
    return reached


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
