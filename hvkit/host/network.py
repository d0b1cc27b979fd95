"""This host's network interfaces and names, and the networks that join the hosts of a run."""

import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import psutil

from hvkit.errors import UsageError

# Names that container engines and virtual machines give to networks within a host.
_WITHIN_HOST = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "cni", "podman", "veth")

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Interface:
    """One address of a network interface that is up.

    Attributes:
        name: the interface, ``eth0``.
        address: IPv4 or IPv6 address, without a zone.
        network: its network, ``10.0.0.0/24``.
    """

    name: str
    address: str
    network: str

    @property
    def version(self) -> int:
        """IP version, 4 or 6."""
        return ipaddress.ip_address(self.address).version

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def link_local(self) -> bool:
        """Whether the address is valid on one link only."""
        return ipaddress.ip_address(self.address).is_link_local

    @property
    def outward(self) -> bool:
        """Whether other hosts may reach it: it is neither loopback nor valid on one link only."""
        return not self.loopback and not self.link_local


def interfaces() -> list[Interface]:
    """The addresses of this host's interfaces that are up, including loopback."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return [
        _interface(name, address.address.partition("%")[0], address.netmask)
        for name, addresses in psutil.net_if_addrs().items()
        if name in up
        for address in addresses
        if address.family in _FAMILIES
    ]


def _interface(name: str, address: str, netmask: str | None) -> Interface:
    bits: int = ipaddress.ip_address(address).max_prefixlen
    if netmask is not None:
        # psutil gives the mask of IPv6 as an address, too.
        bits = int(ipaddress.ip_address(netmask.partition("%")[0])).bit_count()
    return Interface(name, address, str(ipaddress.ip_network(f"{address}/{bits}", strict=False)))


def within_host() -> list[str]:
    """The interfaces other than loopback that lead to no other host, judged by their names.

    Several hosts may have one with the same name and the same address.
    """
    names = {interface.name for interface in interfaces()}
    return sorted(name for name in names if name.startswith(_WITHIN_HOST))


def addresses_for_others() -> tuple[str, ...]:
    """This host's addresses that other hosts may reach, likely ones first."""
    inside = set(within_host())
    usable = [each for each in interfaces() if each.outward]
    usable.sort(key=lambda each: (each.name in inside, each.version))
    return tuple(each.address for each in usable) or ("127.0.0.1",)


def interface_towards(address: str, port: int, seconds: float) -> str | None:
    """The name of the interface through which a listening address is reached.

    Args:
        address: an IP address.
        port: where something listens.
        seconds: how long to try.

    Returns:
        None if it is not reached.
    """
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            source = connection.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return name_of_interface(source)


def interface_of(address: str) -> str:
    """The name of the interface with this address of this host.

    Raises:
        ValueError: there is none.
    """
    if found := name_of_interface(address):
        return found
    raise ValueError(f"no interface of {socket.gethostname()} has the address {address}")


def name_of_interface(address: str) -> str | None:
    """The name of the interface with this address of this host; None if there is none."""
    return next((each.name for each in interfaces() if each.address == address), None)


def is_local(name: str) -> bool:
    """Whether a name or address refers to this host.

    It does if it is the hostname, in full or up to the first dot, or if one of its addresses
    belongs to an interface of this host. A name that does not resolve refers to another host.
    """
    if name.lower() in _own_names():
        return True
    local = {ipaddress.ip_address(interface.address) for interface in interfaces()}
    return any(address in local or address.is_loopback for address in addresses_of(name))


def addresses_of(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses to which a name resolves here, IPv4 first; empty if it does not resolve.

    IPv4 comes first because most MPIs are built without IPv6.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # The zone of a link-local address belongs to this host, not to the name.
    texts = (str(entry[4][0]).partition("%")[0] for entry in found)
    addresses = dict.fromkeys(ipaddress.ip_address(text) for text in texts)
    return sorted(addresses, key=lambda address: address.version)


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], "localhost"}


def source_address(destination: str) -> str | None:
    """The address of this host that connections to ``destination`` come from.

    Sends nothing. ``None`` if there is no route.
    """
    for address in addresses_of(destination):
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(address), 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None


def joining(
    interfaces: Mapping[str, Sequence[Interface]], reached_at: Mapping[str, Sequence[str]]
) -> tuple[Interface, ...]:
    """The interface of each host that the other hosts reach it through; empty if unknown.

    It is the interface with the address that the host is reached at. If a host has no such
    interface, for example behind network address translation, the result is each host's interface
    in one network that all hosts share, each with a different address. Container networks inside a
    host, such as docker0, do not count: they have the same address on every host.

    Args:
        interfaces: by host.
        reached_at: by host, the addresses that it is reached at, the best first.
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
    """The interfaces of each host that the user named; IPv6 only where a host has no IPv4.

    Args:
        names: interfaces, or networks such as ``10.0.0.0/24``.
        interfaces: by host.

    Raises:
        UsageError: no host has one of them, or a host has none of them.
    """
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

    Args:
        used: the interfaces to use.
        hosts: all interfaces of each host.
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
