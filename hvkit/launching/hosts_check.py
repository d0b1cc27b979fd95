"""``hvkit hosts --check``: whether hosts are ready for ranks.

``check`` collects the report of ``hvkit doctor`` from every host, lets all hosts connect to each
other (``reachability``), and finds the problems in the results.
"""

import ipaddress
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkit.host.hardware import within_limit
from hvkit.host.network import Interface
from hvkit.launching.hosts import Host
from hvkit.launching.reachability import ANOTHER_ANSWERS, Reach, Reachability, connect_all
from hvkit.launching.ssh import Answer, RemoteShell, last_line, remote_shell, run_on_hosts
from hvkit.log import counted

# Seconds. Python starts slowly from a cold network file system.
_TIMEOUT = 60.0
# The format of the doctor's report that is read here.
_FORMAT = 1
# MiB. A rank with a framework loaded takes some hundred before it has any data.
_MEMORY_OF_RANK = 512
# Seconds. A smaller difference may be due to the slow start of the program that prints the time.
_CLOCK = 20.0
# In Horovod's version, what follows is a hash of its build, which may differ with the compiler.
_BUILD_MARK = "+hvkit"


@dataclass(frozen=True)
class Examined:
    """A host, and what is known about it."""

    host: Host
    report: Mapping[str, Any] | None  # of ``hvkit doctor`` there
    problem: str | None = None  # why there is no report, with the fix

    @property
    def cores(self) -> int:
        """Logical CPUs that ranks can use there."""
        cores = self.report["cores"] if self.report else None
        return within_limit(cores["usable"], cores["limit"]) if cores else 0


@dataclass(frozen=True)
class HostProblem:
    """A problem that keeps ranks from running, or from running well, with the fix."""

    hosts: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{', '.join(self.hosts)}: {self.text}"


@dataclass(frozen=True)
class Checked:
    examined: tuple[Examined, ...]
    interfaces: dict[str, str]  # by host, the interface and address that it reached others from
    problems: tuple[HostProblem, ...]


def check(hosts: Sequence[Host], system: str | None = None) -> Checked:
    """Check every host and the connections between every two of them, within minutes."""
    shell = remote_shell(system)
    examined = collect_reports(hosts, shell)
    running = [one.host for one in examined if one.report is not None]
    connections = connect_all(running, shell) if len(running) > 1 else Reachability()
    interfaces = {
        reach.source: f"{reach.interface} {reach.own_address}"
        for reach in reversed(connections.reaches)
        if reach.interface is not None
    }
    return Checked(tuple(examined), interfaces, tuple(problems(examined, connections)))


def collect_reports(hosts: Sequence[Host], shell: RemoteShell) -> list[Examined]:
    """Run ``hvkit doctor`` on all hosts at once, with the path of this process's Python."""
    command = [sys.executable, "-P", "-m", "hvkit", "doctor", "--json", "--no-self-test"]
    return [_examined(answer) for answer in run_on_hosts(hosts, command, _TIMEOUT, shell)]


def _examined(answer: Answer) -> Examined:
    if answer.problem is not None:
        return Examined(answer.host, None, answer.problem)
    try:
        return Examined(answer.host, read_report(answer.stdout))
    except ValueError as error:
        # The last line of a traceback explains more than "printed no report".
        why = last_line(answer.stderr) or str(error)
        problem = (
            f"hvkit does not run there as it does here ({why}): every host needs the same "
            f"environment at the same path, {sys.prefix}"
        )
        return Examined(answer.host, None, problem)


def read_report(output: str) -> dict[str, Any]:
    """The report in the output of ``hvkit doctor --json``.

    The start and logout files of a shell may print text around it.
    """
    start = output.find("{\n")
    if start < 0:
        raise ValueError("it printed no report")
    report: dict[str, Any]
    try:
        report, _ = json.JSONDecoder().raw_decode(output, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"its report is invalid ({error})") from None
    if report.get("format") != _FORMAT:
        raise ValueError(f"its report has format {report.get('format')!r}, not {_FORMAT}")
    return report


def problems(examined: Sequence[Examined], connections: Reachability) -> list[HostProblem]:
    """All problems; the same text for several hosts is one problem."""
    reports = {one.host.name: one.report for one in examined if one.report is not None}
    names_of: dict[str, list[str]] = {}
    for names, text in itertools.chain(
        *(_of_host(one, examined) for one in examined),
        _same_host(reports),
        _versions(reports),
        *(_of_report(one, reports) for one in examined if one.report is not None),
        _connections(connections),
    ):
        listed = names_of.setdefault(text, [])
        listed.extend(name for name in names if name not in listed)
    return [HostProblem(tuple(names), text) for text, names in names_of.items()]


# Names of hosts, and their problem.
_Found = Iterator[tuple[Sequence[str], str]]


def _of_host(one: Examined, examined: Sequence[Examined]) -> _Found:
    names = [one.host.name]
    if one.problem:
        yield names, one.problem
    if len(examined) > 1 and _is_localhost(one.host.name):
        text = "means a different host on every host: use the name that the others reach it by"
        yield names, text


def _same_host(reports: Mapping[str, Mapping[str, Any]]) -> _Found:
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name, report in reports.items():
        found = (Interface(**each) for each in report["interfaces"])
        outer = sorted(each.address for each in found if not each.loopback)
        names_of.setdefault((report["hostname"], *outer), []).append(name)
    for (hostname, *_), names in names_of.items():
        if len(names) > 1:
            yield names, f"are one host, {hostname}: name it once, with all its slots"


def _versions(reports: Mapping[str, Mapping[str, Any]]) -> _Found:
    versions = {name: {**one["versions"], "MPI": _mpi(one)} for name, one in reports.items()}
    for package in dict.fromkeys(package for of_host in versions.values() for package in of_host):
        hosts: dict[str, list[str]] = {}
        for name, of_host in versions.items():
            hosts.setdefault(_version(package, of_host.get(package)), []).append(name)
        if len(hosts) > 1:
            listed = "; ".join(f"{version} on {', '.join(at)}" for version, at in hosts.items())
            text = f"{package} differs ({listed}): install the same version on all hosts"
            yield list(reports), text


def _of_report(one: Examined, reports: Mapping[str, Mapping[str, Any]]) -> _Found:
    names, report = [one.host.name], reports[one.host.name]
    gpus, addresses = len(report["gpus"]), report["addresses"]
    slots = one.host.slots or one.cores
    for thing, number, why in (
        ("core", one.cores, "ranks would share cores"),
        ("GPU", gpus, "each rank needs its own GPU"),
    ):
        if 0 < number < slots:
            most = f"use at most {counted(number, 'slot')}"
            yield names, f"{slots} slots but {counted(number, thing)}: {why}, {most}"
    memory = report["memory"]["available"] >> 20
    if memory < slots * _MEMORY_OF_RANK:
        text = (
            f"{memory} MiB of free memory for {counted(slots, 'rank')}, but each takes at least "
            f"{_MEMORY_OF_RANK} MiB: end other programs there or use fewer slots"
        )
        yield names, text
    if not gpus and any(other["gpus"] for other in reports.values()):
        fix = "run `nvidia-smi` there, or remove the host"
        yield names, f"no GPU found there, but other hosts have some: {fix}"
    if len(reports) > 1 and addresses and all(map(_is_loopback, addresses)):
        text = (
            f"its own name, {report['hostname']}, resolves to {addresses[0]} there, which no other "
            "host can reach: in its /etc/hosts map the name to its address in the network"
        )
        yield names, text
    for problem in report["problems"]:
        yield names, f"{problem['what']}: {problem['fix']}"


def _connections(connections: Reachability) -> _Found:
    for name in connections.absent:
        yield [name], "did not try to reach the others in time: is it overloaded? Check again"
    for reach in connections.reaches:
        if reach.reached is None and not _is_localhost(reach.target):
            yield [reach.source], f"cannot reach {reach.target}{_reason(reach)}"
    for name, seconds in connections.ahead.items():
        if abs(seconds) > _CLOCK:
            off = f"{abs(seconds):.0f} s {'ahead of' if seconds > 0 else 'behind'} this host's"
            yield [name], f"its clock is {off}: set all clocks by NTP"


def _reason(reach: Reach) -> str:
    if not reach.addresses:
        return ": its name has no IPv4 address there; add it to DNS or to /etc/hosts there"
    tried = ", ".join(map(" ".join, zip(reach.addresses, reach.failures, strict=True)))
    if all(map(_is_loopback, reach.addresses)) or ANOTHER_ANSWERS in reach.failures:
        return f": its name means another host there ({tried}); correct DNS or /etc/hosts there"
    return (
        f" ({tried}): is that its address, is there a route to it, and do firewalls allow all TCP "
        "ports between the hosts? Ranks listen on arbitrary ports"
    )


def _mpi(report: Mapping[str, Any]) -> str | None:
    mpi = report["mpi"]
    return f"{mpi['flavour']} {mpi['version']}" if mpi else None


def _version(package: str, version: str | None) -> str:
    """The part of a version that must be the same on all hosts."""
    if version is None:
        return "none"
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition(_BUILD_MARK)[0]


def _is_localhost(name: str) -> bool:
    """Whether a host's name means this host on every host."""
    return name.lower().partition(".")[0] == "localhost" or _is_loopback(name)


def _is_loopback(text: str) -> bool:
    """Whether it is a loopback address; a name is not."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
