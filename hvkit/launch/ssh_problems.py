"""Why a command could not be run on another host, and what to do: from what ssh printed."""

import re
import shlex
from collections.abc import Sequence

from hvkit.launch.hosts import Host

# What ssh prints, as a pattern, and what that means. The first that is found decides.
_MEANINGS = (
    (
        r"Could not resolve hostname",
        "its name does not resolve here: correct it, or add it to DNS or to /etc/hosts of every "
        "host",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "its ssh host key is not the one that is known here: if it was set up anew, "
        "`ssh-keygen -R {name}` forgets the old key and `ssh {target}` shows the new one; else "
        "something answers in its place",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its ssh host key is not known here: run `ssh {target}` once and compare the key that it "
        "shows",
    ),
    (
        r"Permission denied \(|Too many authentication failures|No more authentication methods",
        "ssh does not log in there without a password: `ssh-copy-id {target}` puts your key there "
        "(make one with ssh-keygen; a key with a passphrase needs ssh-agent)",
    ),
    (
        r"Connection refused",
        "it is there but nothing listens on its ssh port: start sshd there, or set the Port for "
        "it in ~/.ssh/config",
    ),
    (
        r"timed out",
        "nothing answers at its ssh port: is it on, and does a firewall stand between?",
    ),
    (
        r"No route to host|Network is unreachable",
        "no network leads there: is it on, and is it in this host's network?",
    ),
    (
        r"kex_exchange_identification|Connection (closed|reset) by",
        "it closes ssh connections before login: see its sshd's log (MaxStartups, AllowUsers)",
    ),
    (
        r"Bad configuration option|Bad owner or permissions|terminating, \d+ bad",
        "ssh rejects its own configuration: mend ~/.ssh/config",
    ),
)


def explain(host: Host, status: int | None, stderr: str) -> str | None:
    """What ``stderr`` of an ssh that ended with ``status`` means; ``None`` if ssh did its work."""
    # ssh's own status, which a command can end with too, but hardly any does.
    if status != 255:
        return None
    target = f"{host.user}@{host.name}" if host.user else host.name
    for pattern, meaning in _MEANINGS:
        if re.search(pattern, stderr):
            return meaning.format(name=host.name, target=target)
    return f"ssh failed: {last_line(stderr) or 'it said nothing'}; try `ssh {target} true`"


def not_started(program: str, error: OSError, local: bool) -> str:
    """This host could not start the program."""
    if isinstance(error, FileNotFoundError) and not local:
        return "there is no ssh on this host: install it (Debian: openssh-client)"
    return f"{program} cannot be started: {error.strerror}"


def not_found(program: str, stderr: str) -> str:
    """The host was reached but could not start the program."""
    return (
        f"{program} cannot be started there ({last_line(stderr) or 'not found'}): every host needs "
        "the same environment at the same path"
    )


def too_slow(command: Sequence[str], timeout: float) -> str:
    """The host did not finish in time."""
    return f"`{shlex.join(command)}` gave no answer within {timeout:g} s: is the host overloaded?"


def last_line(text: str) -> str:
    """The last line that is not blank, or nothing."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
