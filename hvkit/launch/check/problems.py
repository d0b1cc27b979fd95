"""What is wrong with hosts, from what they told: plain functions, one for each kind of trouble."""

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvkit.launch.check.asking import Examined
from hvkit.launch.check.facts import Facts
from hvkit.launch.check.meeting import Met, Reach
from hvkit.launch.check.talk import ANOTHER_ANSWERS
from hvkit.launch.hosts import Host
from hvkit.launch.wording import counted

# A rank with a framework loaded takes some hundred MiB before it has any data.
_MEMORY_OF_RANK = 512 * 2**20
# Seconds; what a slow start of a program makes up, and more.
_CLOCK = 20.0
# Horovod's version ends in a mark of its build, which may differ with the compiler.
_BUILD_MARK = "+hvkit"


@dataclass(frozen=True)
class Problem:
    """Something that keeps ranks from running, or from running right.

    Attributes:
        hosts: names of the hosts that have it.
        text: what it is and what to do.
    """

    hosts: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{', '.join(self.hosts)}: {self.text}"


def problems(examined: Sequence[Examined], met: Met) -> list[Problem]:
    """All that is wrong; what several hosts have in the same words is one problem.

    Args:
        examined: what each host told.
        met: how the hosts reached each other.
    """
    facts = {one.host.name: one.facts for one in examined if one.facts is not None}
    hosts = [one.host for one in examined]
    found = [
        *(Problem((one.host.name,), one.problem) for one in examined if one.problem is not None),
        *_localhost(hosts),
        *_same_host(facts),
        *_versions(facts),
        *(p for host in hosts if host.name in facts for p in _room(host, facts[host.name])),
        *_gpus(facts),
        *_own_names(facts),
        *_ways(met),
        *_clocks(met.ahead),
        *(Problem((name,), text) for name, one in facts.items() for text in one.problems),
    ]
    together: dict[str, list[str]] = {}
    for problem in found:
        names = together.setdefault(problem.text, [])
        names.extend(name for name in problem.hosts if name not in names)
    return [Problem(tuple(names), text) for text, names in together.items()]


def _localhost(hosts: Sequence[Host]) -> Iterator[Problem]:
    for host in hosts:
        if len(hosts) > 1 and _means_itself(host.name):
            yield Problem(
                (host.name,),
                "means every host itself, so the others cannot reach it: write this host's name",
            )


def _same_host(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    seen: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, one in facts.items():
        seen.setdefault((one.hostname, tuple(sorted(one.outward))), []).append(name)
    for names in seen.values():
        if len(names) > 1:
            yield Problem(tuple(names), "are one host: name it once, with all its slots")


def _versions(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    packages = dict.fromkeys(name for one in facts.values() for name in one.versions)
    for package in packages:
        hosts: dict[str, list[str]] = {}
        for name, one in facts.items():
            hosts.setdefault(_shown(package, one.versions.get(package)), []).append(name)
        if len(hosts) > 1:
            listed = "; ".join(f"{version} on {', '.join(at)}" for version, at in hosts.items())
            yield Problem(
                tuple(facts), f"{package} differs ({listed}): install the same version on all hosts"
            )


def _shown(package: str, version: str | None) -> str:
    if version is None:
        return "none"
    if package == "python":
        return ".".join(version.split(".")[:2])
    return version.partition(_BUILD_MARK)[0]


def _room(host: Host, facts: Facts) -> Iterator[Problem]:
    """Slots without the cores, GPUs or memory for them."""
    slots = host.slots or facts.cores
    if slots > facts.cores:
        yield Problem(
            (host.name,),
            f"{slots} slots but {counted(facts.cores, 'core')}: ranks would take turns, name at "
            f"most {counted(facts.cores, 'slot')}",
        )
    if 0 < facts.gpus < slots:
        yield Problem(
            (host.name,),
            f"{slots} slots but {counted(facts.gpus, 'GPU')}: each rank takes a GPU of its own, "
            f"name at most {counted(facts.gpus, 'slot')}",
        )
    if facts.memory < slots * _MEMORY_OF_RANK:
        yield Problem(
            (host.name,),
            f"{facts.memory >> 20} MiB of memory are free for {counted(slots, 'rank')}, of which "
            f"each takes {_MEMORY_OF_RANK >> 20} MiB and more: end other programs there or name "
            "fewer slots",
        )


def _gpus(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    without = tuple(name for name, one in facts.items() if one.gpus == 0)
    if without and len(without) < len(facts):
        yield Problem(
            without,
            "no GPU is seen there, other hosts have some: see what `nvidia-smi` says there, or "
            "leave the host out",
        )


def _own_names(facts: Mapping[str, Facts]) -> Iterator[Problem]:
    if len(facts) < 2:
        return
    for name, one in facts.items():
        if one.own_addresses and all(map(_loops, one.own_addresses)):
            yield Problem(
                (name,),
                f"its own name, {one.hostname}, means {one.own_addresses[0]} there, where no other "
                "host finds it: in its /etc/hosts give the name its address in the network",
            )


def _ways(met: Met) -> Iterator[Problem]:
    """Two hosts of which one cannot reach the other."""
    for name in met.absent:
        yield Problem(
            (name,), "did not try to reach the others in time: is it overloaded? Check once more"
        )
    for reach in met.reaches:
        if reach.reached is None and not _means_itself(reach.target):
            yield Problem((reach.source,), f"cannot reach {reach.target}{_reason(reach)}")


def _reason(reach: Reach) -> str:
    if not reach.addresses:
        return ": its name does not resolve there; add it to DNS or to /etc/hosts there"
    tried = ", ".join(
        f"{address} {why}" for address, why in zip(reach.addresses, reach.failures, strict=True)
    )
    if all(map(_loops, reach.addresses)) or ANOTHER_ANSWERS in reach.failures:
        return f": its name means another host there ({tried}); correct DNS or /etc/hosts there"
    return (
        f" ({tried}): is that its address, does a route lead there, and do firewalls pass all TCP "
        "between the hosts? Ranks connect on ports of their own choice"
    )


def _clocks(ahead: Mapping[str, float]) -> Iterator[Problem]:
    for name, seconds in ahead.items():
        if abs(seconds) > _CLOCK:
            direction = "ahead of" if seconds > 0 else "behind"
            yield Problem(
                (name,),
                f"its clock is {abs(seconds):.0f} s {direction} this host's: let NTP set all "
                "clocks",
            )


def _means_itself(name: str) -> bool:
    """Whether the name of a host means, on every host, that host."""
    return name.lower().partition(".")[0] == "localhost" or _loops(name)


def _loops(text: str) -> bool:
    """Whether it is an address within a host; a name is not."""
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False
