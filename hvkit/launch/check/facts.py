"""What a host tells about itself: the parts of ``hvkit doctor --json`` that hosts must agree on."""

import ipaddress
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_FORMAT = 1


@dataclass(frozen=True)
class Facts:
    """A host, as it sees itself.

    Attributes:
        hostname: its own name.
        versions: of Python, hvkit, Horovod, the frameworks and MPI; ``None`` for what is missing.
        cores: logical CPUs that ranks can use there.
        memory: free memory in bytes.
        gpus: how many GPUs its driver shows.
        own_addresses: what its own name resolves to there.
        outward: addresses of its interfaces that are not loopback.
        problems: what its own examination found, each with the fix.
    """

    hostname: str
    versions: Mapping[str, str | None]
    cores: int
    memory: int
    gpus: int
    own_addresses: tuple[str, ...]
    outward: tuple[str, ...]
    problems: tuple[str, ...]


def facts_in(output: str) -> Facts:
    """The facts in what ``hvkit doctor --json`` printed.

    A shell's start files may have printed something before.

    Raises:
        ValueError: there are none, or in another form.
    """
    start = output.find("{\n")
    if start < 0:
        raise ValueError("it printed no facts")
    try:
        # Logout files may print, too.
        report, _ = json.JSONDecoder().raw_decode(output, start)
        if report["format"] != _FORMAT:
            raise ValueError(f"its facts have format {report['format']!r}, not {_FORMAT}")
        return _facts(report)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"it printed other facts ({type(error).__name__}: {error})") from None


def _facts(report: Mapping[str, Any]) -> Facts:
    mpi, cores = report["mpi"], report["cores"]
    mpi_version = f"{mpi['flavour']} {mpi['version']}" if mpi else None
    limit = math.inf if cores["limit"] is None else max(1, math.ceil(cores["limit"]))
    addresses = (interface["address"] for interface in report["interfaces"])
    return Facts(
        hostname=report["hostname"],
        versions={**report["versions"], "MPI": mpi_version},
        cores=int(min(cores["usable"], limit)),
        memory=report["memory"]["available"],
        gpus=len(report["gpus"]),
        own_addresses=tuple(report["addresses"]),
        outward=tuple(a for a in addresses if not ipaddress.ip_address(a).is_loopback),
        problems=tuple(f"{one['what']}: {one['fix']}" for one in report["problems"]),
    )
