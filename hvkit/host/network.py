"""This host's network interfaces and names."""

import ipaddress
import socket
from dataclasses import dataclass

import psutil

# Names that container engines and virtual machines give to networks within a host.
_WITHIN_HOST = ("docker", "br-", "virbr", "lxcbr", "lxdbr", "cni", "podman", "veth")

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


@dataclass(frozen=True)
class Interface:
    """One address of a network interface that is up."""

    name: str
    address: str  # IPv4 or IPv6, without a zone
    network: str  # such as 10.0.0.0/24

    @property
    def version(self) -> int:
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
    return sorted({each.name for each in interfaces() if each.name.startswith(_WITHIN_HOST)})


def addresses_for_others() -> tuple[str, ...]:
    """This host's addresses that other hosts may reach, likely ones first."""
    inside = set(within_host())
    found = sorted(interfaces(), key=lambda each: (each.name in inside, each.version))
    return tuple(each.address for each in found if each.outward) or ("127.0.0.1",)


def interface_towards(address: str, port: int, seconds: float) -> str | None:
    """The name of the interface through which a listening address is reached."""
    try:
        with socket.create_connection((address, port), timeout=seconds) as connection:
            source = connection.getsockname()[0].partition("%")[0]
    except OSError:
        return None
    return name_of_interface(source)


def name_of_interface(address: str) -> str | None:
    """The name of this host's interface with this address."""
    return next((each.name for each in interfaces() if each.address == address), None)


def is_local(name: str) -> bool:
    """Whether a name or address refers to this host.

    It does if it is the hostname, in full or up to the first dot, or if one of its addresses
    belongs to an interface of this host. A name that does not resolve refers to another host.
    """
    host = socket.gethostname().lower()
    if name.lower() in (host, host.partition(".")[0], "localhost"):
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


def source_address(destination: str) -> str | None:
    """The address of this host that connections to ``destination`` come from; sends nothing."""
    for address in addresses_of(destination):
        family = socket.AF_INET if address.version == 4 else socket.AF_INET6
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((str(address), 9))
            except OSError:
                continue
            return str(probe.getsockname()[0])
    return None
