"""The network interfaces of this host.

Which names mean this host.
"""

import ipaddress
import socket
from dataclasses import dataclass

import psutil

# What container engines and virtual machines name the networks that they keep within a host.
_WITHIN_HOST = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "cni", "podman", "veth")

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Interface:
    """One address of a network interface that is up.

    Attributes:
        name: the interface, ``eth0``.
        address: IPv4 or IPv6 address, without a zone.
        network: the network that it is in, ``10.0.0.0/24``.
    """

    name: str
    address: str
    network: str

    @property
    def version(self) -> int:
        """Of IP, 4 or 6."""
        return ipaddress.ip_address(self.address).version

    @property
    def loopback(self) -> bool:
        """Whether only this host can reach it."""
        return ipaddress.ip_address(self.address).is_loopback

    @property
    def link_local(self) -> bool:
        """Whether the address means something on one link only."""
        return ipaddress.ip_address(self.address).is_link_local


def interfaces() -> list[Interface]:
    """The addresses of this host's interfaces that are up, loopback among them."""
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
        # Of IPv6, psutil gives the mask as an address, too.
        bits = int(ipaddress.ip_address(netmask.partition("%")[0])).bit_count()
    return Interface(name, address, str(ipaddress.ip_network(f"{address}/{bits}", strict=False)))


def within_host() -> list[str]:
    """The interfaces here, besides loopback, that lead to no other host, as their names tell.

    Each host may have one of the same name and the same address.
    """
    names = {interface.name for interface in interfaces()}
    return sorted(name for name in names if name.startswith(_WITHIN_HOST))


def is_local(name: str) -> bool:
    """Whether a host's name or address is this host.

    A name is this host's if it is the hostname, in full or up to the first dot, or if one of its
    addresses is that of an interface here. A name that does not resolve is not.
    """
    if name.lower() in _own_names():
        return True
    own = {ipaddress.ip_address(interface.address) for interface in interfaces()}
    return any(address in own or address.is_loopback for address in addresses_of(name))


def addresses_of(name: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """The addresses that a name has here, those of IPv4 first; empty if it has none.

    MPI is built without IPv6 almost everywhere.
    """
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    # The zone of a link-local address is this host's own and tells nothing about the name.
    texts = (str(entry[4][0]).partition("%")[0] for entry in found)
    addresses = dict.fromkeys(ipaddress.ip_address(text) for text in texts)
    return sorted(addresses, key=lambda address: address.version)


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], "localhost"}
