"""Sets of namespaces, and processes in them."""

import contextlib
import ctypes
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from rig.errors import RigError

_INIT = Path(__file__).with_name("init.py")
_KINDS = ("--mount", "--net", "--uts", "--ipc")
_CLONE_NEWPID = 0x20000000
_SECONDS_TO_START = 30
_SECONDS_TO_END = 30
_libc = ctypes.CDLL(None, use_errno=True)


class Namespaces:
    """A network, a host name, mounts, processes and shared memory of their own.

    They last until ``close``, or until the process that made them has ended, with those that were
    forked from it and run no other program.

    Args:
        hostname: the host name inside.
        inside: make them inside of these, which they then end with.
    """

    def __init__(self, hostname: str, inside: "Namespaces | None" = None) -> None:
        command = ["unshare", *_KINDS, "--pid", "--fork", "--kill-child", "--mount-proc"]
        # A Ctrl-C at a terminal is for the commands, not for what holds the hosts.
        options: dict[str, Any] = {
            "stdin": subprocess.PIPE,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "start_new_session": True,
        }
        command += [sys.executable, "-I", "-S", str(_INIT), hostname]
        start = subprocess.Popen if inside is None else inside.popen
        self._processes: list[subprocess.Popen[Any]] = []
        self._holder = start(command, **options)
        self.pid = self._pid_of_init()

    def popen(
        self, command: Sequence[str], user: tuple[int, int] = (0, 0), **options: Any
    ) -> subprocess.Popen[Any]:
        """Start a command inside, a child of this process with the machine's process id for it.

        Args:
            command: the command; its name is looked up inside.
            user: ids of the user and the group that it runs as.
            options: those of ``subprocess.Popen``, of which ``cwd`` means nothing here.
        """
        uid, gid = user
        become = [f"--setuid={uid}", f"--setgid={gid}"]
        enter = [_nsenter(), f"--target={self.pid}", *_KINDS, *become, "--"]
        with _children_in(self.pid):
            process = subprocess.Popen([*enter, *command], **options)
        self._processes.append(process)
        return process

    def call(self, command: Sequence[str]) -> str:
        """Run a command inside and return what it writes.

        Raises:
            RigError: it failed.
        """
        process = self.popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return _result(process, command)

    def call_on_network(self, command: Sequence[str], text: str = "") -> str:
        """Run one of the machine's programs as part of the machine, but with the network inside.

        Args:
            command: the command.
            text: what it reads from standard input.

        Raises:
            RigError: it failed.
        """
        process = subprocess.Popen(
            ["nsenter", f"--target={self.pid}", "--net", "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return _result(process, command, text)

    def process_ids(self) -> list[int]:
        """The machine's ids of the processes inside, without the one that holds the namespaces."""
        inside = _namespace_of_processes(self.pid)
        return [
            pid
            for pid in psutil.pids()
            if pid != self.pid and _namespace_of_processes(pid) == inside
        ]

    def close(self) -> None:
        """End every process inside, and with them the namespaces."""
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        # The kernel keeps the namespaces until every process in them was waited for.
        for process in [*self._processes, self._holder]:
            process.wait(_SECONDS_TO_END)
        for stream in (self._holder.stdout, self._holder.stderr):
            assert stream is not None
            stream.close()

    def _pid_of_init(self) -> int:
        assert self._holder.stdout is not None
        ready, _, _ = select.select([self._holder.stdout], [], [], _SECONDS_TO_START)
        if not ready or not self._holder.stdout.readline():
            self._holder.kill()
            _, said = self._holder.communicate()
            raise RigError(f"no namespaces for a host: {said.decode().strip() or 'no answer'}")
        (init,) = psutil.Process(self._holder.pid).children()
        return int(init.pid)


def _nsenter() -> str:
    # By its path, since the environment of a command may have any PATH.
    return shutil.which("nsenter") or "nsenter"


def _result(
    process: "subprocess.Popen[str]", command: Sequence[str], text: str | None = None
) -> str:
    out, said = process.communicate(text, timeout=_SECONDS_TO_START)
    if process.returncode != 0:
        raise RigError(f"{' '.join(command)}: exit status {process.returncode}: {said.strip()}")
    return out


def _namespace_of_processes(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except (FileNotFoundError, PermissionError):
        # It has ended, or is none that root here may look at, and so none that runs on a host.
        return None


@contextlib.contextmanager
def _children_in(pid: int) -> Iterator[None]:
    """Let the processes that this thread starts be in another's namespace of processes.

    So they are children of this process: signals, exit statuses and time limits need no helper
    process in between.
    """
    with open("/proc/self/ns/pid") as own, open(f"/proc/{pid}/ns/pid") as other:
        _set_namespace(other.fileno())
        try:
            yield
        finally:
            _set_namespace(own.fileno())


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWPID) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"setns: {os.strerror(error)}")
