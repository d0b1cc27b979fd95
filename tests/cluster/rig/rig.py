"""The rig: hosts, and the bridge between them."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rig import files, network, ssh, users
from rig.errors import RigError
from rig.host import Host
from rig.namespaces import Namespaces

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MPI_AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


class Rig:
    """Several hosts on one machine, from ``with`` to its end.

    Any host reaches any other by name, over ``eth0``, and logs in there with ssh without a
    password. A login, as on a real cluster, has none of this process's environment.

    Args:
        names: the hosts; the first has address 10.77.0.1, the second 10.77.0.2, ...
        bandwidth: limit to what each host sends, and to what it receives, as in ``shape``.
        delay: of packets, as in ``shape``.
        ipv6: give ``eth0`` a second address, fd77::1, ..., and the names both.
        docker0: give every host an interface ``docker0`` that is up and has the same address on
            all, 172.17.0.1, which so leads to no other host.
        root: a folder with the file system of every host, in place of the machine's; what a host
            writes there is lost. ``/`` is the machine's own root file system.
        binds: with ``root``, what to see there of the machine, read-only: absolute path there by
            path here.
        user: who runs commands, and logs in by ssh.
        sshd: absolute path of the ssh server on the hosts.

    Raises:
        RigError: an argument that cannot be followed.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        bandwidth: str | None = None,
        delay: str | None = None,
        ipv6: bool = False,
        docker0: bool = True,
        root: str | Path | None = None,
        binds: Mapping[str, str] | None = None,
        user: str = "root",
        sshd: str = "/usr/sbin/sshd",
    ) -> None:
        if len(set(names)) != len(names):
            raise RigError(f"names: every host needs its own, got {', '.join(names)}")
        if binds and root is None:
            raise RigError("binds: without root, hosts have the machine's files already")
        self._numbers = {name: number for number, name in enumerate(names, start=1)}
        self._addresses = {
            name: network.addresses(number, ipv6) for name, number in self._numbers.items()
        }
        self._bandwidth = bandwidth
        self._delay = delay
        self._docker0 = docker0
        self._image = None if root is None else files.Image(Path(root), dict(binds or {}))
        self._user = users.user(user, Path(root or "/"))
        self._login: dict[str, str] = {}
        if root is None:
            self._user = dataclasses.replace(self._user, home=str(files.HOME))
            self._login = {"TMPDIR": str(files.TMPDIR)}
        self._sshd = sshd
        self._namespaces: dict[str, Namespaces] = {}
        self._hosts: dict[str, Host] = {}
        self._closing = contextlib.ExitStack()

    @property
    def hosts(self) -> list[Host]:
        """The hosts, in the order of their names as given."""
        return list(self._hosts.values())

    def host(self, name: str) -> Host:
        """The host of this name."""
        return self._hosts[name]

    def cut(self, name: str) -> None:
        """Drop every packet to and from a host, without a word; its link stays up."""
        network.set_port(self._switch, self._numbers[name], forwards=False)

    def heal(self, name: str) -> None:
        """Let a host's packets through again."""
        network.set_port(self._switch, self._numbers[name], forwards=True)

    def shape(self, name: str, *, bandwidth: str | None = None, delay: str | None = None) -> None:
        """Make a host's link slower, or as fast as it can be.

        Args:
            name: the host.
            bandwidth: limit to what it sends, and to what it receives, as ``tc`` writes it:
                ``100mbit``; ``None`` for no limit.
            delay: how much later each packet arrives, those to the host and those from it, as
                ``tc`` writes it: ``5ms``; ``None`` for no delay.

        Raises:
            RigError: the kernel has no means for it, or a value is not one.
        """
        number = self._numbers[name]
        network.shape(self._switch, self._namespaces[name], number, bandwidth, delay)

    def __enter__(self) -> Self:
        with self._closing:
            self._start()
            self._closing = self._closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closing.close()

    def _start(self) -> None:
        self._switch = self._new_namespaces("switch", None)
        files.make_room(self._switch)
        network.make_bridge(self._switch)
        login = ssh.new_key()
        keys = {name: ssh.new_key() for name in self._numbers}
        for name, number in self._numbers.items():
            self._namespaces[name] = self._new_namespaces(name, self._switch)
            self._connect(name, number)
            self._give_files(name, login, keys)
        for name, host in self._namespaces.items():
            server = ssh.start_server(host, self._sshd)
            self._hosts[name] = Host(
                name, self._addresses[name], host, server, self._user, self._environment()
            )

    def _new_namespaces(self, name: str, inside: Namespaces | None) -> Namespaces:
        namespaces = Namespaces(name, inside)
        self._closing.callback(namespaces.close)
        return namespaces

    def _connect(self, name: str, number: int) -> None:
        host = self._namespaces[name]
        network.plug_in(self._switch, host, number, self._addresses[name])
        if self._docker0:
            network.add_docker0(self._switch, host, number)
        self.shape(name, bandwidth=self._bandwidth, delay=self._delay)

    def _give_files(self, name: str, login: ssh.Key, keys: Mapping[str, ssh.Key]) -> None:
        host = self._namespaces[name]
        root = self._image.folder if self._image else Path("/")
        changed = ssh.files(name, login, keys, self._addresses, self._user.uid, self._login)
        changed |= network.files(self._addresses) | users.files(self._user, root)
        if self._image:
            files.give_image(host, name, changed, self._image)
        else:
            files.give_machine(host, name, changed, self._user.uid)

    def _environment(self) -> dict[str, str]:
        path = _SYSTEM_PATH
        if not self._image:
            path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', _SYSTEM_PATH)}"
        own = {"PATH": path, "HOME": self._user.home, "USER": self._user.name}
        return own | self._login | _MPI_AS_ROOT
