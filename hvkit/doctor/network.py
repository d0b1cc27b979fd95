"""The name of this host, its addresses, and ssh."""

import re
import shutil
import socket
from dataclasses import dataclass
from threading import Thread

import psutil

from hvkit.host.commands import run
from hvkit.host.network import addresses_of

_SECONDS = 2.0
# Where it is on hosts whose users have no sbin on PATH.
_SBIN = "/usr/sbin:/usr/local/sbin:/sbin"


@dataclass(frozen=True)
class Ssh:
    """OpenSSH on this host.

    Attributes:
        client: its version; ``None`` if there is none.
        server: where sshd is; ``None`` if it is not installed.
        running: whether an sshd runs.
    """

    client: str | None
    server: str | None
    running: bool


def own_addresses() -> tuple[str, ...]:
    """What this host's name resolves to; empty if it does not, or not within two seconds."""
    found: list[str] = []

    def resolve() -> None:
        found.extend(map(str, addresses_of(socket.gethostname())))

    # The resolver cannot be told to hurry: a name server that is away takes it half a minute.
    resolver = Thread(target=resolve, daemon=True)
    resolver.start()
    resolver.join(_SECONDS)
    return tuple(found)


def ssh() -> Ssh:
    """The ssh and sshd that are here."""
    said = run(["ssh", "-V"])
    version = re.match(r"[^\s,]+", said.text) if said else None
    server = shutil.which("sshd") or shutil.which("sshd", path=_SBIN)
    names = (process.info["name"] for process in psutil.process_iter(["name"]))
    return Ssh(version[0] if version else None, server, any(name == "sshd" for name in names))
