"""Commands on other hosts: over ssh, or in a Slurm job with ``srun``, where sites may forbid ssh.

``remote_shell`` picks the way. ``run_on_hosts`` runs a command on all hosts at once and
never prompts. A failure of ssh or srun becomes a sentence with the fix.
"""

import contextlib
import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from hvkit.host.network import is_local
from hvkit.launching.hosts import Host

SLURM = "Slurm"

# sshd drops some of the connections that arrive at once (MaxStartups), and each is a process here.
AT_ONCE = 32
# Seconds to connect to a host, even if its command has more time.
_CONNECT = 10.0
# Seconds until a signal is handled, at most.
_SIGNALS_WAIT = 0.2

# By default srun exports the whole environment, secrets included.
_SRUN_EXPORTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME")
_SRUN_ERROR = "srun: error:"

# Messages of ssh as patterns, each with its meaning and fix. The first match decides.
_SSH_MESSAGES = {
    r"Could not resolve hostname": "its name does not resolve here: correct it, or add it to DNS "
    "or to /etc/hosts of every host",
    r"REMOTE HOST IDENTIFICATION HAS CHANGED": "its ssh host key differs from the one known "
    "here: if the host was reinstalled, `ssh-keygen -R {name}` removes the old key and `ssh "
    "{target}` shows the new one; else another machine may pose as this host",
    r"Host key verification failed|No \S+ host key is known": "its ssh host key is not known "
    "here: run `ssh {target}` once and compare the key that it shows",
    r"Permission denied \(|Too many authentication failures|No more authentication methods": "ssh "
    "cannot log in there without a password: `ssh-copy-id {target}` installs your key (make one "
    "with ssh-keygen; a key with a passphrase needs ssh-agent)",
    r"Connection refused": "it is up but nothing listens on its ssh port: start sshd there, or "
    "set the Port for it in ~/.ssh/config",
    r"timed out": "nothing answers on its ssh port: is it on, and does a firewall block the port?",
    r"No route to host|Network is unreachable": "no route to it: is it on, and is it in this "
    "host's network?",
    r"kex_exchange_identification|Connection (closed|reset) by": "it closes ssh connections "
    "before login: see its sshd's log (MaxStartups, AllowUsers)",
    r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad": "ssh rejects its "
    "own configuration: correct ~/.ssh/config",
}


@dataclass(frozen=True)
class Answer:
    host: Host
    status: int | None  # of the command; None if it did not run, or did not end in time
    stdout: str
    stderr: str  # of the command and of ssh
    problem: str | None  # why it could not run, with the fix


@dataclass(frozen=True)
class RemoteShell:
    command: Callable[[Host, Sequence[str], float], list[str]]  # within a number of seconds
    # Why the command did not run, from exit status and standard error; None if it ran.
    explain: Callable[[Host, int | None, str], str | None]


def remote_shell(system: str | None, connect: float = _CONNECT) -> RemoteShell:
    """The way to the hosts: ``srun`` in a Slurm job if it is on PATH, else ssh.

    ``system`` is as in ``Allocation``; ssh connects to a host within ``connect`` seconds.
    """
    if system == SLURM and shutil.which("srun"):
        return SRUN
    if connect == _CONNECT:
        return SSH
    return RemoteShell(functools.partial(ssh_command, connect=connect), explain_ssh)


def run_on_hosts(
    hosts: Sequence[Host], command: Sequence[str], timeout: float, shell: RemoteShell | None = None
) -> list[Answer]:
    """Run ``command`` on all hosts at once; the answers are in the order of the hosts.

    On this host it runs without ssh. ssh prompts for no password and forwards nothing. It refuses a
    host with an unknown key, unless the user's ssh configuration allows it.
    """
    commands = _Commands(command, timeout, shell or SSH)
    with ThreadPoolExecutor(AT_ONCE) as threads:
        try:
            answers = [threads.submit(commands.run, host) for host in hosts]
            # The system may give a signal to any thread, but its handler runs in this one, and not
            # while this one waits.
            while wait(answers, timeout=_SIGNALS_WAIT).not_done:
                pass
            return [answer.result() for answer in answers]
        except BaseException:  # a signal
            commands.end()
            raise


def ssh_command(
    host: Host, command: Sequence[str], timeout: float, connect: float = _CONNECT
) -> list[str]:
    """The ssh that runs ``command`` on ``host``, and stops trying to connect before ``timeout``."""
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": str(max(1, int(min(connect, timeout / 2)))),
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "UpdateHostKeys": "no",
        # A master connection would stay behind and keep our pipes open.
        "ControlMaster": "no",
        # Only failures: standard error is searched for them.
        "LogLevel": "ERROR",
    }
    settings = [word for key, value in options.items() for word in ("-o", f"{key}={value}")]
    user = ["-l", host.user] if host.user else []
    return ["ssh", "-T", *settings, *user, "--", host.name, shlex.join(command)]


def explain_ssh(host: Host, status: int | None, stderr: str) -> str | None:
    """Why ssh did not run the command, from its exit status and output; ``None`` if it did."""
    # The exit status of ssh's own failures, which hardly any command returns.
    if status != 255:
        return None
    target = f"{host.user}@{host.name}" if host.user else host.name
    for pattern, meaning in _SSH_MESSAGES.items():
        if re.search(pattern, stderr):
            return meaning.format(name=host.name, target=target)
    return f"ssh failed: {last_line(stderr) or 'it printed nothing'}; try `ssh {target} true`"


def _srun_command(host: Host, command: Sequence[str], timeout: float) -> list[str]:
    export = "--export=" + ",".join(_SRUN_EXPORTS)
    # --overlap shares the cores with other steps, such as the batch script that runs this.
    one_task = ["--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={host.name}"]
    return ["srun", "--quiet", export, *one_task, *command]


def _explain_srun(host: Host, status: int | None, stderr: str) -> str | None:
    errors = [line for line in stderr.splitlines() if line.startswith(_SRUN_ERROR)]
    # srun also prints an error when the command itself fails: then it did run.
    if status == 0 or not errors or any("Exited with exit code" in line for line in errors):
        return None
    reason = errors[0].removeprefix(_SRUN_ERROR).strip()
    return f"Slurm starts nothing there ({reason}): see `sinfo -R`"


SSH = RemoteShell(ssh_command, explain_ssh)
SRUN = RemoteShell(_srun_command, _explain_srun)


@dataclass
class _Commands:
    """Commands that run on hosts at the same time, each in a thread; ``end`` ends all of them."""

    command: Sequence[str]
    timeout: float
    shell: RemoteShell
    running: set[subprocess.Popen[str]] = field(default_factory=set)
    ends: bool = False

    def end(self) -> None:
        self.ends = True
        for process in list(self.running):
            _kill(process)

    def run(self, host: Host) -> Answer:
        command = self.command
        shell = None if is_local(host.name) else self.shell  # resolving a name can take seconds
        words = command if shell is None else shell.command(host, command, self.timeout)
        try:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env={**os.environ, "SSH_ASKPASS_REQUIRE": "never"},
                # No terminal for prompts, and one process group with everything that ssh starts.
                start_new_session=True,
            )
        except OSError as error:
            problem = f"{words[0]} cannot be started: {error.strerror}"
            if isinstance(error, FileNotFoundError) and shell is not None:
                problem = "there is no ssh on this host: install it (Debian: openssh-client)"
            return Answer(host, None, "", "", problem)
        with process:
            self.running.add(process)
            if self.ends:
                _kill(process)
            try:
                stdout, stderr = process.communicate(timeout=self.timeout)
            except subprocess.TimeoutExpired:
                text = f"`{shlex.join(command)}` did not end within {self.timeout:g} s: "
                return Answer(host, None, "", "", f"{text}is the host overloaded?")
            finally:
                _kill(process)
                self.running.discard(process)
        status: int | None = process.returncode
        failed = None if shell is None else shell.explain(host, status, stderr)
        if failed is None and status in (126, 127):
            failed = (
                f"{command[0]} cannot be started there ({last_line(stderr) or 'not found'}): every "
                "host needs the same environment at the same path"
            )
        return Answer(host, None if failed else status, stdout, stderr, failed)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a process that runs, with everything that it has started."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def last_line(text: str) -> str:
    """The last line that is not blank; empty if there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
