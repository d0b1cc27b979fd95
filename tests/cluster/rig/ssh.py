"""ssh from any host to any host, with keys made for one rig."""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rig.errors import RigError
from rig.files import File
from rig.namespaces import Namespaces
from rig.network import Addresses

_PID_FILE = "run/sshd.pid"
_LOG = "run/sshd.log"
_SECONDS_TO_LISTEN = 20

_CLIENT = """\
Host *
    BatchMode yes
    IdentityFile /etc/ssh/id_ed25519
    IdentitiesOnly yes
    StrictHostKeyChecking yes
    GlobalKnownHostsFile /etc/ssh/ssh_known_hosts
    UserKnownHostsFile /dev/null
"""

_SERVER = f"""\
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
MaxStartups 1000
PrintMotd no
PidFile /{_PID_FILE}
"""


@dataclass(frozen=True)
class Key:
    """A key pair, as the text of its two files."""

    private: str
    public: str


def new_key() -> Key:
    """Make a key pair."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "key")
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "rig", "-f", str(file)]
        subprocess.run(command, check=True, timeout=30, stdin=subprocess.DEVNULL)
        return Key(file.read_text(), file.with_suffix(".pub").read_text())


def files(
    name: str,
    login: Key,
    hosts: Mapping[str, Key],
    addresses: Mapping[str, Addresses],
    owner: int,
    environment: Mapping[str, str],
) -> dict[str, File]:
    """A host's files for ssh.

    Args:
        name: the host.
        login: the key to log in with, everywhere.
        hosts: every host's key, by name.
        addresses: every host's addresses, by name.
        owner: the user id that logs in from the host, and root may, too.
        environment: variables that a login has.
    """
    known = "".join(
        f"{','.join([other, *addresses[other].all])} {key.public}" for other, key in hosts.items()
    )
    variables = "".join(f"SetEnv {key}={value}\n" for key, value in environment.items())
    return {
        "/etc/ssh/ssh_config": File(_CLIENT),
        "/etc/ssh/ssh_known_hosts": File(known),
        # ssh refuses the key of a user that others, too, may read.
        "/etc/ssh/id_ed25519": File(login.private, 0o600, owner),
        "/etc/ssh/sshd_config": File(_SERVER + variables),
        "/etc/ssh/authorized_keys": File(login.public),
        "/etc/ssh/ssh_host_ed25519_key": File(hosts[name].private, 0o600),
    }


def start_server(host: Namespaces, program: str) -> int:
    """Start a host's ssh server and return the machine's id of its process.

    Args:
        host: the host.
        program: the absolute path of ``sshd`` there.

    Raises:
        RigError: it does not listen.
    """
    server = host.popen(
        [program, "-D", "-E", f"/{_LOG}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    root = Path(f"/proc/{host.pid}/root")
    deadline = time.monotonic() + _SECONDS_TO_LISTEN
    while not (root / _PID_FILE).exists():
        if server.poll() is not None or time.monotonic() > deadline:
            log = root / _LOG
            said = log.read_text().strip() if log.exists() else "nothing in its log"
            raise RigError(f"{program} does not listen: {said}")
        time.sleep(0.01)
    return server.pid
