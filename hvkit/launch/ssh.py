"""Commands on other hosts, by default over ssh: all hosts at once, never asking for anything.

What ssh says when it fails is explained by :mod:`hvkit.launch.ssh_problems`.
"""

import asyncio
import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hvkit.host.network import is_local
from hvkit.launch import ssh_problems
from hvkit.launch.hosts import Host

# sshd drops some of the connections that arrive at once (MaxStartups), and each is a process here.
AT_ONCE = 32
# Seconds after which a host that does not answer is given up, whatever time its command has.
_CONNECT = 10.0


@dataclass(frozen=True)
class Answer:
    """What a host said.

    Attributes:
        host: the host that was asked.
        status: exit status of the command; ``None`` if it was not run, or did not end in time.
        stdout: what the command wrote there.
        stderr: what the command wrote there, and ssh.
        problem: why the command could not be run and what to do; ``None`` if it was run, however
            it ended.
    """

    host: Host
    status: int | None
    stdout: str
    stderr: str
    problem: str | None


@dataclass(frozen=True)
class RemoteShell:
    """What takes commands to other hosts.

    Attributes:
        command: the command line that runs a command on a host, and has so many seconds.
        explain: why there was no answer, given the exit status and what it wrote to its standard
            error; ``None`` if the command was run.
    """

    command: Callable[[Host, Sequence[str], float], list[str]]
    explain: Callable[[Host, int | None, str], str | None]


def ask(
    hosts: Sequence[Host],
    command: Sequence[str],
    timeout: float,
    shell: RemoteShell | None = None,
) -> list[Answer]:
    """Run ``command`` on every host at the same time; the answers are in the order of the hosts.

    This host is asked without ssh. ssh asks for no password and forwards nothing. A host whose key
    is unknown is refused, unless the user's ssh configuration decides otherwise.

    Args:
        hosts: whom to ask.
        command: the program, which the other host looks for, and its arguments.
        timeout: seconds that each host has for all of it.
        shell: what takes the command there; ssh if ``None``.
    """
    return asyncio.run(_ask_all(hosts, command, timeout, shell or SSH))


def ssh_command(host: Host, command: Sequence[str], timeout: float) -> list[str]:
    """The ssh that runs ``command`` on ``host``, and gives up to connect before ``timeout``."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, int(min(_CONNECT, timeout / 2)))),
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "UpdateHostKeys": "no",
        # A master that stays behind would hold our pipes open.
        "ControlMaster": "no",
        # Failures have to be told, and nothing else.
        "LogLevel": "ERROR",
    }
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    user = ["-l", host.user] if host.user else []
    return ["ssh", "-T", *settings, *user, "--", host.name, shlex.join(command)]


SSH = RemoteShell(ssh_command, ssh_problems.explain)


async def _ask_all(
    hosts: Sequence[Host], command: Sequence[str], timeout: float, shell: RemoteShell
) -> list[Answer]:
    places = asyncio.Semaphore(AT_ONCE)

    async def ask_one(host: Host) -> Answer:
        async with places:
            # Resolving a name can take seconds.
            local = await asyncio.to_thread(is_local, host.name)
            return await _ask(host, command, timeout, None if local else shell)

    return list(await asyncio.gather(*map(ask_one, hosts)))


async def _ask(
    host: Host, command: Sequence[str], timeout: float, shell: RemoteShell | None
) -> Answer:
    words = command if shell is None else shell.command(host, command, timeout)
    try:
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
            # No terminal to prompt on, and one group with whatever ssh starts.
            start_new_session=True,
        )
    except OSError as error:
        return Answer(host, None, "", "", ssh_problems.not_started(words[0], error, shell is None))
    try:
        async with asyncio.timeout(timeout):
            stdout, stderr = map(_text, await process.communicate())
    except TimeoutError:
        return Answer(host, None, "", "", ssh_problems.too_slow(command, timeout))
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    problem = None if shell is None else shell.explain(host, process.returncode, stderr)
    if problem is None and process.returncode in (126, 127):
        problem = ssh_problems.not_found(command[0], stderr)
    ran = problem is None
    return Answer(host, process.returncode if ran else None, stdout, stderr, problem)


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
