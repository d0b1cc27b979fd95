"""One host of a rig."""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rig.namespaces import Namespaces
from rig.network import Addresses
from rig.users import User


@dataclass(frozen=True)
class Process:
    """A process of a host: its id on the machine, and its command line, joined by spaces."""

    pid: int
    command: str


class Host:
    """One host of a rig; see ``Rig.host``.

    Attributes:
        name: its name.
        address: the IPv4 address of its ``eth0``.
        address6: its IPv6 address there, ``None`` unless the rig has IPv6.
    """

    def __init__(
        self,
        name: str,
        addresses: Addresses,
        namespaces: Namespaces,
        server: int,
        user: User,
        environment: Mapping[str, str],
    ) -> None:
        self.name = name
        self.address = addresses.four
        self.address6 = addresses.six
        self._namespaces = namespaces
        self._server = server
        self._user = user
        self._environment = dict(environment)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float = 60,
        input: str = "",
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host to its end; its exit status is for the caller to look at.

        Args:
            command: the command.
            env: added to the environment, see ``popen``.
            cwd: folder to start in; the home folder if ``None``.
            timeout: seconds that it may take.
            input: what it reads from standard input.

        Raises:
            subprocess.TimeoutExpired: it took longer, and was killed; processes that it started
                may still run.
        """
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with self.popen(command, env=env, cwd=cwd, text=True, **pipes) as process:
            try:
                out, err = process.communicate(input, timeout=timeout)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **options: Any,
    ) -> "subprocess.Popen[Any]":
        """Start a command on the host.

        It is a child of this process, and its id is the machine's: signals reach the command
        itself. It ends with the rig at the latest.

        Args:
            command: the command.
            env: added to an environment of ``PATH``, ``HOME``, ``USER``, ``TMPDIR`` and what lets
                Open MPI run as root; no other variable of this process is there. ``PATH`` is
                this process's, with its Python first; the usual one where hosts have an image.
            cwd: folder to start in; the home folder if ``None``.
            options: further ones of ``subprocess.Popen``.
        """
        user = self._user
        go_there = ["sh", "-c", 'cd -- "$1" && shift && exec "$@"', "sh", str(cwd or user.home)]
        process = self._namespaces.popen(
            [*go_there, *map(str, command)],
            user=(user.uid, user.gid),
            env=self._environment | dict(env or {}),
            **options,
        )
        # What errors show: the command without what goes to the host.
        process.args = list(command)
        return process

    def processes(self) -> list[Process]:
        """What runs on the host, but for what makes it one: its first process and ``sshd``."""
        found = []
        for pid in self._namespaces.process_ids():
            # One that ends meanwhile, or has ended and is not waited for, does not run.
            with contextlib.suppress(psutil.NoSuchProcess):
                if pid != self._server and (command := psutil.Process(pid).cmdline()):
                    found.append(Process(pid, " ".join(command).rstrip()))
        return found
