"""The networks that join the hosts of a run, computed from the interfaces of each host."""

import ipaddress
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hvkit.errors import UsageError
from hvkit.host.network import Interface


def joining(
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


def named(
    names: Sequence[str], interfaces: Mapping[str, Sequence[Interface]]
) -> tuple[Interface, ...]:
    """The interfaces of each host that the user named; IPv6 only where a host has no IPv4."""
    for name in names:
        if not any(_matches(name, i) for found in interfaces.values() for i in found):
            known = _listed(i for found in interfaces.values() for i in found)
            raise UsageError(f"--interfaces {name}: no host has it; use one of {known}")
    chosen: list[Interface] = []
    for host, found in interfaces.items():
        chosen_here = [i for i in found if any(_matches(name, i) for name in names)]
        if not chosen_here:
            raise UsageError(
                f"--interfaces {','.join(names)}: {host} has none of these, it has "
                f"{_listed(found)}: add one of them"
            )
        chosen += [i for i in chosen_here if i.version == 4] or chosen_here
    return tuple(chosen)


def spanning(used: Sequence[Interface], hosts: Sequence[Sequence[Interface]]) -> tuple[str, ...]:
    """The networks of ``used``, for hosts that are each in at least one of them.

    Open MPI's daemons warn about networks that their host is not in. If a host is not in all of
    them, the result is the smallest network that contains all, unless that contains another
    interface of a host.
    """
    networks = tuple(dict.fromkeys(i.network for i in used))
    if all(any(i.network == network for i in found) for found in hosts for network in networks):
        return networks
    inner = [ipaddress.ip_network(network) for network in networks]
    if len({network.version for network in inner}) > 1:
        return networks
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


def _listed(interfaces: Iterable[Interface]) -> str:
    usable = (i for i in interfaces if i.outward)
    return ", ".join(dict.fromkeys(f"{i.name} ({i.network})" for i in usable)) or "loopback only"


def _in_common_network(interfaces: Mapping[str, Sequence[Interface]]) -> tuple[Interface, ...]:
    outward = {host: [i for i in found if i.outward] for host, found in interfaces.items()}
    times = Counter(i.address for found in outward.values() for i in found)
    unique = {host: [i for i in found if times[i.address] == 1] for host, found in outward.items()}
    shared = set.intersection(*({i.network for i in found} for found in unique.values()))
    if not shared:
        return ()
    # IPv4 first: older MPIs do not support IPv6.
    network = min(shared, key=lambda text: (ipaddress.ip_network(text).version, text))
    return tuple(
        next(interface for interface in found if interface.network == network)
        for found in unique.values()
    )
