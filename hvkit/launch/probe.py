"""What ``hvkit run`` asks of each host: ``python -m hvkit.launch.probe FOLDER`` prints it."""

import math
import os
import socket
import sys
from dataclasses import asdict, dataclass

import hvkit
from hvkit.host.cpus import allowance
from hvkit.host.network import Interface, interfaces
from hvkit.launch.printed import line_of, values_in


@dataclass(frozen=True)
class Facts:
    """A host, as it sees itself.

    Attributes:
        hostname: its own name.
        version: of its hvkit.
        cpus: how many logical CPUs this process may use, or has the time of.
        interfaces: its addresses.
        has_folder: whether the folder that was asked about is there.
    """

    hostname: str
    version: str
    cpus: int
    interfaces: tuple[Interface, ...]
    has_folder: bool

    @classmethod
    def here(cls, folder: str) -> "Facts":
        """The facts about this host."""
        return cls(
            hostname=socket.gethostname(),
            version=hvkit.__version__,
            cpus=usable_cpus(),
            interfaces=tuple(interfaces()),
            has_folder=os.path.isdir(folder),
        )

    def printed(self) -> str:
        """The line that tells them."""
        return line_of(asdict(self))

    @classmethod
    def read(cls, output: str) -> "Facts":
        """The facts that another host has printed.

        Raises:
            ValueError: there are none, or those of another hvkit.
        """
        told = [values for line in output.splitlines() if (values := values_in(line)) is not None]
        if not told:
            raise ValueError("it printed no facts")
        values = told[-1]
        if values.get("version") != hvkit.__version__:
            raise ValueError(f"it has hvkit {values.get('version')}, not {hvkit.__version__}")
        found = tuple(Interface(**interface) for interface in values["interfaces"])
        return cls(**{**values, "interfaces": found})


def usable_cpus() -> int:
    """Logical CPUs that this process may use, or has the time of in a container."""
    usable, limit = len(os.sched_getaffinity(0)), allowance().cpus
    return usable if limit is None else min(usable, max(1, math.ceil(limit)))


if __name__ == "__main__":
    print(Facts.here(sys.argv[1]).printed())
