"""``hvkit hosts --check``: whether hosts are ready for ranks.

``check`` collects the report of ``hvkit doctor`` from every host, lets all hosts connect to each
other (``reachability``), and finds the problems in the results. Each kind of problem has a plain
function.
"""

import ipaddress
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkit.host.cpus import within_limit
from hvkit.launching.host_checks.reachability import (
    ANOTHER_ANSWERS,
    Reach,
    Reachability,
    connect_all,
)
from hvkit.launching.hosts import Host
from hvkit.launching.ssh import Answer, RemoteShell, last_line, remote_shell, run_on_hosts
from hvkit.wording import counted

# Seconds. Python starts slowly from a cold network file system.
_TIMEOUT = 60.0
# The format of the doctor's report that is read here.
_FORMAT = 1
# A rank with a framework loaded takes some hundred MiB before it has any data.
_MEMORY_OF_RANK = 512 * 2**20
# Seconds. A smaller difference may be due to the slow start of the program that prints the time.
_CLOCK = 20.0
# In Horovod's version, what follows is a hash of its build, which may differ with the compiler.
_BUILD_MARK = "+hvkit"


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


@dataclass(frozen=True)
class HostProblem:
    """A problem that keeps ranks from running, or from running well.

    Attributes:
        hosts: names of the hosts with the problem.
        text: the problem and the fix.
    """

    hosts: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{', '.join(self.hosts)}: {self.text}"


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        examined: the reports, in the order of the hosts.
        interfaces: by host, the interface and address that it reached others from; without hosts
            that reached none.
        problems: the problems; empty if the hosts are ready.
    """

    examined: tuple[Examined, ...]
    interfaces: dict[str, str]
    problems: tuple[HostProblem, ...]


def check(hosts: Sequence[Host], system: str | None = None) -> Checked:
    """Check every host and the connections between every two of them, within minutes.

    Args:
        hosts: the hosts.
        system: the batch system that allocated the hosts, as in ``Allocation``.
    """
    shell = remote_shell(system)
    examined = collect_reports(hosts, shell)
    running = [one.host for one in examined if one.facts is not None]
    connections = connect_all(running, shell) if len(running) > 1 else Reachability()
    interfaces = {
        reach.source: f"{reach.interface} {reach.own_address}"
        for reach in reversed(connections.reaches)
        if reach.interface is not None
    }
    return Checked(tuple(examined), interfaces, tuple(problems(examined, connections)))


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


def problems(examined: Sequence[Examined], connections: Reachability) -> list[HostProblem]:
    """All problems; the same text for several hosts is one problem.

    Args:
        examined: the report of each host.
        connections: the attempts of the hosts to reach each other.
    """
    reports = {one.host.name: one.facts for one in examined if one.facts is not None}
    hosts = [one.host for one in examined]
    found = [
        *(
            HostProblem((one.host.name,), one.problem)
            for one in examined
            if one.problem is not None
        ),
        *_localhost(hosts),
        *_same_host(reports),
        *_versions(reports),
        *(p for host in hosts if host.name in reports for p in _room(host, reports[host.name])),
        *_gpus(reports),
        *_own_names(reports),
        *_connections(connections),
        *_clocks(connections.ahead),
        *(HostProblem((name,), text) for name, one in reports.items() for text in one.problems),
    ]
    together: dict[str, list[str]] = {}
    for problem in found:
        names = together.setdefault(problem.text, [])
        names.extend(name for name in problem.hosts if name not in names)
    return [HostProblem(tuple(names), text) for text, names in together.items()]


def _localhost(hosts: Sequence[Host]) -> Iterator[HostProblem]:
    for host in hosts:
        if len(hosts) > 1 and _is_localhost(host.name):
            yield HostProblem(
                (host.name,),
                "means a different host on every host: use the name that the others reach it by",
            )


def _same_host(reports: Mapping[str, HostReport]) -> Iterator[HostProblem]:
    seen: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, report in reports.items():
        seen.setdefault((report.hostname, tuple(sorted(report.outward))), []).append(name)
    for names in seen.values():
        if len(names) > 1:
            yield HostProblem(tuple(names), "are one host: name it once, with all its slots")


def _versions(reports: Mapping[str, HostReport]) -> Iterator[HostProblem]:
    packages = dict.fromkeys(name for report in reports.values() for name in report.versions)
    for package in packages:
        hosts: dict[str, list[str]] = {}
        for name, report in reports.items():
            hosts.setdefault(_version(package, report.versions.get(package)), []).append(name)
        if len(hosts) > 1:
            listed = "; ".join(f"{version} on {', '.join(at)}" for version, at in hosts.items())
            yield HostProblem(
                tuple(reports),
                f"{package} differs ({listed}): install the same version on all hosts",
            )


def _version(package: str, version: str | None) -> str:
    """The part of a version that must be the same on all hosts."""
    if version is None:
        return "none"
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition(_BUILD_MARK)[0]


def _room(host: Host, report: HostReport) -> Iterator[HostProblem]:
    """More slots than cores, GPUs or memory."""
    slots = host.slots or report.cores
    if slots > report.cores:
        yield HostProblem(
            (host.name,),
            f"{slots} slots but {counted(report.cores, 'core')}: ranks would share cores, use at "
            f"most {counted(report.cores, 'slot')}",
        )
    if 0 < report.gpus < slots:
        yield HostProblem(
            (host.name,),
            f"{slots} slots but {counted(report.gpus, 'GPU')}: each rank needs its own GPU, use at "
            f"most {counted(report.gpus, 'slot')}",
        )
    if report.memory < slots * _MEMORY_OF_RANK:
        yield HostProblem(
            (host.name,),
            f"{report.memory >> 20} MiB of free memory for {counted(slots, 'rank')}, but each "
            f"takes at least {_MEMORY_OF_RANK >> 20} MiB: end other programs there or use fewer "
            "slots",
        )


def _gpus(reports: Mapping[str, HostReport]) -> Iterator[HostProblem]:
    without = tuple(name for name, report in reports.items() if report.gpus == 0)
    if without and len(without) < len(reports):
        yield HostProblem(
            without,
            "no GPU found there, but other hosts have some: run `nvidia-smi` there, or remove the "
            "host",
        )


def _own_names(reports: Mapping[str, HostReport]) -> Iterator[HostProblem]:
    if len(reports) < 2:
        return
    for name, report in reports.items():
        if report.own_addresses and all(map(_is_loopback, report.own_addresses)):
            yield HostProblem(
                (name,),
                f"its own name, {report.hostname}, resolves to {report.own_addresses[0]} there, "
                "which no other host can reach: in its /etc/hosts map the name to its address in "
                "the network",
            )


def _connections(connections: Reachability) -> Iterator[HostProblem]:
    """Hosts that cannot reach each other."""
    for name in connections.absent:
        yield HostProblem(
            (name,), "did not try to reach the others in time: is it overloaded? Check again"
        )
    for reach in connections.reaches:
        if reach.reached is None and not _is_localhost(reach.target):
            yield HostProblem((reach.source,), f"cannot reach {reach.target}{_reason(reach)}")


def _reason(reach: Reach) -> str:
    if not reach.addresses:
        return ": its name does not resolve there; add it to DNS or to /etc/hosts there"
    tried = ", ".join(
        f"{address} {why}" for address, why in zip(reach.addresses, reach.failures, strict=True)
    )
    if all(map(_is_loopback, reach.addresses)) or ANOTHER_ANSWERS in reach.failures:
        return f": its name means another host there ({tried}); correct DNS or /etc/hosts there"
    return (
        f" ({tried}): is that its address, is there a route to it, and do firewalls allow all TCP "
        "ports between the hosts? Ranks listen on arbitrary ports"
    )


def _clocks(ahead: Mapping[str, float]) -> Iterator[HostProblem]:
    for name, seconds in ahead.items():
        if abs(seconds) > _CLOCK:
            direction = "ahead of" if seconds > 0 else "behind"
            yield HostProblem(
                (name,),
                f"its clock is {abs(seconds):.0f} s {direction} this host's: set all clocks by NTP",
            )


def _is_localhost(name: str) -> bool:
    """Whether a host's name means this host on every host."""
    return name.lower().partition(".")[0] == "localhost" or _is_loopback(name)


def _is_loopback(text: str) -> bool:
    """Whether it is a loopback address; a name is not."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
