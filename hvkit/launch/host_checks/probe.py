"""Prints facts about a host before ranks start there.

``preflight`` runs ``python -m hvkit.launch.host_checks.probe FOLDER`` on all hosts of a job. It is
a module of its own so that it imports little: a cold network file system serves each import slowly.

What hvkit's programs print on other hosts is one line of JSON, ``{"hvkit": ...}``. The host may
print a greeting before it, with or without an end of line.
"""

import json
import math
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import hvkit
from hvkit.host.cpus import allowance
from hvkit.host.network import Interface, interfaces

_LINE_START = '{"hvkit": '


@dataclass(frozen=True)
class Facts:
    """A host, seen from itself.

    Attributes:
        hostname: its own name.
        version: version of its hvkit.
        cpus: logical CPUs that this process may use; in a container at most its CPU time limit.
        interfaces: its interfaces with their addresses.
        has_folder: whether the folder on the command line exists.
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
            cpus=_usable_cpus(),
            interfaces=tuple(interfaces()),
            has_folder=os.path.isdir(folder),
        )

    def printed(self) -> str:
        """The facts as a line to print."""
        return json_line(asdict(self))

    @classmethod
    def read(cls, output: str) -> "Facts":
        """The facts in the output of another host.

        Raises:
            ValueError: there are none, or another version of hvkit printed them.
        """
        lines = [values for line in output.splitlines() if (values := read_line(line)) is not None]
        if not lines:
            raise ValueError("it printed no facts")
        values = lines[-1]
        if values.get("version") != hvkit.__version__:
            raise ValueError(f"it has hvkit {values.get('version')}, not {hvkit.__version__}")
        found = tuple(Interface(**interface) for interface in values["interfaces"])
        return cls(**{**values, "interfaces": found})


def json_line(values: Mapping[str, Any]) -> str:
    """The line that ``read_line`` reads."""
    return json.dumps({"hvkit": values})


def read_line(line: str) -> dict[str, Any] | None:
    """The values in a line that another host printed; ``None`` if hvkit did not print the line.

    Raises:
        ValueError: hvkit did, but the line is cut off.
    """
    _, found, rest = line.partition(_LINE_START)
    if not found:
        return None
    values: dict[str, Any] = json.JSONDecoder().raw_decode(found + rest)[0]["hvkit"]
    return values


def _usable_cpus() -> int:
    usable, limit = len(os.sched_getaffinity(0)), allowance().cpus
    return usable if limit is None else min(usable, max(1, math.ceil(limit)))


if __name__ == "__main__":
    print(Facts.here(sys.argv[1]).printed())
