"""Before ``hvkit run`` starts anything: chooses the hosts, and checks whether each is ready.

``probe`` runs on every host that gets ranks. Its facts show whether hvkit and the working directory
exist there, and which networks join the hosts. All problems are reported at once. The thorough
check is in ``hosts_check``.
"""

import ipaddress
import os
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hvkit.errors import CannotRunError, LaunchError, UsageError
from hvkit.host.network import (
    Interface,
    addresses_of,
    interfaces,
    is_local,
    source_address,
    within_host,
)
from hvkit.launching.allocation import HOSTFILE
from hvkit.launching.hosts import Host
from hvkit.launching.launchers import Job
from hvkit.launching.probe import Facts, RankCommand
from hvkit.launching.ssh import last_line, remote_shell, run_on_hosts
from hvkit.log import counted

# Seconds for each host to answer.
_ANSWER = 30.0
# Seconds until the names of new pods resolve.
_NAMES = 30.0


def choose_hosts(
    hosts: Sequence[Host],
    size: int | None,
    command: RankCommand,
    system: str | None = None,
    names: Sequence[str] = (),
    least: int | None = None,
    preempted: Collection[str] = (),
    connect: float = 10.0,
) -> Job:
    """Choose the hosts for the ranks, and check that each is ready.

    The interfaces for traffic between hosts are those that the user named, else the interface of
    each host that the others reach it through. With ``least``, hosts that are not ready are left
    out, and so are the ``preempted`` ones if the others suffice; otherwise all hosts with ranks
    must be ready. The job's command is still to be set.
    """
    with_slots = all(host.slots is not None for host in hosts)
    # A host without ranks need not be ready, unless it may take the place of another.
    candidates = hosts_with_ranks(hosts, size) if with_slots and least is None else tuple(hosts)
    facts, left_out = _facts(candidates, command, system, connect)
    ready = [
        replace(host, slots=host.slots or facts[host.name].cpus)
        for host in candidates
        if host.name not in left_out
    ]
    if left_out and (least is None or not ready):
        raise _not_ready(left_out, facts)
    if least is not None:
        if not left_out:  # raises if all are ready but have too few slots
            hosts_with_ranks(ready, size)
        staying = [host for host in ready if host.name not in preempted]
        if _slots(staying) >= least:
            left_out = dict.fromkeys(preempted, "it got SIGTERM") | left_out
            ready = staying
        if _slots(ready) < least:
            raise LaunchError(
                f"the hosts that are ready have {_slots(ready)} slots, but at least {least} ranks "
                f"are needed\n{_listed(left_out)}"
            )
        size = None if size is None else min(size, _slots(ready))
    hosts = hosts_with_ranks(ready, size)
    facts = {host.name: facts[host.name] for host in hosts}
    _refuse_same(facts)
    numbers = ((host.name, host.slots or 0, facts[host.name].cpus) for host in hosts)
    of_hosts = {name: found.interfaces for name, found in facts.items()}
    by_user = named_interfaces(names, of_hosts) if names else ()
    others = [host.name for host in hosts if not is_local(host.name)]
    used = by_user
    addresses: tuple[str, ...] = ("127.0.0.1",)
    if others:
        addresses = _addresses_towards(others)
        reached_at: dict[str, Sequence[str]] = dict.fromkeys(of_hosts, addresses)
        reached_at |= {name: list(map(str, addresses_of(name))) for name in others}
        used = by_user or interfaces_between(of_hosts, reached_at)
    return Job(
        hosts,
        networks=_networks(used),
        interfaces=tuple(dict.fromkeys(interface.name for interface in used)),
        daemon_networks=_daemon_networks(used, addresses, list(of_hosts.values()), bool(by_user)),
        networks_asked_for=bool(names),
        addresses=addresses,
        on_this_host=not others,
        crowded={name: (ranks, cpus) for name, ranks, cpus in numbers if ranks > cpus},
        left_out=left_out,
    )


def hosts_with_ranks(hosts: Sequence[Host], size: int | None) -> tuple[Host, ...]:
    """The hosts that get ranks; ``slots`` becomes the number of ranks on each.

    Ranks fill the slots of a host before the next host gets any, as with mpirun.
    """
    slots = _slots(hosts)
    left = slots if size is None else size
    if left > slots:
        listed = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        raise UsageError(
            f"-np {left} is more than the {counted(slots, 'slot')} of the hosts ({listed}): "
            f"start at most -np {slots}, or add slots"
        )
    chosen: list[Host] = []
    for host in hosts:
        ranks = min(host.slots or 0, left)
        if ranks:
            chosen.append(replace(host, slots=ranks))
        left -= ranks
    return tuple(chosen)


def _slots(hosts: Sequence[Host]) -> int:
    return sum(host.slots or 0 for host in hosts)


def _not_ready(problems: Mapping[str, str], facts: Mapping[str, Facts]) -> LaunchError:
    statuses = {name: found.status for name, found in facts.items()}
    (text, status), *others = {(text, statuses.get(name)) for name, text in problems.items()}
    if others or status is None:
        return LaunchError(f"nothing was started\n{_listed(problems)}")
    where = f" on {', '.join(problems)}" if len(problems) < len(facts) else ""
    return CannotRunError(f"{text}{where}", status)


def _listed(problems: Mapping[str, str]) -> str:
    return "\n".join(f"  {name}: {problem}" for name, problem in problems.items())


def _facts(
    hosts: Sequence[Host], command: RankCommand, system: str | None, connect: float
) -> tuple[dict[str, Facts], dict[str, str]]:
    """By name, the facts about each host that answers, and the problem of each that is not ready.

    Probes all of them at once.
    """
    if system == HOSTFILE:
        _wait_for_names(hosts)
    folder = working_directory()
    # -P: modules in the working directory must not shadow installed ones.
    python = [sys.executable, "-P", "-m", "hvkit.launching.probe", folder]
    python += [command.path, command.program, command.script]
    others = [host for host in hosts if not is_local(host.name)]
    facts = {host.name: Facts.here(folder, command) for host in hosts if host not in others}
    problems: dict[str, str] = {}
    for answer in run_on_hosts(others, python, _ANSWER, remote_shell(system, connect)):
        name = answer.host.name
        if answer.problem is not None:
            problems[name] = answer.problem
        elif answer.status != 0:
            last = last_line(answer.stderr) or f"exit status {answer.status}"
            problems[name] = (
                f"{sys.executable} there cannot import this hvkit ({last}): install the same "
                "environment in the same place on all hosts"
            )
        else:
            try:
                facts[name] = Facts.read(answer.stdout)
            except (ValueError, TypeError) as error:
                problems[name] = f"{error}: install the same hvkit on all hosts"
    problems |= {name: found.problem for name, found in facts.items() if found.problem}
    return facts, problems


def _wait_for_names(hosts: Sequence[Host]) -> None:
    """Wait for the names of pods, which resolve only a moment after the pods are ready.

    After that, ssh reports the names that do not resolve.
    """
    deadline = time.monotonic() + _NAMES
    while not all(addresses_of(host.name) for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.5)


def working_directory() -> str:
    """The folder of this process, in which ranks start."""
    try:
        return os.getcwd()
    except OSError as error:
        # Not PWD, which stays the shell's when a program goes to another folder.
        folder = os.readlink("/proc/self/cwd").removesuffix(" (deleted)")
        raise LaunchError(
            f"the working directory, {folder}, was removed or is not accessible "
            f"({error.strerror}): `cd` to a folder that all hosts have"
        ) from error


def _refuse_same(facts: dict[str, Facts]) -> None:
    """Reject two names of one host, which would get more ranks than it has slots."""
    seen: dict[object, str] = {}
    for name, found in facts.items():
        same = seen.setdefault((found.hostname, found.interfaces), name)
        if same != name:
            raise LaunchError(
                f"{same} and {name} are the same host, {found.hostname}: name it once, with all "
                "its slots"
            )


def _addresses_towards(others: Sequence[str]) -> tuple[str, ...]:
    """Addresses of this host that the others reach it at.

    If only ssh knows the names of the others, all addresses of this host are candidates.
    """
    sources = [source for name in others if (source := source_address(name)) is not None]
    if not sources:
        inside = within_host()
        sources = [one.address for one in interfaces() if one.outward and one.name not in inside]
    if not sources:
        raise LaunchError(
            "this host has no address that others could reach: connect it to their network"
        )
    return tuple(dict.fromkeys(sources))


def _daemon_networks(
    used: Sequence[Interface],
    sources: Sequence[str],
    of_hosts: Sequence[Sequence[Interface]],
    by_user: bool,
) -> tuple[str, ...]:
    """Networks for connections between the hosts and this one, which may be in another network."""
    here = [i for i in interfaces() if i.version == 4]
    networks = _networks(used)
    if not used or (by_user and any(i.network in networks for i in here)):
        return networks
    towards_hosts = [i for i in here if i.address in sources]
    return common_networks([*used, *towards_hosts], [*of_hosts, here])


def _networks(used: Sequence[Interface]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(interface.network for interface in used))


def interfaces_between(
    interfaces: Mapping[str, Sequence[Interface]], reached_at: Mapping[str, Sequence[str]]
) -> tuple[Interface, ...]:
    """The interface of each host that the other hosts reach it through; empty if unknown.

    It is the interface with the address that the host is reached at. If a host has no such
    interface, for example behind network address translation, the result is each host's interface
    in one network that all hosts share, each with a different address. Container networks inside a
    host, such as docker0, do not count: they have the same address on every host.
    """
    chosen = [
        next((i for at in reached_at[host] for i in found if i.outward and i.address == at), None)
        for host, found in interfaces.items()
    ]
    known = tuple(interface for interface in chosen if interface is not None)
    return known if len(known) == len(chosen) else _in_common_network(interfaces)


def named_interfaces(
    names: Sequence[str], interfaces: Mapping[str, Sequence[Interface]]
) -> tuple[Interface, ...]:
    """The interfaces of each host that the user named."""
    for name in names:
        if not any(_matches(name, i) for found in interfaces.values() for i in found):
            known = _listed_interfaces(i for found in interfaces.values() for i in found)
            raise UsageError(f"--interfaces {name}: no host has it; use one of {known}")
    chosen: list[Interface] = []
    for host, found in interfaces.items():
        chosen_here = [i for i in found if any(_matches(name, i) for name in names)]
        if not chosen_here:
            raise UsageError(
                f"--interfaces {','.join(names)}: {host} has none of these, it has "
                f"{_listed_interfaces(found)}: add one of them"
            )
        chosen += chosen_here
    return tuple(chosen)


def common_networks(
    used: Sequence[Interface], hosts: Sequence[Sequence[Interface]]
) -> tuple[str, ...]:
    """The networks of ``used``, for hosts that are each in at least one of them.

    Open MPI's daemons warn about networks that their host is not in. If a host is not in all of
    them, the result is the smallest network that contains all, unless that contains another
    interface of a host.
    """
    networks = tuple(dict.fromkeys(i.network for i in used))
    if all(any(i.network == network for i in found) for found in hosts for network in networks):
        return networks
    inner = [ipaddress.ip_network(network) for network in networks]
    around = inner[0]
    while not all(network.network_address in around for network in inner):
        around = around.supernet()
    others = [i.address for found in hosts for i in found if i.network not in networks]
    has_others = any(ipaddress.ip_address(other) in around for other in others)
    return networks if has_others else (str(around),)


def _matches(name: str, interface: Interface) -> bool:
    if interface.link_local:
        return False
    if "/" not in name:
        return name == interface.name
    try:
        network = ipaddress.ip_network(name, strict=False)
    except ValueError:
        return False
    return ipaddress.ip_address(interface.address) in network


def _listed_interfaces(interfaces: Iterable[Interface]) -> str:
    usable = (i for i in interfaces if i.outward)
    return ", ".join(dict.fromkeys(f"{i.name} ({i.network})" for i in usable)) or "loopback only"


def _in_common_network(interfaces: Mapping[str, Sequence[Interface]]) -> tuple[Interface, ...]:
    outward = {host: [i for i in found if i.outward] for host, found in interfaces.items()}
    times = Counter(i.address for found in outward.values() for i in found)
    unique = {host: [i for i in found if times[i.address] == 1] for host, found in outward.items()}
    shared = set.intersection(*({i.network for i in found} for found in unique.values()))
    if not shared:
        return ()
    network = min(shared)
    return tuple(
        next(interface for interface in found if interface.network == network)
        for found in unique.values()
    )
