"""The report of ``hvkit doctor`` from every host, for ``hvkit hosts --check``."""

import ipaddress
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkit.host.cpus import within_limit
from hvkit.launch.hosts import Host
from hvkit.launch.ssh import Answer, RemoteShell, last_line, run_on_hosts

# Seconds. Python starts slowly from a cold network file system.
_TIMEOUT = 60.0
# The format of the doctor's report that is read here.
_FORMAT = 1


@dataclass(frozen=True)
class HostReport:
    """The parts of ``hvkit doctor --json`` that matter to other hosts.

    Attributes:
        hostname: the host's own name.
        versions: of Python, hvkit, Horovod, the frameworks and MPI; ``None`` for a missing one.
        cores: logical CPUs that ranks can use.
        memory: free memory in bytes.
        gpus: the number of GPUs that the driver shows.
        own_addresses: the addresses that the host's own name resolves to there.
        outward: addresses of its interfaces other than loopback.
        problems: the problems that the doctor found, each with the fix.
    """

    hostname: str
    versions: Mapping[str, str | None]
    cores: int
    memory: int
    gpus: int
    own_addresses: tuple[str, ...]
    outward: tuple[str, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Examined:
    """A host and its report.

    Attributes:
        host: the host.
        facts: its report; ``None`` if there is none.
        problem: why there is no report, with the fix.
    """

    host: Host
    facts: HostReport | None
    problem: str | None


def collect_reports(hosts: Sequence[Host], shell: RemoteShell) -> list[Examined]:
    """Run ``hvkit doctor`` on all hosts at once, with the path of this process's Python.

    Args:
        hosts: the hosts.
        shell: the way to the hosts.
    """
    command = [sys.executable, "-P", "-m", "hvkit.cli", "doctor", "--json", "--no-self-test"]
    return [_examined(answer) for answer in run_on_hosts(hosts, command, _TIMEOUT, shell)]


def read_report(output: str) -> HostReport:
    """The report in the output of ``hvkit doctor --json``.

    The start and logout files of a shell may print text around it.

    Raises:
        ValueError: there is no report, or it has another format.
    """
    start = output.find("{\n")
    if start < 0:
        raise ValueError("it printed no report")
    try:
        report, _ = json.JSONDecoder().raw_decode(output, start)
        if report["format"] != _FORMAT:
            raise ValueError(f"its report has format {report['format']!r}, not {_FORMAT}")
        return _report(report)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"its report is invalid ({type(error).__name__}: {error})") from None


def _examined(answer: Answer) -> Examined:
    if answer.problem is not None:
        return Examined(answer.host, None, answer.problem)
    try:
        return Examined(answer.host, read_report(answer.stdout), None)
    except ValueError as error:
        # The last line of a traceback explains more than "printed no report".
        why = last_line(answer.stderr) or str(error)
        return Examined(
            answer.host,
            None,
            f"hvkit does not run there as it does here ({why}): every host needs the same "
            f"environment at the same path, {sys.prefix}",
        )


def _report(values: Mapping[str, Any]) -> HostReport:
    mpi, cores = values["mpi"], values["cores"]
    mpi_version = f"{mpi['flavour']} {mpi['version']}" if mpi else None
    addresses = (interface["address"] for interface in values["interfaces"])
    return HostReport(
        hostname=values["hostname"],
        versions={**values["versions"], "MPI": mpi_version},
        cores=within_limit(cores["usable"], cores["limit"]),
        memory=values["memory"]["available"],
        gpus=len(values["gpus"]),
        own_addresses=tuple(values["addresses"]),
        outward=tuple(a for a in addresses if not ipaddress.ip_address(a).is_loopback),
        problems=tuple(f"{one['what']}: {one['fix']}" for one in values["problems"]),
    )
