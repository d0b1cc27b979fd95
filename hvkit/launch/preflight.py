"""What has to be right before anything is started."""

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hvkit.errors import LaunchError
from hvkit.host.network import Interface, addresses_of, interfaces, is_local, within_host
from hvkit.launch.allocation import HOSTFILE
from hvkit.launch.hosts import Host
from hvkit.launch.launchers import placed
from hvkit.launch.probe import Facts
from hvkit.launch.routes import joining, named, source_address, spanning
from hvkit.launch.shells import shell_of
from hvkit.launch.ssh import ask

# Seconds that each host has to answer.
_ANSWER = 30.0
# Seconds that the names of pods have to get known.
_NAMES = 30.0


@dataclass(frozen=True)
class Site:
    """The hosts of a job, ready to take ranks.

    Attributes:
        hosts: each with as many slots as it gets ranks.
        addresses: where the hosts reach this one.
        joining: an interface of each host that the others reach it through, or those that were
            asked for; empty if none were and the job is on this host alone, or it is not known.
        daemon_networks: networks for connections between all of these hosts and this one.
        crowded: whether a host has more ranks than logical CPUs.
        here: whether all ranks are on this host.
    """

    hosts: tuple[Host, ...]
    addresses: tuple[str, ...]
    joining: tuple[Interface, ...]
    daemon_networks: tuple[str, ...]
    crowded: bool
    here: bool


def examine(
    hosts: Sequence[Host],
    size: int | None,
    system: str | None = None,
    names: Sequence[str] = (),
) -> Site:
    """Choose the hosts for the ranks, and ask each of them whether it is ready.

    Args:
        hosts: where ranks may run; those that name no slots have one for each logical CPU.
        size: the number of ranks; ``None`` for one in each slot.
        system: the batch system that gave the hosts, as in ``Allocation``.
        names: of the interfaces or networks to use between hosts, instead of those found.

    Raises:
        LaunchError: too few slots; a host that cannot be reached, or is named twice, or has no
            such working directory, all problems at once; no such interfaces.
    """
    hosts, facts = _taking_ranks(hosts, size, system)
    _refuse_same(facts)
    crowded = any((host.slots or 0) > facts[host.name].cpus for host in hosts)
    found = {name: host.interfaces for name, host in facts.items()}
    asked = named(names, found) if names else ()
    others = [host.name for host in hosts if not is_local(host.name)]
    if not others:
        return Site(hosts, ("127.0.0.1",), asked, _networks(asked), crowded, here=True)
    sources = _own_addresses(others)
    reached_at = {
        host.name: [str(address) for address in addresses_of(host.name)]
        if host.name in others
        else sources
        for host in hosts
    }
    used = asked or joining(found, reached_at)
    daemon_networks = _also_from_here(used, sources, list(found.values()), bool(asked))
    return Site(hosts, sources, used, daemon_networks, crowded, here=False)


def _also_from_here(
    used: Sequence[Interface],
    sources: Sequence[str],
    of_hosts: Sequence[Sequence[Interface]],
    asked: bool,
) -> tuple[str, ...]:
    """Networks for connections between hosts and this one, which may be in another network.

    Args:
        used: the interfaces between the hosts.
        sources: the addresses of this host that they are reached from.
        of_hosts: the interfaces of each.
        asked: whether the user has named those that are used.
    """
    here = interfaces()
    networks = _networks(used)
    if not used or (asked and any(i.network in networks for i in here)):
        return networks
    # Daemons are built without IPv6.
    ways = [i for i in here if i.address in sources and i.version == 4]
    return spanning([*used, *ways], [*of_hosts, here])


def _networks(used: Sequence[Interface]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(interface.network for interface in used))


def _taking_ranks(
    hosts: Sequence[Host], size: int | None, system: str | None
) -> tuple[tuple[Host, ...], dict[str, Facts]]:
    """The hosts that get ranks, and what they tell about themselves."""
    if all(host.slots is not None for host in hosts):
        chosen = placed(hosts, size)
        return chosen, _facts(chosen, system)
    facts = _facts(hosts, system)
    counted = [
        host if host.slots is not None else replace(host, slots=facts[host.name].cpus)
        for host in hosts
    ]
    chosen = placed(counted, size)
    return chosen, {host.name: facts[host.name] for host in chosen}


def _own_addresses(others: Sequence[str]) -> tuple[str, ...]:
    """Where other hosts reach this one.

    Of hosts that only ssh knows by that name there is no telling; they may try all addresses.

    Raises:
        LaunchError: there is none.
    """
    sources = [source for name in others if (source := source_address(name)) is not None]
    if not sources:
        inside = within_host()
        sources = [
            one.address
            for one in interfaces()
            if not (one.loopback or one.link_local or one.name in inside)
        ]
    if not sources:
        raise LaunchError("this host has no address that others could reach: connect it")
    return tuple(dict.fromkeys(sources))


def _facts(hosts: Sequence[Host], system: str | None) -> dict[str, Facts]:
    """What the hosts tell about themselves, by name."""
    if system == HOSTFILE:
        _wait_for_names(hosts)
    folder = _working_directory()
    # -P: not what happens to lie in the working directory.
    python = [sys.executable, "-P", "-m", "hvkit.launch.probe", folder]
    others = [host for host in hosts if not is_local(host.name)]
    facts = {host.name: Facts.here(folder) for host in hosts if host not in others}
    problems = []
    for answer in ask(others, python, _ANSWER, shell_of(system)):
        name = answer.host.name
        if answer.problem is not None:
            problems.append(f"{name}: {answer.problem}")
        elif answer.status != 0:
            last = (answer.stderr.strip().splitlines() or [f"exit status {answer.status}"])[-1]
            problems.append(
                f"{name}: {sys.executable} there cannot import this hvkit ({last}): install the "
                "same environment in the same place on all hosts"
            )
        else:
            try:
                facts[name] = Facts.read(answer.stdout)
            except (ValueError, TypeError) as error:
                problems.append(f"{name}: {error}: install the same hvkit on all hosts")
    problems += [
        f"{name}: has no folder {folder}, the working directory: share it with all hosts, or start "
        "from one that is on all of them"
        for name, found in facts.items()
        if not found.has_folder
    ]
    if problems:
        raise LaunchError("nothing was started\n" + "\n".join(f"  {line}" for line in problems))
    return {host.name: facts[host.name] for host in hosts}


def _working_directory() -> str:
    try:
        return os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"the working directory, {os.environ.get('PWD', 'of this shell')}, is gone or closed "
            f"({error.strerror}): `cd` to a folder that all hosts have"
        ) from error


def _wait_for_names(hosts: Sequence[Host]) -> None:
    """Pods are ready a moment before their names are known; who waits in vain is told by ssh."""
    deadline = time.monotonic() + _NAMES
    while not all(addresses_of(host.name) for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.5)


def _refuse_same(facts: dict[str, Facts]) -> None:
    """Two names of one host would put more ranks there than it has slots."""
    seen: dict[object, str] = {}
    for name, found in facts.items():
        same = seen.setdefault((found.hostname, found.interfaces), name)
        if same != name:
            raise LaunchError(
                f"{same} and {name} are the same host, {found.hostname}: name it once, with all "
                "its slots"
            )
