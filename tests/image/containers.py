"""Containers of the image, as far as MPI and ssh can tell: hosts of a rig with its file system."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from built_image import Image
from rig import Host, Rig

_HOME = "/home/hvkit"
_UID = 1000
_LISTENS = f"until (exec 3<> /dev/tcp/localhost/2222) 2> {os.devnull}; do sleep 0.1; done"


class Container:
    """One container: commands run in it as the image's user, with the image's environment."""

    def __init__(self, host: Host, image: Image) -> None:
        self._host = host
        self._environ = image.environ

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, timeout: float = 60
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command to its end in the home folder."""
        return self._host.run(command, env=self._environ | dict(env or {}), timeout=timeout)

    def output(self, *command: str, timeout: float = 60) -> str:
        """What a command prints; one that fails fails the test."""
        done = self.run(*command, timeout=timeout)
        assert done.returncode == 0, f"{done.args}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()

    def start(self, *command: str) -> "subprocess.Popen[Any]":
        """Start a command that goes on."""
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        return self._host.popen(command, env=self._environ, **quiet)

    def serve(self) -> "subprocess.Popen[Any]":
        """Start its ssh server."""
        server = self.start("hvkit-sshd")
        self.wait_for_server()
        return server

    def wait_for_server(self) -> None:
        """Return when its ssh server listens."""
        self.output("bash", "-c", _LISTENS, timeout=30)


@contextmanager
def containers(
    image: Image, names: Sequence[str], keys: Path | None = None, data: Path | None = None
) -> Iterator[list[Container]]:
    """Containers on one network, without their ssh servers.

    Args:
        image: what they are containers of.
        names: theirs.
        keys: mounted read-only where the user's keys belong.
        data: mounted read-only at /data.
    """
    # A rig has its own way of ssh; the image's is what is looked at here.
    binds = {str(image.root / "etc/ssh/ssh_config"): "/etc/ssh/ssh_config"}
    binds |= {str(keys): f"{_HOME}/.ssh"} if keys else {}
    binds |= {str(data): "/data"} if data else {}
    with Rig(names, root=image.root, user="hvkit", binds=binds, docker0=False) as rig:
        yield [Container(host, image) for host in rig.hosts]


def keys_in_a_volume(folder: Path) -> Path:
    """The shared key as hvkit-ssh-key leaves it: the user's own, and closed."""
    _make_key(folder, "-t", "rsa", "-b", "3072")
    for path in (folder, *folder.iterdir()):
        os.chown(path, _UID, _UID)
        path.chmod(0o700 if path == folder else 0o600)
    return folder


def keys_in_a_secret(folder: Path) -> Path:
    """The shared key as the MPI operator has Kubernetes mount it: root's, and open to all."""
    _make_key(folder, "-t", "ecdsa", "-b", "521", "-m", "PEM")
    for path in folder.iterdir():
        path.chmod(0o644)
    folder.chmod(0o1777)
    return folder


def _make_key(folder: Path, *kind: str) -> None:
    folder.mkdir()
    file = folder / "id_rsa"
    command = ["ssh-keygen", "-q", *kind, "-N", "", "-C", "test", "-f", str(file)]
    subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    (folder / "authorized_keys").write_text((folder / "id_rsa.pub").read_text())
