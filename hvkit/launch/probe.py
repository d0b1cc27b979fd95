"""What ``hvkit run`` asks of each host: ``python -m hvkit.launch.probe FOLDER`` prints JSON."""

import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hvkit.launch.network import Interface, interfaces


@dataclass(frozen=True)
class Facts:
    """A host, as it sees itself.

    Attributes:
        hostname: its own name.
        cpus: how many logical CPUs this process may use.
        interfaces: its addresses.
        has_folder: whether the folder that was asked about is there.
    """

    hostname: str
    cpus: int
    interfaces: tuple[Interface, ...]
    has_folder: bool

    @classmethod
    def here(cls, folder: str) -> "Facts":
        """The facts about this host."""
        cpus = len(os.sched_getaffinity(0))
        return cls(socket.gethostname(), cpus, tuple(interfaces()), os.path.isdir(folder))

    @classmethod
    def from_json(cls, text: str) -> "Facts":
        """The facts that another host has printed."""
        values: Mapping[str, Any] = json.loads(text)
        found = tuple(Interface(**interface) for interface in values["interfaces"])
        return cls(values["hostname"], values["cpus"], found, values["has_folder"])


if __name__ == "__main__":
    print(json.dumps(asdict(Facts.here(sys.argv[1]))))
